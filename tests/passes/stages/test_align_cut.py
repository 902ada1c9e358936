"""Graphs of other input shapes are cut where the first is, operator by operator, or not at all."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autoptd.options import Options
from autoptd.pass_list import select_passes
from autoptd.passes.ir.program import Program
from autoptd.passes.stages.cut import align_cut
from autoptd.passes.structure.linear_order import Row
from autoptd.runtime.program.mesh import Mesh
from tests.captures import shared_capture


class Tower(nn.Module):
    """Four layers; long sequences take a detour of two operators in the second, beside a module's own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if number == 1 and x.shape[1] > 4:
                x = x.tanh() * 2.0
            x = x.relu()
        return x.square().mean()


def divide(length: int) -> Program:
    program = shared_capture(Tower(), mesh=Mesh(1, 2, 1), example_inputs={"x": torch.zeros(2, length, 8)})
    for _, step in select_passes(Options(layout="bsh"), "arrange", "divide"):
        program = step(program)
    return program


def cut_names(program: Program, positions: tuple[int, ...]) -> list[str]:
    items = Row(program.stages[0]).items
    return [items[position].name for position in positions]


@pytest.mark.parametrize(("first", "other"), [(4, 4), (4, 6), (6, 4), (6, 8)])
def test_cuts_stand_before_the_same_operators(first: int, other: int) -> None:
    one, two = divide(first), divide(other)
    row = Row(one.stages[0])
    linears = tuple(i for i, node in enumerate(row.items) if "linear" in str(node.target) and i)
    assert len(linears) == 3
    assert cut_names(two, align_cut(two, one, linears)) == cut_names(one, linears)


def test_a_cut_inside_of_what_the_other_lacks_moves_to_its_end() -> None:
    long, short = divide(6), divide(4)
    tanh = next(i for i, node in enumerate(Row(long.stages[0]).items) if "tanh" in str(node.target))
    (position,) = align_cut(short, long, (tanh + 1,))
    assert "relu" in str(Row(short.stages[0]).items[position].target)


def test_a_cut_that_may_not_stand_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    program = divide(4)
    monkeypatch.setattr(Row, "allowed", lambda row: [False] * len(row.items))
    with pytest.raises(ValueError, match=r"cut before layers\.1 .*but the graph of this shape cannot be cut there"):
        align_cut(program, program, (2,))
