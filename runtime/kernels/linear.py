"""Linears, and the gradients of their weights: a GPU adds them to float32 sums in the products that make them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from autoptd.runtime.comm.rank import Rank
from autoptd.runtime.kernels.operands import Operand

# The attribute of a leaf in half precision that is the float32 sum of its gradients, where operators may add to it.
SUM = "wide_sum"

# Whether x is gathered; "in pieces": each is multiplied while the next one comes.
Gathered = bool | Literal["in pieces"]


def linear(x: Tensor, weight: Tensor, bias: Operand = None, transposed: bool = False) -> Tensor:
    """Compute torch's ``linear`` of a parameter in half precision; `weight` is [out, in], [in, out] where `transposed`.

    Where the weight has a sum, the product adds its gradient there: in float32, as it was before it is rounded.
    """
    if not hasattr(weight, SUM):
        return Linear(transposed).multiply(x, weight, bias)
    return multiply(None, Linear(transposed), x, [weight], [bias])[0]


def add_linear(total: Tensor, x: Tensor, weight: Tensor, scale: float = 1.0, transposed: bool = False) -> Tensor:
    """Compute ``total + scale * linear(x, weight)`` as one product that adds to what it reads; `weight` as `linear`'s.

    A low-rank update of another product (LoRA) then costs one pass over the result.
    """
    return multiply(None, AddedLinear(transposed, scale), x, [weight], [total])[0]


def multiply(
    rank: Rank | None,
    product: Linear,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Operand],
    gathered: Gathered = False,
) -> tuple[Tensor, ...]:
    """Compute `product` of x with each weight and its bias; with a `rank` of f(x), or of x `gathered` over dimension 0.

    Of what is gathered only this rank's part is kept: the backward gathers it again.
    """
    made = None
    if gathered and rank is not None:
        made = _multiply_gathered(rank, product, x.detach(), weights, biases, gathered)
    return _Products.apply(rank, product, x, made, *weights, *biases)  # type: ignore[no-any-return, no-untyped-call]


@torch.no_grad()
def _multiply_gathered(
    rank: Rank, product: Linear, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Operand], gathered: Gathered
) -> tuple[Tensor, ...]:
    if gathered != "in pieces":
        whole = rank.all_gather(x, 0)
        return tuple(product.multiply(whole, *pair) for pair in zip(weights, biases, strict=True))
    whole = x.new_empty(rank.group("tensor").size, *x.shape)
    made = [x.new_empty(*whole.shape[:-1], len(product.turn(weight))) for weight in weights]

    def multiply_piece(at: int) -> None:
        for out, weight, bias in zip(made, weights, biases, strict=True):
            product.multiply_into(out[at], whole[at], weight, bias)

    rank.gather_in_pieces(x, whole, multiply_piece)
    return tuple(out.flatten(0, 1) for out in made)


def multiply_scattered(rank: Rank, product: Linear, x: Tensor, weight: Tensor) -> Tensor:
    """Return this rank's part, along dimension 0, of the tensor ranks' sum of their products, made piece by piece."""
    parts = x.detach().unflatten(0, (rank.group("tensor").size, -1))
    total = rank.scatter_in_pieces(lambda at: product.multiply(parts[at], weight.detach(), None))
    return _ScatteredProduct.apply(rank, product, x, weight, total)  # type: ignore[no-any-return, no-untyped-call]


@dataclass(frozen=True)
class Linear:
    """``scale * linear(x, weight) + bias``; `weight` is [out, in], or [in, out] where `transposed`."""

    transposed: bool
    scale: float = 1.0

    def multiply(self, x: Tensor, weight: Tensor, bias: Operand) -> Tensor:
        return functional.linear(x, self.turn(weight), bias)

    def multiply_into(self, out: Tensor, x: Tensor, weight: Tensor, bias: Operand) -> None:
        factors, out = (_rows(x), self.turn(weight).t()), _rows(out)
        torch.mm(*factors, out=out) if bias is None else torch.addmm(bias, *factors, out=out)

    def turn(self, weight: Tensor) -> Tensor:
        """Return the weight as [out, in]."""
        return weight.t() if self.transposed else weight

    def differentiate_weight(self, own: Operand, gradient: Tensor, x: Tensor) -> Operand:
        """Return the gradient of the weight, laid out as it is; None where it was added to the weight's `own` sum."""
        left, right = map(_rows, (x, gradient) if self.transposed else (gradient, x))
        if own is None:
            return _multiply(left.t(), right, self.scale)
        add_product(own, left.t(), right, self.scale)
        return None

    def differentiate_bias(self, gradient: Tensor) -> Tensor:
        return _rows(gradient).sum(0)


