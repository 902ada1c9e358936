"""A mesh has any named axes: a further one needs nothing but its name and size."""

from __future__ import annotations

import torch

from autoptd.runtime.comm.rank import Rank, thread_ranks
from autoptd.runtime.comm.threads import ThreadWorld
from autoptd.runtime.program.manifest_json import decode, encode
from autoptd.runtime.program.mesh import Coordinates, Mesh

FOUR = Mesh(2, 3, 2, context=2)


def test_a_fourth_axis_has_ranks_coordinates_and_groups() -> None:
    assert FOUR.size == 24
    assert str(FOUR) == "mesh tensor=2 pipeline=3 data=2 context=2"
    assert FOUR.coordinates(17) == Coordinates(data=0, pipeline=2, tensor=1, context=1)
    for rank in range(FOUR.size):
        assert FOUR.rank_of(**FOUR.coordinates(rank)) == rank
    assert FOUR.group("context", 17) == (5, 17)
    assert FOUR.group("tensor", 17) == (16, 17)
    for axis, size in FOUR.axes.items():
        groups = FOUR.groups(axis)
        assert sorted(rank for group in groups for rank in group) == list(range(FOUR.size))
        assert {len(group) for group in groups} == {size}
    assert FOUR.groups("tensor", pipeline=2, context=1) == [(16, 17), (22, 23)]
    assert decode(Mesh, encode(FOUR), "mesh") == FOUR != Mesh(2, 3, 2)


def test_ranks_reduce_over_a_fourth_axis() -> None:
    mesh = Mesh(2, 1, 1, context=2)
    world = ThreadWorld()

    def reduce(rank: Rank) -> tuple[int, int]:
        own = torch.tensor([mesh.rank_of(**rank.coordinates)])
        return tuple(int(rank.group(axis).all_reduce(own.clone())) for axis in ("context", "tensor"))  # type: ignore[return-value]

    assert world.run(reduce, thread_ranks(mesh, world)) == [(2, 1), (4, 1), (2, 5), (4, 5)]
    local = Rank.local(mesh)
    assert (local.group("context").size, local.coordinates["context"]) == (2, 0)
