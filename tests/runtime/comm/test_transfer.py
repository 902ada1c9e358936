"""Boundary tensors: whole, scattered and gathered, handed over."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autoptd.runtime.comm.point_to_point import thread_channels
from autoptd.runtime.comm.rank import CPU, Rank, thread_ranks
from autoptd.runtime.comm.threads import ThreadWorld
from autoptd.runtime.comm.transfer import LocalBoundary, RecvBuffer, SendBuffer, is_scattered
from autoptd.runtime.program.manifest import Boundary
from autoptd.runtime.program.mesh import Mesh
from autoptd.runtime.program.placement import REPLICATED, Placement, Shard
from tests.counting import sent_by

X = Boundary("x", (2, 6), torch.float32, True)


@pytest.mark.parametrize(
    ("shape", "divided", "tensor", "scatter_gather", "scattered"),
    [
        ((2, 6), False, 4, True, True),
        ((2, 6), False, 4, False, False),
        ((2, 6), True, 4, True, False),
        ((2, 6), False, 1, True, False),
        ((3, 5), False, 2, True, False),
    ],
)
def test_boundaries_scattered_over_the_tensor_ranks(
    shape: tuple[int, ...], divided: bool, tensor: int, scatter_gather: bool, scattered: bool
) -> None:
    boundary = Boundary("x", shape, torch.float32, True, Placement(tensor=Shard(0)) if divided else REPLICATED)
    assert is_scattered(boundary, tensor, scatter_gather) is scattered


@pytest.mark.parametrize("scatter_gather", [True, False])
def test_values_arrive_as_they_left(scatter_gather: bool) -> None:
    mesh = Mesh(2, 2, 1)
    world = ThreadWorld()
    channels = thread_channels(mesh, world)
    boundaries = [
        X,
        Boundary("odd", (3,), torch.int64, False),
        Boundary("own", (2, 3), torch.float32, True, Placement(tensor=Shard(0))),
    ]
    own = [torch.full((2, 3), float(i)) for i in range(2)]
    values = [torch.arange(12.0).view(6, 2).t(), torch.tensor([7, 8, 9])]
    counts = [0, 0]

    def body(rank: Rank) -> list[Tensor]:
        at = rank.coordinates
        channel = channels[mesh.rank_of(0, 0, at.tensor), mesh.rank_of(0, 1, at.tensor)]
        if at.pipeline == 0:
            buffer = SendBuffer(boundaries, channel, rank.group("tensor"), scatter_gather, "0 -> 1")
            buffer.put(5, [*values, own[at.tensor]])
            buffer.send(5)
            counts[at.tensor] = sent_by(buffer)
            return []
        receiving = RecvBuffer(boundaries, channel, rank.group("tensor"), scatter_gather, CPU)
        receiving.post(5)
        return receiving.take(5)

    results = world.run(body, thread_ranks(mesh, world))
    for index, received in enumerate(results[2:]):
        for value, expected in zip(received, [*values, own[index]], strict=True):
            assert torch.equal(value, expected)
    assert counts == [(6 if scatter_gather else 12) + 3 + 6] * 2


def test_a_local_boundary_passes_the_tensors_themselves() -> None:
    boundary = LocalBoundary()
    x = torch.ones(2)
    boundary.put(3, [x])
    assert boundary.take(3)[0] is x
    boundary.put(4, [x])
    boundary.clear()
    with pytest.raises(KeyError):
        boundary.take(4)
