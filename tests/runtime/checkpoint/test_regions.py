"""Pieces of all ranks together are each logical tensor once, and are what the ranks' slices hold there."""

from __future__ import annotations

from math import prod
from unittest import mock

import pytest
import torch

from autoptd.runtime.checkpoint import regions
from autoptd.runtime.checkpoint.regions import FlatRange, Region, assign_pieces, list_regions
from autoptd.runtime.comm.rank import Rank
from autoptd.runtime.program.manifest import Manifest, Output, StageInterface
from autoptd.runtime.program.mesh import Mesh
from autoptd.runtime.program.placement import Parameter, Placement, Segment, Shard

PACKED = Shard(0, (Segment(3, 4, 5, True), Segment(1, 6, 1, False), Segment(1, 8, 2, True)))
PADDED = Shard(0, (Segment(1, 56, 1, True),), 53)
COLUMNS = Shard(1, (Segment(1, 8, 2, True),))
PARAMETERS = {
    "packed": Parameter("packed", (82, 3), torch.float32, placement=Placement(tensor=PACKED)),
    "padded": Parameter("padded", (53, 2), torch.float32, placement=Placement(tensor=PADDED)),
    "columns": Parameter("columns", (7, 16), torch.float32, placement=Placement(tensor=COLUMNS)),
    "whole": Parameter("whole", (40,), torch.float32),
    "number": Parameter("number", (), torch.float32),
    "empty": Parameter("empty", (0, 4), torch.float32),
    "constant": Parameter("constant", (9,), torch.float32, kind="constant"),
}


def make_manifest(mesh: Mesh) -> Manifest:
    """Stage 0 has all; the last one "padded", which is tied, too."""
    stages = [StageInterface(0, (), (), (), tuple(PARAMETERS))]
    stages += [StageInterface(i, (), (), (), ("padded",)) for i in range(1, mesh.pipeline)]
    return Manifest(mesh, "1f1b", 1, 1, 1, False, 0, (), tuple(stages), PARAMETERS, {}, Output("tensor"))


def divide_flat(manifest: Manifest, rank: Rank) -> dict[str, FlatRange]:
    """The ranges of this replica if a stage's parameters, in a row with their padding, are divided evenly."""
    at, mesh = rank.coordinates, manifest.mesh
    names = [n for n in PARAMETERS if at.pipeline in manifest.owners(n) and n != "constant"]
    shapes = [PARAMETERS[n].placement["tensor"].local_shape(PARAMETERS[n].shape, mesh.tensor) for n in names]
    width = -(-sum(prod(shape) for shape in shapes) // mesh.data)
    flats, begin = {}, 0
    for name, shape in zip(names, shapes, strict=True):
        low, high = (min(max(k * width - begin, 0), prod(shape)) for k in (at.data, at.data + 1))
        flats[name] = FlatRange(shape, low, high)
        begin += prod(shape)
    return flats


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 1, 1), (4, 1, 2), (2, 3, 2), (1, 2, 3)])
@pytest.mark.parametrize("elements", [1 << 24, 20])
@pytest.mark.parametrize("divided", [False, True])
def test_pieces_are_every_element_once(shape: tuple[int, int, int], elements: int, divided: bool) -> None:
    mesh = Mesh(*shape)
    manifest = make_manifest(mesh)
    logical = {n: torch.arange(torch.Size(p.shape).numel()).reshape(p.shape) for n, p in PARAMETERS.items()}
    seen = {name: torch.zeros(p.shape, dtype=torch.int) for name, p in PARAMETERS.items()}
    written = [0] * mesh.size
    with mock.patch.object(regions, "PIECE_ELEMENTS", elements):
        for number in range(mesh.size):
            rank = Rank.local(mesh, mesh.coordinates(number))
            flats = divide_flat(manifest, rank) if divided else {}
            for piece in assign_pieces(manifest, rank, flats):
                name, region = piece.name, piece.region
                own = PARAMETERS[name].placement["tensor"].take(logical[name], mesh.tensor, rank.coordinates.tensor)
                if divided:
                    own = own.reshape(-1)[flats[name].first : flats[name].end]
                assert torch.equal(piece.view(own, flats.get(name)), logical[name][region.slices])
                seen[name][region.slices] += 1
                written[number] += region.elements
    for name, counts in seen.items():
        assert bool((counts == (name != "constant")).all()), name
    if elements == 20 and mesh.pipeline == 1:
        assert max(written) <= 2 * sum(written) / mesh.size  # of what is divided and what is not


@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (3, 1, 4), (2, 3, 2, 2), (0, 4)])
def test_a_flat_range_is_a_few_regions_in_order(shape: tuple[int, ...]) -> None:
    whole = torch.arange(prod(shape)).reshape(shape)
    for first in range(whole.numel() + 1):
        for end in range(first, whole.numel() + 1):
            row, flat = whole.reshape(-1)[first:end], FlatRange(shape, first, end)
            regions = flat.regions()
            assert len(regions) <= max(1, 2 * len(shape) - 1)
            assert torch.equal(torch.cat([row[:0], *(whole[r.slices].reshape(-1) for r in regions)]), row)
            assert all(torch.equal(flat.view(row, r), whole[r.slices]) for r in regions)


def test_a_divided_tensor_has_a_region_for_each_run() -> None:
    found = list_regions((82, 3), PACKED, 2, 1)
    assert [(r.offsets[0], r.sizes[0], own.offsets[0], shared) for r, own, shared in found] == [
        (10, 10, 0, False),
        (30, 10, 10, False),
        (50, 10, 20, False),
        (60, 6, 30, True),
        (74, 8, 36, False),
    ]


def test_padding_is_in_no_region() -> None:
    assert [region.sizes for region, _, _ in list_regions((53, 2), PADDED, 4, 3)] == [(11, 2)]
    assert list_regions((13,), Shard(0, (Segment(1, 16, 1, True),), 13), 8, 7) == []


def test_regions_intersect() -> None:
    assert Region((0, 2), (4, 4)).intersect(Region((3, 0), (4, 3))) == Region((3, 2), (1, 1))
    assert Region((0,), (4,)).intersect(Region((4,), (2,))) is None
    assert Region((), ()).intersect(Region((), ())) == Region((), ())
