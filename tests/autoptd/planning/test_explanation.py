"""explain: figures that agree with the simulation; diff: what differs and nothing else."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autoptd
from autoptd import Cluster, compiler
from autoptd.passes.stages.cut import Found, find_cut
from autoptd.passes.stages.fused_order import FusedOrder
from autoptd.planning.explanation import Change
from autoptd.runtime.program.mesh import Mesh
from samples.gpt import GPT, GPTConfig
from tests.models import MIDDLE, compile_tiny, tiny

compile_gpt = partial(
    tiny, config=MIDDLE, dtype=torch.bfloat16, device="meta", microbatch_size=2, num_microbatches=4
)


def test_the_explanation_agrees_with_the_simulation() -> None:
    program = compile_gpt((2, 2, 2))
    simulated, explained = program.simulate("dgx-a100"), program.explain()
    assert explained.simulation.step_seconds == simulated.step_seconds
    assert explained.bubble_ideal == 1 / 8
    assert explained.work_seconds[simulated.critical_rank] == max(explained.work_seconds)
    assert explained.exposed["tensor"] == simulated.breakdown["tensor"]
    assert len(explained.moves) in (1, 2)
    text = str(explained)
    words = "critical is pipeline rank", "bubble costs", "nothing hides", "cut: with h", "with 3 model chunks"
    for word in words:
        assert word in text


@pytest.mark.parametrize("mesh", [(1, 2, 1), (2, 2, 2)], ids=str)
def test_a_moved_cut_takes_what_the_program_cut_there_takes(
    mesh: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the tensor ranks still have to sum crosses no cut."""
    program = compile_gpt(mesh)
    words = r"with (\w+)(?: to \w+)? of stage (\d) in stage (\d) the schedule takes ([\d.]+)% (more|less), messages"
    matches = [re.match(words, move) for move in program.explain().moves]
    name, at, other, percent, more = next(m.groups() for m in matches if m and int(m[2]) < int(m[3]))

    def find_moved(fused_order: FusedOrder, **options: Any) -> Found:
        found = find_cut(fused_order, **options)
        place = next(i for i, node in enumerate(fused_order.row.items) if node.name == name)
        assert fused_order.may_cut[place]
        return found._replace(positions=(*found.positions[: int(at)], place, *found.positions[int(other) :]))

    monkeypatch.setattr(compiler, "find_cut", find_moved)
    moved = compile_tiny(mesh, MIDDLE, torch.bfloat16, "meta", microbatch_size=2, num_microbatches=4)
    ends = [max(row[-1].end for row in one.simulate("dgx-a100").timeline) for one in (program, moved)]
    longer = float(percent) / 100 * (1 if more == "more" else -1)
    assert ends[1] / ends[0] - 1 == pytest.approx(longer, abs=5e-4)


def test_a_moved_cut_changes_no_launch_of_a_graph() -> None:
    selene = Cluster.load("dgx-a100")
    device = replace(selene.device, launch_seconds=1.0, graphed_launch_seconds=1e-6)
    moves = compile_gpt((1, 2, 1)).explain(replace(selene, device=device)).moves
    assert moves
    assert all("takes 0.00%" in move for move in moves)


def test_changes_are_what_the_changed_program_takes() -> None:
    changes = {change.what: change for change in compile_gpt((1, 2, 2)).explain().changes}
    more = changes["6 microbatches for 4 (a larger batch)"]
    tensor = changes["2 tensor ranks for 1, and half the replicas"]
    chunk = changes["3 model chunks for 2"]
    for change, mesh, m, v in ((more, (1, 2, 2), 6, 2), (tensor, (2, 2, 1), 8, 2), (chunk, (1, 2, 2), 4, 3)):
        program = compile_gpt(mesh, num_microbatches=m, num_model_chunks=v)
        assert change.error < 0.005
        of_memory = f"{change.error:.1%} off in time and {change.memory_error:.1%} in memory"
        assert str(change).endswith(f"of which those of the program itself are {of_memory}")
        assert change.step_seconds == pytest.approx(program.simulate("dgx-a100").step_seconds, rel=0.005)


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
    assert more.error < 1e-6
    assert more.step_seconds == pytest.approx(step.step_seconds, rel=1e-6)
    assert more.memory_bytes == pytest.approx(max(step.memory_bytes), rel=1e-6)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_memory_of_stages_that_begin_within_a_recomputed_layer_is_estimated(schedule: str) -> None:
    """It takes what is received, beside the residual, as the layer's first half took one value."""
    program = compile_gpt(
        (1, 3, 1), num_microbatches=6, num_model_chunks=1, schedule=schedule, recompute="full"
    )
    names = [{value.name for value in stage.sends} for stage in program.manifest.stages]
    assert any(len(sent) > 1 for sent in names)
    change = next(c for c in program.explain().changes if "(a larger batch)" in c.what)
    assert change.memory_error < 0.002


def test_a_change_says_how_far_off_the_programs_own_memory_is() -> None:
    """What is computed again of two layers is estimated whole, where a stage has a part of it."""
    program = compile_gpt((1, 4, 1), num_model_chunks=2, recompute=2)
    change = next(c for c in program.explain().changes if "(a larger batch)" in c.what)
    assert change.memory_error > 0.01


@pytest.mark.parametrize("how", [{"zero": 1}, {"overlap_data": False, "wide_gradients": False}], ids=str)
def test_estimates_are_of_a_step_that_is_run_alike(how: dict[str, Any]) -> None:
    program, larger = (compile_gpt((2, 1, 2), num_microbatches=m) for m in (4, 5))
    (more,) = (c for c in program.explain(**how).changes if "5 microbatches for 4" in c.what)
    step = larger.simulate("dgx-a100", **how)
    assert more.step_seconds == pytest.approx(step.step_seconds, rel=1e-6)
    assert more.memory_bytes == pytest.approx(max(step.memory_bytes), rel=1e-6)


