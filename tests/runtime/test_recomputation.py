"""recompute: the same gradients, the same masks although the schedule moved on, and only its values kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from autoptd.runtime import collectives, kernels
from autoptd.runtime.comm.rank import Rank, thread_ranks
from autoptd.runtime.comm.threads import ThreadWorld
from autoptd.runtime.program.mesh import Mesh
from autoptd.runtime.randomness import Randomness
from autoptd.runtime.recomputation import recompute
from samples.benchmarks.activation_memory import SavedTensors
from tests.counting import calls

Block = Callable[[Rank, Tensor], Tensor]


def make_block(weight: Tensor, calls: list[str]) -> Block:
    def block(rank: Rank, x: Tensor) -> Tensor:
        calls.append("begin")
        x = kernels.dropout(rank, x @ weight, 0.5, 3).sin().cos()
        calls.append("saved")
        x = collectives.reduce_from_tensor(rank, x)
        calls.append("end")
        return x

    return block


def make_leaves() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(4, 6, requires_grad=True), torch.randn(6, 6, requires_grad=True)


@pytest.mark.parametrize("again", [True, False])
def test_masks_are_those_of_the_forward(again: bool) -> None:
    """Sample, call and mode change before the backward, as a schedule changes them."""
    found = []
    for wrapped in (True, False):
        rank = Rank.local(Mesh(1, 1, 1))
        rank.randomness = Randomness(seed=5, call=2, sample=8, training=again)
        x, weight = make_leaves()
        block = make_block(weight, [])
        result = recompute(rank, block, x) if wrapped else block(rank, x)
        moved = Randomness(seed=5, call=3, sample=16, training=not again)
        rank.randomness.__dict__.update(moved.__dict__)
        result.sum().backward()
        assert rank.randomness == moved
        found.append((result.detach(), x.grad, weight.grad))
    for own, other in zip(*found, strict=True):
        assert own is not None
        assert torch.equal(own, other)


def test_the_second_call_stops_behind_what_was_saved() -> None:
    rank, calls = Rank.local(Mesh(1, 1, 1)), list[str]()
    x, weight = make_leaves()
    result = recompute(rank, make_block(weight, calls), x)
    assert calls == ["begin", "saved", "end"]
    result.sum().backward()
    assert calls == ["begin", "saved", "end", "begin"]  # cos saves its argument before it computes


def test_without_gradients_there_is_one_call() -> None:
    rank, calls = Rank.local(Mesh(1, 1, 1)), list[str]()
    x, weight = make_leaves()
    with torch.no_grad():
        result = recompute(rank, make_block(weight, calls), x)
    assert calls == ["begin", "saved", "end"]
    assert not result.requires_grad


def test_recomputation_keeps_its_input_values_alone() -> None:
    rank = Rank.local(Mesh(1, 1, 1))
    x, weight = make_leaves()
    block, given = make_block(weight, []), x * 1
    saved = SavedTensors({"weight": weight})
    with saved:
        result = recompute(rank, block, given)
    assert saved.nbytes == given.nbytes
    plain = SavedTensors({"weight": weight})
    with plain:
        block(rank, given)
    assert plain.nbytes > 2 * given.nbytes
    assert result.requires_grad


def test_several_values_and_results() -> None:
    rank = Rank.local(Mesh(1, 1, 1))

    def block(rank: Rank, x: Tensor, ids: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return (x * y)[ids], x.exp()

    found = []
    for run in (partial(recompute, rank, block), partial(block, rank)):
        torch.manual_seed(1)
        x, y = torch.randn(3, 2, requires_grad=True), torch.randn(3, 2, requires_grad=True)
        first, second = run(x, torch.tensor([2, 0]), y)
        torch.autograd.backward([first.sum(), second.sum()])
        found.append([first.detach(), second.detach(), x.grad, y.grad])
    for own, other in zip(*found, strict=True):
        assert torch.equal(own, other)


def test_a_failing_function_leaves_the_randomness_alone() -> None:
    rank = Rank.local(Mesh(1, 1, 1))
    before = rank.randomness

    def fail(rank: Rank, x: Tensor) -> Tensor:
        raise RuntimeError("out of order")

    with pytest.raises(RuntimeError, match="out of order"):
        recompute(rank, fail, torch.ones(2, requires_grad=True))
    assert rank.randomness is before


def test_microbatches_in_flight_keep_their_own() -> None:
    """Two forwards before the first backward, and backwards in the other order."""
    rank = Rank.local(Mesh(1, 1, 1))

    def train(run: Callable[[Block, Tensor], Any]) -> list[Tensor]:
        x, weight = make_leaves()
        block = make_block(weight, [])
        results = []
        for sample in (0, 4, 8):
            rank.randomness.sample = sample
            results.append(run(block, x).sum())
        for result in reversed(results):
            result.backward()
        assert x.grad is not None
        assert weight.grad is not None
        return [x.grad, weight.grad]

    own = train(lambda block, x: recompute(rank, block, x))
    assert all(map(torch.equal, own, train(lambda block, x: block(rank, x))))


def test_collectives_inside_are_repeated_by_all_ranks() -> None:
    """Two tensor ranks as threads: an all-reduce in the middle of the group happens once more each."""
    mesh = Mesh(2, 1, 1)

    def work(rank: Rank, wrapped: bool) -> tuple[Tensor, int]:
        own = torch.Generator().manual_seed(rank.group("tensor").index)  # torch's own is shared by the threads
        x, weight = (torch.randn(n, 4, generator=own).requires_grad_() for n in (2, 4))

        def block(rank: Rank, x: Tensor) -> Tensor:
            summed = collectives.reduce_from_tensor(rank, collectives.copy_to_tensor(rank, x) @ weight)
            return kernels.dropout(rank, summed, 0.5, 1).exp()

        before = replace(rank.randomness)
        result = recompute(rank, block, x) if wrapped else block(rank, x)
        rank.randomness.sample += 7
        result.sum().backward()
        rank.randomness = before
        assert weight.grad is not None
        return weight.grad, calls(rank.group("tensor"))["all_reduce"]

    runs = []
    for wrapped in (True, False):
        world = ThreadWorld()
        runs.append(world.run(lambda rank, w=wrapped: work(rank, w), thread_ranks(mesh, world)))  # type: ignore[misc]
    for (own, count), (other, plain) in zip(*runs, strict=True):
        assert torch.equal(own, other)
        assert (count, plain) == (3, 2)
