"""A mesh numbers its ranks with the tensor axis innermost, unless it is given their numbers."""

from __future__ import annotations

import pytest

from autoptd.runtime.program.manifest_json import decode, encode
from autoptd.runtime.program.mesh import Coordinates, Mesh

ORDERS = (None, tuple(range(12))[::-1])


@pytest.mark.parametrize("ranks", ORDERS)
def test_each_rank_has_its_place_and_a_group_along_each_axis(ranks: tuple[int, ...] | None) -> None:
    mesh = Mesh(2, 3, 2, ranks)
    assert str(mesh) == "mesh tensor=2 pipeline=3 data=2"
    assert mesh.size == 12
    assert mesh.coordinates(0 if ranks else 11) == Coordinates(data=1, pipeline=2, tensor=1)
    for rank in range(mesh.size):
        assert mesh.rank_of(**mesh.coordinates(rank)) == rank
    for axis, size in mesh.axes.items():
        groups = mesh.groups(axis)
        assert sorted(rank for group in groups for rank in group) == list(range(mesh.size))
        assert {len(group) for group in groups} == {size}


def test_groups_are_in_the_order_of_their_axis() -> None:
    mesh = Mesh(2, 3, 2)
    assert mesh.group("data", 5) == (5, 11)
    assert mesh.group("tensor", 5) == (4, 5)
    assert mesh.groups("tensor", pipeline=2) == [(4, 5), (10, 11)]


@pytest.mark.parametrize("mesh", [Mesh(2, 1, 4), Mesh(2, 1, 4, expert=4), Mesh(2, 3, 2, ORDERS[1])])
def test_a_mesh_is_written_and_read_back(mesh: Mesh) -> None:
    assert decode(Mesh, encode(mesh), "mesh") == mesh != Mesh(2, 3, 2)


def test_another_axis_is_refused() -> None:
    with pytest.raises(ValueError, match="mesh: unknown key 'context'"):
        decode(Mesh, {"tensor": 2, "pipeline": 1, "data": 1, "context": 2}, "mesh")
