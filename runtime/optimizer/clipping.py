"""The norm of the whole model's gradient, from each rank's part of it."""

from collections.abc import Iterator, Mapping, Sequence
from math import inf

import torch
from torch import Tensor

from autoptd.runtime.comm.rank import Rank
from autoptd.runtime.optimizer.zero1 import FlatShard
from autoptd.runtime.program.manifest import Manifest


def global_norm(
    manifest: Manifest, rank: Rank, gradients: Mapping[str, Tensor], shards: Sequence[FlatShard], p: float
) -> Tensor:
    """Return the `p`-norm of all gradients of the model: float64, the same bits on every rank.

    `gradients` are whole, by name; those of `shards` are in the ``.grad`` of what this replica owns of them. Divided
    rows count on each tensor rank, undivided ones on the first; a tied parameter on its first owner.
    """
    held: dict[str, list[Tensor]] = {"tensor": [], "expert": []}
    for name, gradient in gradients.items():
        held[manifest.parameters[name].placement.axis] += _own_rows(manifest, rank, name, gradient)
    parts = [part for shard in shards for part in _own_parts(manifest, rank, shard)]
    norm, experts, part = (_norm(tensors, p, rank.device) for tensors in (*held.values(), parts))
    if p == inf:
        return rank.maximum(torch.stack([norm, experts, part]).max())
    powers = norm**p
    if rank.group("exchange").size > 1:
        powers = powers + rank.group("exchange").all_reduce(experts**p)
    if shards:
        powers = powers + rank.group("data").all_reduce(part**p)
    powers = rank.group("pipeline").all_reduce(rank.group("tensor").all_reduce(powers))
    # Devices of other kinds add up otherwise; replicas that clip by other norms would drift apart.
    powers = rank.group("data").all_reduce(powers, "max")
    return powers.pow(1 / p)


def _norm(tensors: Sequence[Tensor], p: float, device: torch.device) -> Tensor:
    """Return the norm of all `tensors` together: float64."""
    norms = [torch.zeros((), dtype=torch.float64, device=device)]
    for x in (x for x in tensors if x.numel()):
        own = torch.linalg.vector_norm(x, p, dtype=torch.promote_types(x.dtype, torch.float32))
        norms.append(own.to(torch.float64))
    return torch.linalg.vector_norm(torch.stack(norms), p)  # type: ignore[no-any-return]


def _own_parts(manifest: Manifest, rank: Rank, shard: FlatShard) -> Iterator[Tensor]:
    """Yield the elements that this rank counts of the gradient of its part of a shard."""
    gradient = shard.own.grad
    if gradient is None:
        return
    for name, (inside, part) in shard.ranges().items():
        shape = manifest.parameters[name].local_shape(manifest.mesh.sizes)
        counted = torch.zeros(shape, dtype=torch.bool, device=gradient.device)
        for rows in _own_rows(manifest, rank, name, counted):
            rows.fill_(True)
        own, counts = gradient[inside], counted.reshape(-1)[part]
        # To choose elements would wait for a GPU; zeros add nothing.
        yield own[counts] if own.is_cpu else own.masked_fill(~counts, 0)


def _own_rows(manifest: Manifest, rank: Rank, name: str, gradient: Tensor) -> list[Tensor]:
    if manifest.homes(name)[0] != rank.coordinates.pipeline:
        return []
    on_axis, group = rank.holds(manifest.parameters[name].placement)
    rows = on_axis.split(gradient, group.size, divided=True)
    if group.index == 0:
        rows += on_axis.split(gradient, group.size, divided=False)
    return rows
