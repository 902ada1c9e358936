"""explain: figures that agree with the simulation; diff: what differs and nothing else."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import autoptd
from autoptd import Cluster
from autoptd.runtime.program.mesh import Mesh
from samples.gpt import GPT, GPTConfig
from tests.models import MIDDLE, tiny

compile_gpt = partial(tiny, config=MIDDLE, dtype=torch.bfloat16, device="meta", microbatch_size=2, num_microbatches=4)


def test_the_explanation_agrees_with_the_simulation() -> None:
    program = compile_gpt((2, 2, 2))
    simulated, explained = program.simulate("dgx-a100"), program.explain()
    assert explained.simulation.step_seconds == simulated.step_seconds
    assert explained.bubble_ideal == 1 / 8
    assert explained.work_seconds[simulated.critical_rank] == max(explained.work_seconds)
    assert explained.exposed["tensor"] == simulated.breakdown["tensor"]
    text = str(explained)
    words = "critical is pipeline rank", "bubble costs", "nothing hides", "with 3 model chunks"
    for word in words:
        assert word in text


def test_changes_are_what_the_changed_program_takes() -> None:
    changes = {change.what: change for change in compile_gpt((1, 2, 2)).explain().changes}
    more = changes["6 microbatches for 4 (a larger batch)"]
    tensor = changes["2 tensor ranks for 1, and half the replicas"]
    chunk = changes["3 model chunks for 2"]
    for change, mesh, m, v in ((more, (1, 2, 2), 6, 2), (tensor, (2, 2, 1), 8, 2), (chunk, (1, 2, 2), 4, 3)):
        program = compile_gpt(mesh, num_microbatches=m, num_model_chunks=v)
        assert str(change).endswith(f"{change.memory_bytes / 1e9:.3g} GB on the fullest rank")
        assert change.step_seconds == pytest.approx(program.simulate("dgx-a100").step_seconds, rel=0.005)


@pytest.mark.parametrize(("by_tokens", "what"), [(True, "whole"), (False, "divided")])
def test_sequence_parallelism_is_compared_with_the_other_way(by_tokens: bool, what: str) -> None:
    program, other = (compile_gpt((2, 2, 1), sequence_parallel=way) for way in (by_tokens, not by_tokens))
    change = next(c for c in program.explain().changes if c.what == f"{what} tokens between divided regions")
    simulated = other.simulate("dgx-a100")
    assert change.step_seconds == pytest.approx(simulated.step_seconds, rel=0.005)
    assert change.memory_bytes == pytest.approx(max(simulated.memory_bytes), rel=0.01)


@pytest.mark.parametrize(
    "options",
    [
        {"recompute": 2},
        *(
            pytest.param(options, marks=pytest.mark.slow)
            for options in ({}, {"fuse": False}, {"layout": "bsh"}, {"recompute": "full"})
        ),
    ],
)
def test_estimates_are_with_the_programs_own_options(options: dict[str, object]) -> None:
    """One microbatch more on one pipeline rank, which nothing is cut for, is what that program takes exactly."""
    program, larger = (compile_gpt((2, 1, 1), num_microbatches=m, **options) for m in (4, 5))
    cluster = Cluster.load("dgx-a100")
    (more,) = (change for change in program.explain(cluster).changes if "5 microbatches for 4" in change.what)
    step = larger.simulate(cluster)
    assert more.step_seconds == pytest.approx(step.step_seconds, rel=1e-6)
    assert more.memory_bytes == pytest.approx(max(step.memory_bytes), rel=1e-6)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_memory_of_stages_that_begin_within_a_recomputed_layer_is_estimated(schedule: str) -> None:
    """It takes what is received, beside the residual, as the layer's first half took one value."""
    options: dict[str, Any] = {"num_model_chunks": 1, "schedule": schedule, "recompute": "full"}
    program, larger = (compile_gpt((1, 3, 1), num_microbatches=m, **options) for m in (6, 7))
    names = [{value.name for value in stage.sends} for stage in program.manifest.stages]
    assert any(len(sent) > 1 for sent in names)
    change = next(c for c in program.explain().changes if "(a larger batch)" in c.what)
    assert change.memory_bytes == pytest.approx(max(larger.simulate("dgx-a100").memory_bytes), rel=0.002)


@pytest.mark.parametrize("how", [{"zero": 1}, {"overlap": False, "wide_gradients": False}], ids=str)
def test_estimates_are_of_a_step_that_is_run_alike(how: dict[str, Any]) -> None:
    program, larger = (compile_gpt((2, 1, 2), num_microbatches=m) for m in (4, 5))
    (more,) = (c for c in program.explain(**how).changes if "5 microbatches for 4" in c.what)
    step = larger.simulate("dgx-a100", **how)
    assert more.step_seconds == pytest.approx(step.step_seconds, rel=1e-6)
    assert more.memory_bytes == pytest.approx(max(step.memory_bytes), rel=1e-6)


def test_a_loaded_program_has_the_same_changes_with_the_model(tmp_path: Path) -> None:
    """Without it, those that leave its texts as they are."""
    program = compile_gpt((2, 2, 2), recompute="full")
    program.save(tmp_path / "saved")
    alone, loaded = autoptd.load(tmp_path / "saved"), autoptd.load(tmp_path / "saved", program.model)
    own, explained = program.explain(), alone.explain()
    assert loaded.explain().changes == own.changes
    assert loaded.explain().lines[-1] == own.lines[-1]
    assert explained.changes[1] == own.changes[0]  # zero=1
    (larger,) = (change for change in own.changes if not change.trains_alike)
    assert explained.changes[0].what == larger.what
    assert explained.changes[0].step_seconds == pytest.approx(larger.step_seconds, rel=0.02)
    assert "with other settings: not estimated, because the estimate needs the model" in str(explained)
    assert re.search(r"critical is pipeline rank \d \((wte|h\.\d)[.\w]* to ", str(explained))
    with pytest.raises(ValueError, match=r"the program lacks .*give the model that was compiled"):
        autoptd.load(tmp_path / "saved", torch.nn.Linear(2, 2, device="meta"))


