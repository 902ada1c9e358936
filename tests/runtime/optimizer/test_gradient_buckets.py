"""Sums over groups in buckets, and the shared loss."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from autoptd.runtime.comm.connection import Connection, run_threads
from autoptd.runtime.optimizer import gradient_buckets
from autoptd.runtime.optimizer.gradient_buckets import share_loss, sum_over
from autoptd.runtime.program.manifest import Manifest
from autoptd.runtime.program.placement import Parameter, Replicate, Segment, Shard
from tests.counting import calls
from tests.runtime.chain import Chain


def manifest_of(mesh: tuple[int, int, int], *parameters: Parameter) -> Manifest:
    manifest = Chain(mesh, "gpipe", 1, 1).manifest
    return replace(manifest, parameters={p.name: p for p in parameters})


def test_split_tells_divided_from_undivided() -> None:
    placement = Shard(0, (Segment(1, 4, 1, True), Segment(1, 3, 1, False), Segment(1, 2, 1, True)))
    local = torch.arange(6.0)
    assert [x.tolist() for x in placement.split(local, 2, divided=True)] == [[0, 1], [5]]
    assert [x.tolist() for x in placement.split(local, 2, divided=False)] == [[2, 3, 4]]
    assert Replicate().split(local, 2, divided=True) == []


def test_buckets_keep_order_dtype_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_buckets, "BUCKET_BYTES", 40)
    manifest = manifest_of((1, 1, 2))
    shapes = [((2, 3), torch.float32), ((4,), torch.float64), ((), torch.float32), ((30,), torch.float32)]

    def body(connection: Connection) -> tuple[list[Tensor], int]:
        group = connection.rank.group("data")
        tensors = [torch.full(shape, float(group.index + i), dtype=dtype) for i, (shape, dtype) in enumerate(shapes)]
        sum_over(group, tensors)
        return tensors, calls(group)["all_reduce"]

    for tensors, sums in run_threads(manifest, body):
        assert sums == 3
        for i, (tensor, (shape, dtype)) in enumerate(zip(tensors, shapes, strict=True)):
            assert torch.equal(tensor, torch.full(shape, 2 * i + 1.0, dtype=dtype))


def test_loss_is_the_mean_over_microbatches_and_replicas_everywhere() -> None:
    manifest = Chain((2, 3, 2), "gpipe", 1, 2).manifest

    def body(connection: Connection) -> Tensor:
        at = connection.rank.coordinates
        losses = [torch.tensor(1.0 + at.data), torch.tensor(2.0)] if at.pipeline == 2 else []
        return share_loss(connection.rank, losses, torch.full((2,), 2.0, dtype=torch.float64))

    for pair in run_threads(manifest, body):
        assert pair.tolist() == [1.75, gradient_buckets.DTYPES.index(torch.float32)]