@dataclass(frozen=True)
class AddedLinear(Linear):
    """The product of `add_linear`, whose total stands for the bias."""

    def multiply(self, x: Tensor, weight: Tensor, bias: Operand) -> Tensor:
        assert bias is not None
        return torch.addmm(_rows(bias), _rows(x), self.turn(weight).t(), alpha=self.scale).view(bias.shape)

    def differentiate_bias(self, gradient: Tensor) -> Tensor:
        return gradient


def add_product(own: Tensor, left: Tensor, right: Tensor, scale: float = 1.0) -> None:
    """Add ``scale * left @ right``, of half precision, to `own` in float32."""
    torch.addmm(own, left, right, out_dtype=torch.float32, out=own, alpha=scale)


def _multiply(left: Tensor, right: Tensor, scale: float) -> Tensor:
    """Return ``scale * left @ right``; what is added to has no elements that count."""
    return left @ right if scale == 1 else torch.addmm(left.new_empty(1), left, right, beta=0, alpha=scale)


class _Products(torch.autograd.Function):
    """The products as one node that saves x once, and the weights."""

    @staticmethod
    def forward(
        ctx: Any, rank: Rank | None, product: Linear, x: Tensor, made: tuple[Tensor, ...] | None, *parameters: Any
    ) -> tuple[Tensor, ...]:
        count = len(parameters) // 2
        weights, biases = parameters[:count], parameters[count:]
        ctx.rank, ctx.product, ctx.shape, ctx.gathered = rank, product, x.shape, made is not None
        ctx.sums = [getattr(weight, SUM, None) for weight in weights]  # recomputed, others are saved
        wanted = ctx.needs_input_grad[4 : 4 + count]
        ctx.save_for_backward(x if any(wanted) else None, *weights)
        if made is not None:
            return made
        return tuple(product.multiply(x, *pair) for pair in zip(weights, biases, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Operand, ...]:
        x, *weights = ctx.saved_tensors
        product = ctx.product
        # If rows must be copied, then once, and not in each product that reads them.
        gradients = tuple(_rows(gradient).view(gradient.shape) for gradient in gradients)
        own, _, *wanted = ctx.needs_input_grad[2:]
        posted = of_x = None
        group: Any = ctx.rank and ctx.rank.group("tensor")
        if gathers := ctx.gathered and x is not None:
            parts = group.post_all_gather(x.contiguous().view(-1), x.new_empty(group.size * x.numel()))
        if own:
            (left, right), *rest = zip(map(_rows, gradients), map(product.turn, weights), strict=True)
            total = _multiply(left, right, product.scale)
            for left, right in rest:
                total.addmm_(left, right, alpha=product.scale)
            of_x = None if ctx.gathered else total.view(ctx.shape)
            if group is not None:
                posted = group.post_reduce_scatter(total.view(-1)) if ctx.gathered else group.post_all_reduce([total])

        def differentiate_parameters() -> list[Operand]:
            whole, count = parts.wait().view(-1, *ctx.shape[1:]) if gathers else x, len(gradients)
            of_weights = [
                product.differentiate_weight(sums, gradient, whole) if asked else None
                for sums, gradient, asked in zip(ctx.sums, gradients, wanted[:count], strict=True)
            ]
            asked_of = zip(gradients, wanted[count:], strict=True)
            return of_weights + [
                product.differentiate_bias(gradient) if asked else None for gradient, asked in asked_of
            ]

        if posted is None:
            return None, None, of_x, None, *differentiate_parameters()
        of_parameters, (summed,) = ctx.rank.compute_beside(posted, differentiate_parameters)
        return None, None, summed.view(ctx.shape), None, *of_parameters


class _ScatteredProduct(torch.autograd.Function):
    """Of a product whose sum is scattered: the gradient is gathered, and multiplied, as x is where it is gathered."""

    @staticmethod
    def forward(ctx: Any, rank: Rank, product: Linear, x: Tensor, weight: Tensor, total: Tensor) -> Tensor:
        ctx.rank, ctx.product, ctx.own = rank, product, getattr(weight, SUM, None)
        ctx.save_for_backward(x if ctx.needs_input_grad[3] else None, weight)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Operand, ...]:
        x, weight = ctx.saved_tensors
        turned = Linear(not ctx.product.transposed)
        whole = gradient.new_empty(ctx.rank.group("tensor").size, *gradient.shape)
        of_x = gradient.new_empty(*whole.shape[:-1], len(turned.turn(weight)))
        ctx.rank.gather_in_pieces(gradient, whole, lambda at: turned.multiply_into(of_x[at], whole[at], weight, None))
        of_weight = None if x is None else ctx.product.differentiate_weight(ctx.own, whole.flatten(0, 1), x)
        return None, None, of_x.flatten(0, 1), of_weight, None


def _rows(x: Tensor) -> Tensor:
    """Return `x` with all dimensions but the last as one."""
    return x.reshape(prod(x.shape[:-1]), x.shape[-1])
