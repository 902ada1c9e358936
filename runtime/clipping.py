"""The norm of the whole model's gradient, of which each rank holds a part, and clipping by it."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

import torch
from torch import Tensor

from autoptd.runtime.data_parallel import split_rows
from autoptd.runtime.manifest import Manifest
from autoptd.runtime.rank import Rank


def global_norm(manifest: Manifest, rank: Rank, gradients: Mapping[str, Tensor], norm_type: float) -> Tensor:
    """The `norm_type` norm of all gradients of the model: float64, the same bits on every rank.

    Divided rows count on each tensor rank, undivided ones on the first; a tied parameter on its first owner.
    """
    norms = [
        torch.linalg.vector_norm(rows, norm_type, dtype=torch.promote_types(rows.dtype, torch.float32))
        for name, gradient in gradients.items()
        if manifest.homes(name)[0] == rank.coordinates.pipeline
        for rows in _own_rows(manifest, rank, name, gradient)
    ]
    whole = torch.zeros(1, dtype=torch.float64, device=rank.device)
    if norms:
        together = torch.stack([norm.to(torch.float64) for norm in norms])
        whole += torch.linalg.vector_norm(together, norm_type)
    if norm_type == inf:
        return rank.pipeline.all_reduce(rank.tensor.all_reduce(whole, "max"), "max")[0]
    powers = rank.pipeline.all_reduce(rank.tensor.all_reduce(whole**norm_type))
    return (powers ** (1 / norm_type))[0]


def scale_gradients(gradients: Mapping[str, Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale `gradients` in place so that a whole of norm `norm` has at most `max_norm`, as torch does."""
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for gradient in gradients.values():
        gradient.mul_(factor)


def _own_rows(manifest: Manifest, rank: Rank, name: str, gradient: Tensor) -> list[Tensor]:
    placement, tensor = manifest.parameters[name].placement, rank.tensor.size
    rows = split_rows(placement, gradient, tensor, divided=True)
    if rank.tensor.index == 0:
        rows += split_rows(placement, gradient, tensor, divided=False)
    return rows
