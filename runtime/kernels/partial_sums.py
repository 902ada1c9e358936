"""What ranks exchange, with the exchange of its gradient: the sum of what each tensor rank has one term of (g)."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autoptd.runtime.comm.rank import Rank


def sum_over_ranks(rank: Rank, x: Tensor) -> Tensor:
    """Sum the partial `x` of a divided region over the tensor ranks; backward is the identity."""
    return x if rank.group("tensor").size == 1 else move(x, partial(add_up, rank), lambda of_sum: of_sum)


def add_up(rank: Rank, x: Tensor) -> Tensor:
    """Return the sum of `x` over the tensor ranks: of a copy, as it may work in place, and others may hold `x`."""
    return rank.all_reduce(x.clone(memory_format=torch.contiguous_format))


def move(x: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]) -> Tensor:
    """Return ``forward(x)``, whose gradient `backward` turns into that of `x`."""
    # Made out here: torch.compile of torch 2.11 makes each value inside a Function's forward an output of it, one
    # tensor several times after an all-reduce in place, and gives its backward zeros.
    moved = forward(x.detach())
    return _Moved.apply(x, moved, backward)  # type: ignore[no-any-return, no-untyped-call]


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, moved: Tensor, backward: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.back = backward
        return moved

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(gradient), None, None
