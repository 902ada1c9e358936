"""Pieces of all ranks together are each logical tensor once, and are what the ranks' slices hold there."""

from __future__ import annotations

from math import prod
from unittest import mock

import pytest
import torch

from autoptd.runtime.checkpoint import regions
from autoptd.runtime.checkpoint.regions import Box, Run, local_parts, own_pieces
from autoptd.runtime.comm.rank import Rank
from autoptd.runtime.program.manifest import Manifest, Output, StageInterface
from autoptd.runtime.program.mesh import Mesh
from autoptd.runtime.program.placement import Parameter, Placement, Segment

PACKED = Placement(0, (Segment(3, 4, 5, True), Segment(1, 6, 1, False), Segment(1, 8, 2, True)))
PADDED = Placement(0, (Segment(1, 56, 1, True),), padding=3)
COLUMNS = Placement(1, (Segment(1, 8, 2, True),))
PARAMETERS = {
    "packed": Parameter("packed", (82, 3), torch.float32, placement=PACKED),
    "padded": Parameter("padded", (53, 2), torch.float32, placement=PADDED),
    "columns": Parameter("columns", (7, 16), torch.float32, placement=COLUMNS),
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


def divide_runs(manifest: Manifest, rank: Rank) -> dict[str, Run]:
    """What this replica has of a stage's parameters where these, in a row with their padding, are divided evenly."""
    at, mesh = rank.coordinates, manifest.mesh
    names = [n for n in PARAMETERS if at.pipeline in manifest.owners(n) and n != "constant"]
    shapes = [PARAMETERS[n].placement.local_shape(PARAMETERS[n].shape, mesh.tensor) for n in names]
    width = -(-sum(prod(shape) for shape in shapes) // mesh.data)
    runs, begin = {}, 0
    for name, shape in zip(names, shapes, strict=True):
        low, high = (min(max(k * width - begin, 0), prod(shape)) for k in (at.data, at.data + 1))
        runs[name] = Run(shape, low, high)
        begin += prod(shape)
    return runs


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 1, 1), (4, 1, 2), (2, 3, 2), (1, 2, 3)])
@pytest.mark.parametrize("piece", [1 << 24, 20])
@pytest.mark.parametrize("divided", [False, True])
def test_pieces_are_every_element_once(shape: tuple[int, int, int], piece: int, divided: bool) -> None:
    mesh = Mesh(*shape)
    manifest = make_manifest(mesh)
    logical = {n: torch.arange(torch.Size(p.shape).numel()).reshape(p.shape) for n, p in PARAMETERS.items()}
    seen = {name: torch.zeros(p.shape, dtype=torch.int) for name, p in PARAMETERS.items()}
    written = [0] * mesh.size
    with mock.patch.object(regions, "PIECE_ELEMENTS", piece):
        for number in range(mesh.size):
            rank = Rank.local(mesh, mesh.coordinates(number))
            runs = divide_runs(manifest, rank) if divided else {}
            for name, box, local in own_pieces(manifest, rank, runs):
                own = PARAMETERS[name].placement.take(logical[name], mesh.tensor, rank.coordinates.tensor)
                found = own[local.slices]
                if divided:
                    run = runs[name]
                    found = run.view(own.reshape(-1)[run.first : run.end], local)
                assert torch.equal(found, logical[name][box.slices])
                seen[name][box.slices] += 1
                written[number] += box.elements
    for name, counts in seen.items():
        assert bool((counts == (name != "constant")).all()), name
    if piece == 20 and mesh.pipeline == 1:
        assert max(written) <= 2 * sum(written) / mesh.size  # of what is divided and what is not


@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (3, 1, 4), (2, 3, 2, 2), (0, 4)])
def test_a_run_is_a_few_boxes_in_its_order(shape: tuple[int, ...]) -> None:
    whole = torch.arange(prod(shape)).reshape(shape)
    for first in range(whole.numel() + 1):
        for end in range(first, whole.numel() + 1):
            row, run = whole.reshape(-1)[first:end], Run(shape, first, end)
            regions = run.boxes()
            assert len(regions) <= max(1, 2 * len(shape) - 1)
            assert torch.equal(torch.cat([row[:0], *(whole[b.slices].reshape(-1) for b in regions)]), row)
            assert all(torch.equal(run.view(row, box), whole[box.slices]) for box in regions)


def test_a_divided_tensor_has_a_box_for_each_run() -> None:
    found = local_parts((82, 3), PACKED, 2, 1)
    assert [(part.box.starts[0], part.box.lengths[0], part.local[0], part.shared) for part in found] == [
        (10, 10, 0, False),
        (30, 10, 10, False),
        (50, 10, 20, False),
        (60, 6, 30, True),
        (74, 8, 36, False),
    ]


def test_padding_is_no_part() -> None:
    assert [part.box.lengths for part in local_parts((53, 2), PADDED, 4, 3)] == [(11, 2)]
    assert local_parts((13,), Placement(0, (Segment(1, 16, 1, True),), padding=3), 8, 7) == []


def test_boxes_meet() -> None:
    assert Box((0, 2), (4, 4)).meet(Box((3, 0), (4, 3))) == Box((3, 2), (1, 1))
    assert Box((0,), (4,)).meet(Box((4,), (2,))) is None
    assert Box((), ()).meet(Box((), ())) == Box((), ())
