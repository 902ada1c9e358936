"""Divided linears of f(x), whose backward sums the gradient of x over the ranks while it computes the weights'."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from autoptd.runtime.comm.rank import Rank
from autoptd.runtime.kernels import packed_linear

Terms = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Linear:
    """``linear(x, weight, bias)``; `weight` is [out, in], or [in, out] where `transposed`."""

    transposed: bool

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return functional.linear(x, weight.t() if self.transposed else weight, bias)

    def terms(self, gradient: Tensor, weight: Tensor) -> Terms:
        """Return matrices whose products add up to the gradient of x's rows."""
        return [(_rows(gradient), weight.t() if self.transposed else weight)]

    def differentiate_weight(self, gradient: Tensor, x: Tensor) -> Tensor:
        left, right = (x, gradient) if self.transposed else (gradient, x)
        return _rows(left).t() @ _rows(right)

    def differentiate_bias(self, gradient: Tensor) -> Tensor:
        return _rows(gradient).sum(0)


@dataclass(frozen=True)
class SplitLinear:
    """``kernels.split_linear``."""

    sections: int
    transposed: bool

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return packed_linear.split_linear(x, weight, bias, self.sections, self.transposed)

    def terms(self, gradient: Tensor, weight: Tensor) -> Terms:
        return packed_linear.split_terms(gradient, weight, self.sections, self.transposed)

    def differentiate_weight(self, gradient: Tensor, x: Tensor) -> Tensor:
        return packed_linear.differentiate_weight(gradient, x, self.sections, self.transposed)

    def differentiate_bias(self, gradient: Tensor) -> Tensor:
        return packed_linear.differentiate_bias(gradient, self.sections)


def multiply_copied(
    rank: Rank,
    product: Linear | SplitLinear,
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
        ctx: Any, rank: Rank, product: Linear | SplitLinear, x: Tensor, *parameters: Any
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
        gradients = tuple(_as_rows(gradient) for gradient in gradients)
        own, *wanted = ctx.needs_input_grad[2:]
        posted = begin = of_x = None
        if own:
            pairs = zip(gradients, weights, strict=True)
            total = _add_products([term for pair in pairs for term in product.terms(*pair)])
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
                measured.add_hidden(begin, computed)
        return None, None, of_x, *of_weights, *of_biases


def _add_products(terms: Terms) -> Tensor:
    (left, right), *rest = terms
    total = left @ right
    for left, right in rest:
        total.addmm_(left, right)
    return total


def _rows(x: Tensor) -> Tensor:
    """Return `x` with all dimensions but the last as one."""
    return x.reshape(-1, x.shape[-1])


def _as_rows(gradient: Tensor) -> Tensor:
    """Copy `gradient` once if its rows must be copied, instead of in each product that reads them."""
    return _rows(gradient).view(gradient.shape)
