"""Shared captures: of what is equal and of nothing else, and left as they are by all that compile with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, fx, nn

from autoptd.capture.export import capture
from autoptd.options import Options
from autoptd.pass_list import run_passes, select_passes
from autoptd.passes.ir.nodes import change_info
from autoptd.progress import show_progress
from autoptd.runtime.program.mesh import Mesh
from samples.gpt import GPT, GPTConfig
from tests.captures import Captures, describe

CONFIG = GPTConfig(vocab_size=64, block_size=8, n_layer=2, n_head=2, n_embd=16)
MESH = Mesh(2, 1, 1)
IDS = torch.zeros(1, 8, dtype=torch.int64)


class Offset(nn.Module):
    """A loss of its weight, a buffer, and an attribute."""

    factor: float | Tensor = 2.0

    def __init__(self, value: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("offset", torch.full((3,), value))

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.offset, Tensor)
        return (x * self.weight + self.offset).sum() * self.factor


def changed(model: nn.Module, change: Callable[[nn.Module], object]) -> nn.Module:
    change(model)
    return model


def square(x: Tensor) -> Tensor:
    return (x * x).sum()


def test_equal_models_share_a_capture_on_any_mesh() -> None:
    captures = Captures()
    first, second = (captures.capture(GPT(CONFIG), mesh=mesh) for mesh in (Mesh(1, 1, 1), MESH))
    assert captures.hits == 1
    assert second.mesh == MESH
    assert second.stages is first.stages
    assert describe(second) == describe(capture(GPT(CONFIG), mesh=MESH))


@pytest.mark.parametrize(
    "other",
    [
        lambda: GPT(replace(CONFIG, n_layer=3)),
        lambda: GPT(CONFIG).eval(),
        lambda: GPT(CONFIG).double(),
        lambda: changed(GPT(CONFIG), lambda model: model.wpe.requires_grad_(False)),
        lambda: changed(GPT(CONFIG), lambda model: setattr(model, "wpe", nn.Embedding(8, 16, padding_idx=0))),
        lambda: GPT(replace(CONFIG, tie_weights=False)),
        lambda: GPT(CONFIG).to("meta"),
    ],
    ids=["layers", "evaluation", "dtype", "frozen", "attribute", "untied", "meta"],
)
def test_models_that_differ_share_no_capture(other: Callable[[], nn.Module]) -> None:
    captures, example = Captures(), {"idx": IDS, "targets": IDS.clone()}
    captures.capture(GPT(CONFIG), mesh=MESH, example_inputs=example)
    captures.capture(other(), mesh=MESH, example_inputs=example)
    assert captures.hits == 0


def test_examples_losses_and_modes_that_differ_share_no_capture() -> None:
    captures, x = Captures(), torch.zeros(2, 3)
    model = nn.Linear(3, 3)
    captures.capture(model, mesh=MESH, example_inputs={"input": x}, loss_fn=square)
    captures.capture(model, mesh=MESH, example_inputs={"input": torch.zeros(4, 3)}, loss_fn=square)
    captures.capture(model, mesh=MESH, example_inputs={"input": x}, loss_fn=lambda x: x.sum())
    with torch.autocast("cpu", torch.bfloat16):
        captures.capture(model, mesh=MESH, example_inputs={"input": x}, loss_fn=square)
    assert captures.hits == 0
    captures.capture(model, mesh=MESH, example_inputs={"input": torch.ones(2, 3)}, loss_fn=square)
    assert captures.hits == 1


def test_buffers_are_those_of_the_model_given() -> None:
    captures, x = Captures(), torch.zeros(2, 3)
    for value in (1.0, 2.0):
        captures.capture(Offset(value), mesh=MESH, example_inputs={"x": x})
    assert captures.hits == 0
    model = Offset(1.0)
    program = captures.capture(model, mesh=MESH, example_inputs={"x": x})
    assert captures.hits == 1
    assert program.buffers["offset"].data_ptr() == next(model.buffers()).data_ptr()


def test_models_not_known_to_be_equal_are_traced_anew() -> None:
    captures, x = Captures(), torch.zeros(2, 3)
    for _ in range(2):
        model = changed(Offset(), lambda model: setattr(model, "factor", torch.ones(())))
        captures.capture(model, mesh=MESH, example_inputs={"x": x})
    assert captures.hits == 0


def test_no_pass_changes_a_shared_capture(captures: Captures) -> None:
    program = captures.capture(GPT(replace(CONFIG, dropout=0.1)), mesh=MESH, microbatch_size=2)
    before = describe(program)
    passes = select_passes(Options(recompute="full"), "arrange", "divide", "finish")
    with show_progress("compile") as say:
        run_passes(passes, program, say)
    assert describe(program) == before


def test_a_changed_capture_is_found() -> None:
    captures = Captures()
    program = captures.capture(GPT(CONFIG), mesh=MESH)
    node = next(node for node in program.stages[0].graph.nodes if isinstance(node.meta["val"], Tensor))
    assert isinstance(node, fx.Node)
    change_info(node, path="elsewhere")
    with pytest.raises(AssertionError, match="a test changed a shared capture: capture GPT"):
        captures.check()
