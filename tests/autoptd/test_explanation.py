"""explain: figures that agree with the simulation; diff: what differs and nothing else."""

from __future__ import annotations

import pytest
import torch

import autoptd
from samples.gpt import GPT, GPTConfig


def compile_gpt(mesh: tuple[int, int, int], **options: object) -> autoptd.CompiledProgram:
    with torch.device("meta"):
        model = GPT(GPTConfig(512, 128, 8, 4, 256)).to(torch.bfloat16)
    return autoptd.compile(model, mesh=mesh, microbatch_size=2, num_microbatches=4, **options)  # type: ignore[arg-type]


def test_the_explanation_agrees_with_the_simulation() -> None:
    program = compile_gpt((2, 2, 2))
    simulated, explained = program.simulate("dgx-a100"), program.explain()
    assert explained.simulation.step_seconds == simulated.step_seconds
    assert explained.bubble_ideal == 1 / 8
    assert explained.work_seconds[simulated.critical_rank] == max(explained.work_seconds)
    assert explained.exposed["tensor"] == simulated.breakdown["tensor"]
    assert len(explained.moves) in (1, 2)
    text = str(explained)
    for word in (
        "critical is pipeline rank",
        "bubble costs",
        "nothing hides",
        "cut: moving",
        "with 3 model chunks",
    ):
        assert word in text


def test_changes_are_what_the_changed_program_takes() -> None:
    changes = {change.what: change for change in compile_gpt((1, 2, 2)).explain().changes}
    more = changes["6 microbatches for 4 (a larger batch)"]
    tensor = changes["2 tensor ranks for 1, and half the replicas"]
    with torch.device("meta"):
        model = GPT(GPTConfig(512, 128, 8, 4, 256)).to(torch.bfloat16)
    for change, mesh, m in ((more, (1, 2, 2), 6), (tensor, (2, 2, 1), 8)):
        program = autoptd.compile(model, mesh=mesh, microbatch_size=2, num_microbatches=m)
        assert change.step_seconds == pytest.approx(program.simulate("dgx-a100").step_seconds, rel=0.03)


def test_what_cannot_be_is_said() -> None:
    changes = {change.what: change for change in compile_gpt((4, 2, 2)).explain().changes}
    assert "divide" in changes["8 tensor ranks for 4, and half the replicas"].refused


def test_difference_of_programs() -> None:
    one, other = compile_gpt((1, 2, 1)), compile_gpt((1, 2, 1), recompute="full")
    assert not autoptd.diff(one, compile_gpt((1, 2, 1)))
    found = autoptd.diff(one, other)
    assert found.rows["recompute"] == ("none", "full")
    assert "mesh" not in found.rows
    assert "recompute: none -> full" in str(found)
    with pytest.raises(TypeError, match="compares plans and programs"):
        autoptd.diff(one, "b")  # type: ignore[arg-type]
