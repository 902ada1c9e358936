"""A linear with several outputs: each lies in memory by itself, as if it had a weight of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autoptd.runtime.kernels.registration import define_operator


def split_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, sections: int, transposed: bool = False
) -> Tensor:
    """Compute ``linear(x, weight, bias)`` in `sections` equal parts: [sections, .., out / sections].

    A packed query, key and value then need no copy to be read head by head. `weight` is [out, in], or [in, out] where
    `transposed`. One batched product, on a CPU one for each part; no concatenation in the backward.
    """
    rows = weight.shape[1 if transposed else 0]
    if weight.dim() != 2 or x.shape[-1] != weight.shape[0 if transposed else 1] or rows % sections:
        raise ValueError(
            f"split_linear was given x {list(x.shape)}, weight {list(weight.shape)}, transposed={transposed} and "
            f"sections={sections}; expected x [.., in], and outputs that {sections} divides"
        )
    if bias is not None and bias.shape != (rows,):
        raise ValueError(f"split_linear was given a bias of shape {list(bias.shape)}, expected [{rows}]")
    made: Tensor = _forward(x, weight, bias, sections, transposed)
    return made


def _allocate(x: Tensor, weight: Tensor, _: Any, sections: int, transposed: bool) -> Tensor:
    return x.new_empty((sections, *x.shape[:-1], weight.shape[1 if transposed else 0] // sections))


@define_operator("split_linear", _allocate)
def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, sections: int, transposed: bool) -> Tensor:
    rows = x.reshape(-1, x.shape[-1]).expand(sections, -1, -1)
    parts = _sections(weight, sections, transposed)
    biases = None if bias is None else bias.view(sections, 1, -1)
    made = _multiply(rows, parts, biases)
    return made.view(sections, *x.shape[:-1], parts.shape[-1])


def _multiply(left: Tensor, right: Tensor, added: Tensor | None = None) -> Tensor:
    """Multiply in a batch, on a CPU one after another: of a batch of three, one of two threads would get two."""
    if left.device.type != "cpu":
        return torch.bmm(left, right) if added is None else torch.baddbmm(added, left, right)
    made = left.new_empty((len(left), left.shape[1], right.shape[2]))
    for index, out in enumerate(made):
        if added is None:
            torch.mm(left[index], right[index], out=out)
        else:
            torch.addmm(added[index], left[index], right[index], out=out)
    return made


def _sections(weight: Tensor, sections: int, transposed: bool) -> Tensor:
    """Return the weight as a view [sections, in, out / sections]."""
    rows, columns = weight.shape
    if transposed:
        return weight.view(rows, sections, columns // sections).transpose(0, 1)
    return weight.view(sections, rows // sections, columns).transpose(1, 2)


@dataclass(frozen=True)
class SplitLinear:
    """The products of a `split_linear` in `sections`, forward and for each gradient."""

    sections: int
    transposed: bool

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return split_linear(x, weight, bias, self.sections, self.transposed)

    def terms(self, gradient: Tensor, weight: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return pairs of matrices, one per section, whose products add up to the gradient of x's rows."""
        parts = _sections(weight, self.sections, self.transposed).transpose(1, 2)
        return list(zip(self._split(gradient), parts, strict=True))

    def differentiate_weight(self, _: Tensor, gradient: Tensor, x: Tensor) -> Tensor:
        """Return the gradient of the weight, laid out as the weight is, from that of the result."""
        rows = x.reshape(-1, x.shape[-1]).expand(self.sections, -1, -1)
        # A result that is written in place cannot be differentiated again.
        multiply = torch.bmm if torch.is_grad_enabled() else _multiply
        made = multiply(self._split(gradient).transpose(1, 2), rows).view(-1, x.shape[-1])
        return made.t() if self.transposed else made

    def differentiate_bias(self, gradient: Tensor) -> Tensor:
        return self._split(gradient).sum(1).view(-1)

    def _split(self, gradient: Tensor) -> Tensor:
        return gradient.reshape(self.sections, -1, gradient.shape[-1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _, *options = inputs
    ctx.product = SplitLinear(*options)
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    of_x = of_weight = of_bias = None
    if ctx.needs_input_grad[0]:
        (part, own), *rest = ctx.product.terms(gradient, weight)
        total = part @ own
        for part, own in rest:
            total = torch.addmm(total, part, own)
        of_x = total.view(x.shape)
    if ctx.needs_input_grad[1]:
        of_weight = ctx.product.differentiate_weight(weight, gradient, x)
    if ctx.needs_input_grad[2]:
        of_bias = ctx.product.differentiate_bias(gradient)
    return of_x, of_weight, of_bias, None, None


_forward.register_autograd(_backward, setup_context=_save)


@_forward.register_autocast
def _(x: Tensor, weight: Tensor, bias: Tensor | None, sections: int, transposed: bool) -> tuple[Any, ...]:
    """Compute in the dtype of autocast, as a linear does."""
    dtype = torch.get_autocast_dtype(x.device.type)
    return x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype), sections, transposed
