"""Communication inside a stage, over the tensor group: Megatron's conjugate operators f and g (SC21 §2.3)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autoptd.runtime.communicator import Group
from autoptd.runtime.rank import Rank


def copy_to_tensor(rank: Rank, x: Tensor) -> Tensor:
    """f: hand a replicated `x` to a divided region. Backward all-reduces the ranks' partial gradients."""
    if rank.tensor.size == 1:
        return x
    copied: Tensor = _Copy.apply(x, rank.tensor)  # type: ignore[no-untyped-call]
    return copied


def reduce_from_tensor(rank: Rank, x: Tensor) -> Tensor:
    """g: sum the partial `x` of a divided region over the tensor ranks. Backward is the identity."""
    if rank.tensor.size == 1:
        return x
    reduced: Tensor = _Reduce.apply(x, rank.tensor)  # type: ignore[no-untyped-call]
    return reduced


def take_own(rank: Rank, x: Tensor, dim: int) -> Tensor:
    """This tensor rank's part of a replicated `x`: the index-th of t equal, contiguous parts along `dim`.

    Backward gives a partial gradient, zero outside the part. Raises ValueError when t does not divide `dim`.
    """
    size, index = rank.tensor.size, rank.tensor.index
    if size == 1:
        return x
    width, rest = divmod(x.shape[dim], size)
    if rest:
        raise ValueError(f"dimension {dim} of {list(x.shape)} does not divide over {size} tensor ranks")
    return x.narrow(dim, index * width, width)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.group.all_reduce(_own(gradient)), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return group.all_reduce(_own(x))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _own(x: Tensor) -> Tensor:
    """A contiguous copy: an all-reduce may work in place, and others may still hold `x`."""
    return x.clone(memory_format=torch.contiguous_format)