def test_the_conclusion_recommends_the_fastest_change_that_fits() -> None:
    explained = compile_gpt((1, 2, 2)).explain()
    names = {change.what for change in explained.changes if change.seconds_per_sequence < 0.99}
    best = explained.recommended
    assert best is not None
    assert best.trains_alike
    assert best.what in names
    assert explained.lines[-1] == f"recommended: {best}"
    slower = tuple(replace(change, seconds_per_sequence=1.0) for change in explained.changes)
    assert "no other setting here saves 1%" in replace(explained, changes=slower).conclusion
    small = replace(explained.simulation.cluster.device, memory_bytes=best.memory_bytes, reserved_bytes=0.0)
    cluster = replace(explained.simulation.cluster, device=small)
    full = replace(explained.simulation, cluster=cluster, memory_bytes=(best.memory_bytes + 1,))
    only = replace(explained, simulation=full, changes=(replace(best, seconds_per_sequence=1.5),))
    assert "50.0% more time" in only.conclusion
    assert only.conclusion.endswith(", which fits")
    none = replace(only, changes=(replace(best, memory_bytes=best.memory_bytes + 1),))
    assert "no setting here fits" in none.conclusion


def test_divided_optimizer_states_are_simulated() -> None:
    program = compile_gpt((1, 2, 2))
    (change,) = (change for change in program.explain().changes if change.what.startswith("zero=1"))
    assert change.memory_bytes == max(program.simulate("dgx-a100", zero=1).memory_bytes)
    assert not any(change.what.startswith("zero=1") for change in program.explain(zero=1).changes)


def test_impossible_changes_name_the_reason() -> None:
    changes = {change.what: change for change in compile_gpt((4, 2, 2)).explain().changes}
    assert "divide" in changes["8 tensor ranks for 4, and half the replicas"].refused


def test_estimates_of_ranks_in_another_order_are_refused() -> None:
    explained = compile_gpt(Mesh(1, 2, 2, (0, 2, 1, 3))).explain()
    assert "with other settings: not estimated, because estimates are for ranks in the default order" in str(explained)


@pytest.mark.parametrize(
    ("schedule", "more", "how"),
    [
        pytest.param("interleaved_1f1b", 6, "", marks=pytest.mark.slow),
        pytest.param("1f1b", 5, "", marks=pytest.mark.slow),
        ("gpipe", 5, ", interleaved_1f1b for gpipe"),
    ],
)
def test_changes_are_those_that_the_schedule_takes(schedule: str, more: int, how: str) -> None:
    changes = compile_gpt((1, 2, 1), num_model_chunks=1, schedule=schedule).explain().changes
    assert f"2 model chunks for 1{how}" in {change.what for change in changes}
    (larger,) = (change for change in changes if "a larger batch" in change.what)
    assert larger.what == f"{more} microbatches for 4 (a larger batch)"
    changed = compile_gpt((1, 2, 1), num_model_chunks=1, schedule=schedule, num_microbatches=more)
    assert larger.step_seconds == pytest.approx(changed.simulate("dgx-a100").step_seconds, rel=0.005)


def test_difference_of_programs() -> None:
    one, other = compile_gpt((1, 2, 1)), compile_gpt((1, 2, 1), recompute="full")
    assert autoptd.diff(one, compile_gpt((1, 2, 1))) == ""
    found = autoptd.diff(one, other).splitlines()
    assert {"--- options", "-recompute: none", "+recompute: full"} <= {*found}
    assert not any("mesh" in line for line in found)


def test_programs_that_train_differently_differ(tmp_path: Path) -> None:
    def compile_with(dropout: float, seed: int = 0, length: int = 16) -> autoptd.CompiledProgram:
        with torch.device("meta"):
            model = GPT(GPTConfig(64, length, 2, 2, 32, dropout))
        return autoptd.compile(model, mesh=(1, 2, 1), seed=seed)

    one = compile_with(0.1)
    dropped = autoptd.diff(one, compile_with(0.2))
    assert "--- program_00.py" in dropped
    removed, added = (re.findall(rf"^\{sign}(.*p=0\.[12].*)$", dropped, re.M) for sign in "-+")
    assert removed
    assert added == [line.replace("p=0.1", "p=0.2") for line in removed]
    assert '- "seed": 0,\n+ "seed": 1,' in autoptd.diff(one, compile_with(0.1, seed=1))
    assert '"name": "idx", "shape": [1, 32]' in autoptd.diff(one, compile_with(0.1, length=32))
    one.save(tmp_path)
    loaded = autoptd.load(tmp_path)
    file = next(file for file in sorted(tmp_path.glob("program_*.py")) if '"tanh"' in file.read_text())
    file.write_text(file.read_text().replace('"tanh"', '"none"', 1))
    header, *_ = rows = autoptd.diff(loaded, autoptd.load(tmp_path)).splitlines()
    assert [header, len(rows)] == [f"--- {file.name}", 5]
    assert ['"tanh"' in rows[3], '"none"' in rows[4]] == [True, True]


def test_difference_of_plans() -> None:
    given: Any = {"world_size": 4, "global_batch": 8, "cluster": "dgx-a100"}
    with torch.device("meta"):
        one, other, *_ = autoptd.plan(GPT(GPTConfig(64, 16, 2, 2, 32, 0.0)), **given)
    assert autoptd.diff(one, one) == ""
    assert f"-step_seconds: {one.step_seconds}" in autoptd.diff(one, other).splitlines()
