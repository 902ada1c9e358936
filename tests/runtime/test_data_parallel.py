"""Gradients after the schedule: buckets, partial rows, replicas; and the shared loss."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from autoptd.runtime import data_parallel
from autoptd.runtime.connection import Connection, run_threads
from autoptd.runtime.data_parallel import reduce_gradients, share_loss, split_rows, sum_over
from autoptd.runtime.manifest import Manifest
from autoptd.runtime.placement import Parameter, Placement, Segment
from tests.runtime.chain import Chain


def manifest_of(mesh: tuple[int, int, int], *parameters: Parameter) -> Manifest:
    manifest = Chain(mesh, "gpipe", 1, 1).manifest
    return replace(manifest, parameters={p.name: p for p in parameters})


def test_split_rows_tells_divided_from_undivided() -> None:
    placement = Placement(0, (Segment(1, 4, 1, True), Segment(1, 3, 1, False), Segment(1, 2, 1, True)))
    local = torch.arange(6.0)
    assert [x.tolist() for x in split_rows(placement, local, 2, divided=True)] == [[0, 1], [5]]
    assert [x.tolist() for x in split_rows(placement, local, 2, divided=False)] == [[2, 3, 4]]
    assert split_rows(Placement(), local, 2, divided=True) == []


def test_partial_rows_are_summed_over_the_tensor_ranks_and_the_rest_is_left() -> None:
    placement = Placement(0, (Segment(1, 4, 1, True), Segment(1, 1, 1, False)))
    manifest = manifest_of(
        (2, 1, 1),
        Parameter("packed", (5,), torch.float32, placement=placement, partial_gradient=True),
        Parameter("norm", (2,), torch.float32, partial_gradient=True),
        Parameter("bias", (2,), torch.float32),
    )

    def body(connection: Connection) -> dict[str, Tensor]:
        own = float(connection.rank.tensor.index + 1)
        gradients = {"packed": torch.full((3,), own), "norm": torch.full((2,), own), "bias": torch.ones(2)}
        reduce_gradients(manifest, connection, gradients)
        return gradients

    for index, gradients in enumerate(run_threads(manifest, body)):
        assert gradients["packed"].tolist() == [index + 1, index + 1, 3]
        assert gradients["norm"].tolist() == [3, 3]
        assert gradients["bias"].tolist() == [1, 1]


def test_tied_parameters_are_summed_by_name_in_whatever_order_their_owners_met_them() -> None:
    """As where layers are shared, and the first stage begins in the middle of one."""
    names = ("first", "second", "third")
    manifest = manifest_of((1, 2, 1), *(Parameter(name, (2,), torch.float32) for name in names))
    orders = (names, names[::-1])
    stages = [replace(s, parameters=orders[s.index % 2]) for s in manifest.stages]
    manifest = replace(manifest, stages=tuple(stages))

    def body(connection: Connection) -> dict[str, Tensor]:
        order = orders[connection.rank.coordinates.pipeline]
        gradients = {name: torch.full((2,), float(names.index(name) + 1)) for name in order}
        reduce_gradients(manifest, connection, gradients)
        return gradients

    for gradients in run_threads(manifest, body):
        assert {name: g.tolist() for name, g in gradients.items()} == {
            "first": [2, 2],
            "second": [4, 4],
            "third": [6, 6],
        }


def test_buckets_keep_order_dtype_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_parallel, "BUCKET_BYTES", 40)
    manifest = manifest_of((1, 1, 2))
    shapes = [((2, 3), torch.float32), ((4,), torch.float64), ((), torch.float32), ((30,), torch.float32)]

    def body(connection: Connection) -> tuple[list[Tensor], int]:
        group = connection.rank.data
        tensors = [
            torch.full(shape, float(group.index + i), dtype=dtype) for i, (shape, dtype) in enumerate(shapes)
        ]
        sum_over(group, tensors, divisor=2)
        return tensors, group.counts["all_reduce"]

    for tensors, calls in run_threads(manifest, body):
        assert calls == 3
        for i, (tensor, (shape, dtype)) in enumerate(zip(tensors, shapes, strict=True)):
            assert torch.equal(tensor, torch.full(shape, i + 0.5, dtype=dtype))


def test_loss_is_the_mean_over_microbatches_and_replicas_everywhere() -> None:
    manifest = Chain((2, 3, 2), "gpipe", 1, 2).manifest

    def body(connection: Connection) -> Tensor:
        at = connection.rank.coordinates
        losses = [torch.tensor(1.0 + at.data), torch.tensor(2.0)] if at.pipeline == 2 else []
        return share_loss(connection.rank, losses)

    for pair in run_threads(manifest, body):
        assert pair.tolist() == [1.75, data_parallel.DTYPES.index(torch.float32)]
