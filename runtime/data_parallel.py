"""What the ranks owe each other after the schedule: sums of gradients, and the loss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from autoptd.runtime.communicator import Group
from autoptd.runtime.connection import Connection
from autoptd.runtime.manifest import Manifest
from autoptd.runtime.placement import Placement
from autoptd.runtime.rank import Rank

BUCKET_BYTES = 25 * 2**20
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def reduce_gradients(manifest: Manifest, connection: Connection, gradients: dict[str, Tensor]) -> None:
    """Replace this rank's gradients, by name, with those of the whole step.

    Summed, in this order: over the tensor ranks where each has only a part of the sum; over the pipeline
    ranks that own a tied parameter; over the replicas, and divided by their number. Peers call this with the
    same names; owners of tied parameters have met them in orders of their own.
    """
    rank = connection.rank
    names = [name for name in manifest.parameters if name in gradients]
    partial = [
        rows
        for name in names
        if manifest.parameters[name].partial_gradient
        for rows in split_rows(
            manifest.parameters[name].placement, gradients[name], rank.tensor.size, divided=False
        )
    ]
    sums = list(partial)
    sum_over(rank.tensor, sums)
    for rows, summed in zip(partial, sums, strict=True):
        if summed is not rows:
            rows.copy_(summed)
    owners = {name: manifest.owners(name) for name in names}
    for ranks, group in connection.tied.items():
        _sum_named(group, gradients, [name for name in names if owners[name] == ranks])
    _sum_named(rank.data, gradients, names, divisor=rank.data.size)


def split_rows(placement: Placement, local: Tensor, tensor: int, *, divided: bool) -> list[Tensor]:
    """Views of the rows of a `local` slice that are divided over the `tensor` ranks, or that are not."""
    if placement.dim is None:
        return [] if divided else [local]
    widths = [s.rows // tensor if s.divided else s.rows for s in placement.segments]
    pieces = local.split(widths, placement.dim)
    return [rows for rows, s in zip(pieces, placement.segments, strict=True) if s.divided is divided]


def sum_over(group: Group, tensors: list[Tensor], divisor: int = 1) -> None:
    """Replace the entries of `tensors` with their sums over `group`, divided by `divisor`.

    They travel in flat buckets of one dtype and about 25 MB, in their order; the sums are views of these.
    """
    if group.size == 1:
        return
    for bucket in _fill_buckets(tensors):
        flat = group.all_reduce(torch.cat([tensors[i].reshape(-1) for i in bucket]))
        if divisor != 1:
            flat.div_(divisor)
        pieces = flat.split([tensors[i].numel() for i in bucket])
        for i, piece in zip(bucket, pieces, strict=True):
            tensors[i] = piece.view(tensors[i].shape)


def share_loss(rank: Rank, losses: Sequence[Tensor]) -> Tensor:
    """Give every rank the mean of all replicas' microbatch `losses`, which only the last pipeline rank has.

    Returns float64 [2]: the mean, the same bits everywhere, and the index in DTYPES of the losses' own dtype.
    """
    pair = torch.zeros(2, dtype=torch.float64, device=rank.device)
    if losses:
        # As a plain loop adds them up: each divided by m, in ascending order.
        total = losses[0] / len(losses)
        for loss in losses[1:]:
            total = total + loss / len(losses)
        pair[0] = rank.data.all_reduce(total.to(torch.float64)) / rank.data.size
        pair[1] = DTYPES.index(total.dtype)
    return rank.pipeline.broadcast(pair, rank.pipeline.size - 1)


def _sum_named(group: Group, gradients: dict[str, Tensor], names: Sequence[str], divisor: int = 1) -> None:
    tensors = [gradients[name] for name in names]
    sum_over(group, tensors, divisor)
    gradients.update(zip(names, tensors, strict=True))


def _fill_buckets(tensors: Sequence[Tensor]) -> Iterator[list[int]]:
    """Indices of `tensors`, dtype by dtype, in runs of up to BUCKET_BYTES."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        bucket: list[int] = []
        filled = 0
        for index, tensor in enumerate(tensors):
            if tensor.dtype is not dtype:
                continue
            if bucket and filled + tensor.nbytes > BUCKET_BYTES:
                yield bucket
                bucket, filled = [], 0
            bucket.append(index)
            filled += tensor.nbytes
        yield bucket
