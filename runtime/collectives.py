"""Communication inside a stage, over the tensor group: Megatron's conjugate operators f and g (SC21 §2.3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from autoptd.runtime.comm.rank import Rank
from autoptd.runtime.kernels.activation import activate_linear
from autoptd.runtime.kernels.packed_linear import SplitLinear


def copy_to_tensor(rank: Rank, x: Tensor) -> Tensor:
    """Hand a replicated `x` to a divided region (f). Backward all-reduces the ranks' partial gradients."""
    if rank.group("tensor").size == 1:
        return x
    copied: Tensor = _Copy.apply(x, rank)  # type: ignore[no-untyped-call]
    return copied


def reduce_from_tensor(rank: Rank, x: Tensor) -> Tensor:
    """Sum the partial `x` of a divided region over the tensor ranks (g). Backward is the identity."""
    if rank.group("tensor").size == 1:
        return x
    # Summed out here: torch.compile of torch 2.11 makes each value inside a Function's forward an output of it, one
    # tensor several times after an all-reduce in place, and gives its backward zeros.
    reduced: Tensor = _Reduced.apply(x, rank.all_reduce(_own(x.detach())))  # type: ignore[no-untyped-call]
    return reduced


def take_own(rank: Rank, x: Tensor, dim: int) -> Tensor:
    """Take this tensor rank's part of a replicated `x`: the index-th of t equal, contiguous parts along `dim`.

    Backward gives a partial gradient, zero outside the part. Raises ValueError when t does not divide `dim`.
    """
    size, index = rank.group("tensor").size, rank.group("tensor").index
    if size == 1:
        return x
    width, rest = divmod(x.shape[dim], size)
    if rest:
        raise ValueError(f"dimension {dim} of {list(x.shape)} does not divide over {size} tensor ranks")
    return x.narrow(dim, index * width, width)


def copied_linear(
    rank: Rank, x: Tensor, weight: Tensor, bias: Tensor | None = None, transposed: bool = False
) -> Tensor:
    """Compute ``linear(copy_to_tensor(rank, x), weight, bias)``.

    `weight` is [out, in], or [in, out] where `transposed`. The backward posts f's all-reduce, computes the gradients of
    weight and bias, and then waits for it.
    """
    return _multiply_copied(rank, _Linear(transposed), x, [weight], [bias])[0]


def copied_linears(
    rank: Rank,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None = None,
    transposed: bool = False,
) -> tuple[Tensor, ...]:
    """Compute several linears of one f(x), whose gradients of x are added before f's all-reduce; biases may be None.

    Raises ValueError where there are not as many biases as weights.
    """
    given = [None] * len(weights) if biases is None else biases
    if len(given) != len(weights) or not weights:
        raise ValueError(
            f"copied_linears was given {len(weights)} weights and {len(given)} biases, expected a bias or None for "
            "each of one weight or more"
        )
    return _multiply_copied(rank, _Linear(transposed), x, weights, given)


def copied_linear_gelu(
    rank: Rank,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    approximate: Literal["none", "tanh"] = "none",
    transposed: bool = False,
) -> Tensor:
    """Compute `kernels.linear_gelu` of f(x), with f's all-reduce beside the weights' gradients."""
    linear = partial(copied_linear, rank, transposed=transposed)
    return activate_linear(linear, x, weight, bias, approximate, transposed)


def copied_split_linear(
    rank: Rank, x: Tensor, weight: Tensor, bias: Tensor | None, sections: int, transposed: bool = False
) -> Tensor:
    """Compute `kernels.split_linear` of f(x), with f's all-reduce beside the weights' gradients."""
    return _multiply_copied(rank, SplitLinear(sections, transposed), x, [weight], [bias])[0]


COPIED = (copied_linear, copied_linears, copied_linear_gelu, copied_split_linear)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rank: Rank) -> Tensor:
        ctx.rank = rank
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.rank.all_reduce(_own(gradient)), None


class _Reduced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, total: Tensor) -> Tensor:
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _own(x: Tensor) -> Tensor:
    """Return a contiguous copy: an all-reduce may work in place, and others may still hold `x`."""
    return x.clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class _Linear:
    """``linear(x, weight, bias)``; `weight` is [out, in], or [in, out] where `transposed`."""

    transposed: bool

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return functional.linear(x, weight.t() if self.transposed else weight, bias)

    def terms(self, gradient: Tensor, weight: Tensor) -> list[tuple[Tensor, Tensor]]:
        return [(_rows(gradient), weight.t() if self.transposed else weight)]

    def differentiate_weight(self, gradient: Tensor, x: Tensor) -> Tensor:
        left, right = (x, gradient) if self.transposed else (gradient, x)
        return _rows(left).t() @ _rows(right)

    def differentiate_bias(self, gradient: Tensor) -> Tensor:
        return _rows(gradient).sum(0)


def _multiply_copied(
    rank: Rank,
    product: _Linear | SplitLinear,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
) -> tuple[Tensor, ...]:
    """Compute `product` of ``copy_to_tensor(rank, x)`` with each weight and its bias."""
    made: tuple[Tensor, ...] = _Copied.apply(rank, product, x, *weights, *biases)  # type: ignore[no-untyped-call]
    return made


class _Copied(torch.autograd.Function):
    """The products as one node that saves x once, and the weights."""

    @staticmethod
    def forward(
        ctx: Any, rank: Rank, product: _Linear | SplitLinear, x: Tensor, *parameters: Any
    ) -> tuple[Tensor, ...]:
        count = len(parameters) // 2
        weights, biases = parameters[:count], parameters[count:]
        ctx.rank, ctx.product, ctx.shape = rank, product, x.shape
        own, *wanted = ctx.needs_input_grad[2:]
        kept = weights if own else [None] * count
        ctx.save_for_backward(x if any(wanted[:count]) else None, *kept)
        return tuple(product.multiply(x, *pair) for pair in zip(weights, biases, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        product, measured = ctx.product, ctx.rank.measured
        # If rows must be copied, then once, and not in each product that reads them.
        gradients = tuple(_rows(gradient).view(gradient.shape) for gradient in gradients)
        own, *wanted = ctx.needs_input_grad[2:]
        posted = begin = of_x = None
        if own:
            pairs = zip(gradients, weights, strict=True)
            (left, right), *rest = (term for pair in pairs for term in product.terms(*pair))
            total = left @ right
            for left, right in rest:
                total.addmm_(left, right)
            posted = ctx.rank.group("tensor").post_all_reduce([total])
            begin = None if measured is None else measured.stopwatch.mark()
        count = len(gradients)
        of_weights = [
            product.differentiate_weight(gradient, x) if asked else None
            for gradient, asked in zip(gradients, wanted[:count], strict=True)
        ]
        of_biases = [
            product.differentiate_bias(gradient) if asked else None
            for gradient, asked in zip(gradients, wanted[count:], strict=True)
        ]
        if posted is not None:
            computed = None if measured is None else measured.stopwatch.mark()
            of_x = posted.wait()[0].view(ctx.shape)
            if measured is not None:
                measured.add("tensor", begin)
                measured.add("weights", begin, computed)
        return None, None, of_x, *of_weights, *of_biases


def _rows(x: Tensor) -> Tensor:
    """Return `x` with all dimensions but the last as one."""
    return x.reshape(-1, x.shape[-1])
