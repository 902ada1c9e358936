"""Dropout of positions: at one sequence a microbatch each has the mask that it has at two."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoptd
from autoptd.compiled import CompiledProgram
from autoptd.runtime.comm.connection import Connection, run_threads
from tests.checkpoints import bind_thread

LENGTH = 6
WAYS = {  # how positions come to the table, and whether each sequence has its own there
    "expanded": True,
    "expanded as tokens": True,
    "repeated": True,
    "counted": True,
    "expanded behind": True,
    "repeated flat": True,
    "one row": False,
    "a vector": False,
}


class Positions(nn.Module):
    """Tokens, and positions that are dropped before they are added."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.tokens, self.positions, self.head = (nn.Embedding(16, 8), nn.Embedding(LENGTH, 8), nn.Linear(8, 16))
        self.way = way

    def drop(self, places: Tensor) -> Tensor:
        return F.dropout(self.positions(places), 0.5, self.training)

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        b, s = idx.shape
        row = torch.arange(s)
        if self.way == "expanded":
            dropped = self.drop(row.unsqueeze(0).expand(b, -1))
        elif self.way == "expanded as tokens":
            dropped = self.drop(row.expand_as(idx))
        elif self.way == "repeated":
            dropped = self.drop(row.repeat(b, 1))
        elif self.way == "counted":
            dropped = self.drop(torch.ones_like(idx).cumsum(1) - 1)
        elif self.way == "expanded behind":
            dropped = F.dropout(self.positions(row).unsqueeze(0).expand(b, -1, -1), 0.5, self.training)
        elif self.way == "repeated flat":
            dropped = self.drop(row.repeat(b)).view(b, s, 8)
        else:
            dropped = self.drop(row.unsqueeze(0) if self.way == "one row" else row)
        return F.cross_entropy(self.head(self.tokens(idx) + dropped).flatten(0, 1), targets.flatten())


class Single(Positions):
    """Written for one sequence."""

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        return super().forward(idx.view(1, LENGTH), targets)


class Kept(Positions):
    """Its hidden state is kept on the module, and returned."""

    def forward(self, idx: Tensor, targets: Tensor) -> Any:
        loss = super().forward(idx, targets)
        self.kept = self.tokens(idx).square()
        return loss, self.kept


def compile_way(model: nn.Module, size: int, **options: Any) -> CompiledProgram:
    example = {name: torch.zeros(size, LENGTH, dtype=torch.long) for name in ("idx", "targets")}
    return autoptd.compile(model, (1, 1, 1), example_inputs=example, num_microbatches=4 // size, seed=3, **options)


def find_dropped(program: CompiledProgram, batch: dict[str, Tensor]) -> Tensor:
    """A step's gradient of the positions' table."""
    (found,) = run_threads(program.manifest, lambda connection: _step(program, connection, batch))
    return found


def _step(program: CompiledProgram, connection: Connection, batch: dict[str, Tensor]) -> Tensor:
    parallel = bind_thread(program, connection)
    loss = parallel(**batch)
    (loss[0] if isinstance(loss, tuple) else loss).backward()
    gradient = parallel.get_parameter("positions.weight").grad
    assert gradient is not None
    return gradient.clone()


@pytest.mark.parametrize("way", WAYS)
def test_masks_do_not_depend_on_the_microbatch(way: str) -> None:
    torch.manual_seed(0)
    model = Positions(way)
    batch = {name: torch.randint(16, (4, LENGTH)) for name in ("idx", "targets")}
    alone, pairs = (find_dropped(compile_way(model, size), batch) for size in (1, 2))
    torch.testing.assert_close(alone, pairs)
    # What all share loses half of its gradient; of four sequences with masks of their own one or another has it.
    assert bool((alone == 0).sum() > alone.numel() // 4) is not WAYS[way]


def test_a_model_that_returns_what_it_keeps_is_traced_with_two() -> None:
    torch.manual_seed(0)
    model = Kept("expanded")
    batch = {name: torch.randint(16, (4, LENGTH)) for name in ("idx", "targets")}
    alone, pairs = (find_dropped(compile_way(model, size, outputs=("1",)), batch) for size in (1, 2))
    torch.testing.assert_close(alone, pairs)


def test_a_model_for_one_sequence_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="the draw at .* is one for all sequences, .* this trace fails"):
        compile_way(Single("one row"), 1)