def test_moves_are_timed_in_the_dtype_of_the_step() -> None:
    program = compile_gpt((1, 2, 1))
    wide, own = program.explain(dtype="fp32").moves, program.explain().moves
    assert program.explain(dtype="bf16").moves == own
    assert wide != own


def test_a_loaded_program_says_that_estimates_need_the_model(tmp_path: Path) -> None:
    compile_gpt((1, 2, 1)).save(tmp_path / "saved")
    loaded = autoptd.load(tmp_path / "saved")
    explained = str(loaded.explain())
    assert "with other settings: not estimated, because the estimate needs the model" in explained
    assert re.search(r"critical is pipeline rank \d \((wte|h\.\d)[.\w]* to ", explained)
    assert autoptd.diff(loaded, compile_gpt((1, 2, 1))).rows["recompute"] == (None, "none")


def test_impossible_changes_name_the_reason() -> None:
    changes = {change.what: change for change in compile_gpt((4, 2, 2)).explain().changes}
    assert "divide" in changes["8 tensor ranks for 4, and half the replicas"].refused


def test_estimates_of_ranks_in_another_order_are_refused() -> None:
    explained = compile_gpt(Mesh(1, 2, 2, (0, 2, 1, 3))).explain()
    assert "with other settings: not estimated, because estimates are for ranks in the default order" in str(
        explained
    )


def test_a_change_smaller_than_the_error_says_so() -> None:
    def change(seconds: float, error: float) -> Change:
        return Change("3 model chunks for 2", 1.0, 10**9, seconds, error)

    none = "3 model chunks for 2: no difference beyond the estimate's error of 3.5% "
    assert str(change(0.99, 0.035)).startswith(f"{none}(1.0% less time a sequence), 1 GB")
    assert str(change(1.02, 0.035)).startswith(f"{none}(2.0% more time a sequence), 1 GB")
    assert str(change(0.91, 0.035)).startswith("3 model chunks for 2: 9.0% less time a sequence, 1 GB")
    assert [change(0.99, 0.035).within_error, change(0.91, 0.035).within_error] == [True, False]
    assert not Change("8 tensor ranks for 4", refused="4 heads do not divide").within_error


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
    assert changes[0].what == f"2 model chunks for 1{how}"
    (larger,) = (change for change in changes if "a larger batch" in change.what)
    assert larger.what == f"{more} microbatches for 4 (a larger batch)"
    changed = compile_gpt((1, 2, 1), num_model_chunks=1, schedule=schedule, num_microbatches=more)
    assert larger.step_seconds == pytest.approx(changed.simulate("dgx-a100").step_seconds, rel=0.005)


def test_difference_of_programs() -> None:
    one, other = compile_gpt((1, 2, 1)), compile_gpt((1, 2, 1), recompute="full")
    assert not autoptd.diff(one, compile_gpt((1, 2, 1)))
    found = autoptd.diff(one, other)
    assert found.rows["recompute"] == ("none", "full")
    assert "mesh" not in found.rows
    assert "recompute: none -> full" in str(found)
    with pytest.raises(TypeError, match="compares plans and programs"):
        autoptd.diff(one, "b")  # type: ignore[arg-type]


def test_programs_that_train_differently_differ(tmp_path: Path) -> None:
    def compile_with(dropout: float, seed: int = 0, length: int = 16) -> autoptd.CompiledProgram:
        with torch.device("meta"):
            model = GPT(GPTConfig(64, length, 2, 2, 32, dropout))
        return autoptd.compile(model, mesh=(1, 2, 1), seed=seed)

    one = compile_with(0.1)
    dropped = autoptd.diff(one, compile_with(0.2))
    first, second = dropped.rows["text of pipeline rank 0"]
    assert re.fullmatch(r"line \d+: .*0\.1.*", str(first))
    assert str(second) == str(first).replace("0.1", "0.2")
    assert autoptd.diff(one, compile_with(0.1, seed=1)).rows["seed"] == (0, 1)
    assert "input idx" in autoptd.diff(one, compile_with(0.1, length=32)).rows
    one.save(tmp_path)
    loaded = autoptd.load(tmp_path)
    file = next(file for file in sorted(tmp_path.glob("program_*.py")) if '"tanh"' in file.read_text())
    file.write_text(file.read_text().replace('"tanh"', '"none"', 1))
    (row,) = autoptd.diff(loaded, autoptd.load(tmp_path)).rows.values()
    assert ['"tanh"' in str(row[0]), '"none"' in str(row[1])] == [True, True]


def test_passes_are_compared_by_their_names() -> None:
    with_kernels, without = compile_gpt((1, 2, 1)), compile_gpt((1, 2, 1), fuse=False)
    rows = autoptd.diff(with_kernels, without).rows
    assert rows["fuse"] == (True, False)
    assert [name for name in rows if name.startswith("pass")] == ["pass cut_stages", "pass fuse_operators"]


def test_parameters_are_counted_without_buffers() -> None:
    class Scaled(nn.Linear):
        def __init__(self, *, buffer: bool) -> None:
            super().__init__(8, 8)
            scale = torch.ones(8)
            if buffer:
                self.register_buffer("scale", scale)
            else:
                self.scale = nn.Parameter(scale)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (super().forward(x) * self.scale).mean()

    example = {"x": torch.ones(2, 8)}
    programs = [
        autoptd.compile(Scaled(buffer=buffer), (1, 1, 1), example_inputs=example) for buffer in (True, False)
    ]
    assert autoptd.diff(*programs).rows["parameters on pipeline rank 0"] == (72, 80)
