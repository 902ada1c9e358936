"""Placement: what a rank takes, and that the ranks' parts join to the whole again."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from autoptd.runtime.program.placement import AxisPlacement, Parameter, Replicate, Segment, Shard

PLACEMENTS = [
    pytest.param((5, 3), 2, Replicate(), id="replicated"),
    pytest.param((8, 3), 4, Shard(0, (Segment(1, 8, 1, True),)), id="column-parallel"),
    pytest.param((3, 8), 2, Shard(1, (Segment(1, 8, 1, True),)), id="row-parallel"),
    pytest.param((3 * 4 * 5, 2), 2, Shard(0, (Segment(3, 4, 5, True),)), id="packed qkv by block"),
    pytest.param((4 * 3 * 5,), 4, Shard(0, (Segment(1, 4, 15, True),)), id="packed qkv by head"),
    pytest.param((4 * 5 + 2 * 5 + 2 * 5, 2), 2, Shard(0, (Segment(1, 4, 5, True), Segment(2, 2, 5, True))), id="gqa"),
    pytest.param((4 * 5 + 5 + 5, 2), 2, Shard(0, (Segment(1, 4, 5, True), Segment(1, 10, 1, False))), id="multi-query"),
    pytest.param((37, 2), 4, Shard(0, (Segment(1, 40, 1, True),), 37), id="odd vocabulary"),
]


@pytest.mark.parametrize(("shape", "size", "placement"), PLACEMENTS)
def test_parts_join_to_the_whole(shape: tuple[int, ...], size: int, placement: AxisPlacement) -> None:
    whole = torch.randn(shape)
    parts = [placement.take(whole, size, index) for index in range(size)]
    padded = list(shape)
    if placement.dim is not None:
        padded[placement.dim] += placement.padding
    for part in parts:
        assert part.shape == placement.local_shape(padded, size)
        assert part.is_contiguous()
    assert torch.equal(placement.join(parts), whole)


@pytest.mark.parametrize(("shape", "size", "placement"), PLACEMENTS[1:])
def test_runs_are_the_rows_that_are_taken(shape: tuple[int, ...], size: int, placement: AxisPlacement) -> None:
    assert placement.dim is not None
    whole = torch.randn(shape)
    for index in range(size):
        runs = placement.runs(size, index)
        assert all(end < first for (_, end), (first, _) in pairwise(runs))
        rows = torch.cat([whole.narrow(placement.dim, first, end - first) for first, end in runs], placement.dim)
        own = placement.take(whole, size, index)
        assert torch.equal(own.narrow(placement.dim, 0, rows.shape[placement.dim]), rows)
        assert own.count_nonzero() == rows.count_nonzero()  # the rest is padding


def test_packed_qkv_takes_the_same_heads_of_each_block() -> None:
    heads = torch.arange(3 * 4).repeat_interleave(2)  # block * 4 + head, for each of a head's two rows
    part = Shard(0, (Segment(3, 4, 2, True),)).take(heads, 2, 1)
    assert part.tolist() == [2, 2, 3, 3, 6, 6, 7, 7, 10, 10, 11, 11]


def test_undivided_rows_are_every_ranks() -> None:
    placement = Shard(0, (Segment(1, 2, 1, True), Segment(1, 1, 1, False)))
    assert [placement.take(torch.tensor([1, 2, 9]), 2, index).tolist() for index in (0, 1)] == [[1, 9], [2, 9]]


def test_padding_is_zeros_on_the_last_rank() -> None:
    placement = Shard(0, (Segment(1, 6, 1, True),), 5)
    assert placement.take(torch.ones(5), 3, 2).tolist() == [1, 0]


def test_bytes_are_the_whole_tensors() -> None:
    assert Parameter("w", (3, 5), torch.bfloat16).bytes == 30
