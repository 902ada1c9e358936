"""The sum of what each tensor rank has one term of (g): forward an all-reduce, backward the identity."""

from typing import Any

import torch
from torch import Tensor

from autoptd.runtime.comm.rank import Rank


def sum_over_ranks(rank: Rank, x: Tensor) -> Tensor:
    """Sum the partial `x` of a divided region over the tensor ranks."""
    if rank.group("tensor").size == 1:
        return x
    # Summed out here: torch.compile of torch 2.11 makes each value inside a Function's forward an output of it, one
    # tensor several times after an all-reduce in place, and gives its backward zeros.
    total = rank.all_reduce(x.detach().clone(memory_format=torch.contiguous_format))
    return _Reduced.apply(x, total)  # type: ignore[no-any-return, no-untyped-call]


class _Reduced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, total: Tensor) -> Tensor:
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
