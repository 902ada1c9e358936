"""Activations fused with their neighbours: a bias added before, a product taken after (SC21 §4.2)."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

from autoptd.runtime.kernels.operands import allocate_promoted, check_rows, sum_rows, widen
from autoptd.runtime.kernels.registration import define_operator, runs_plainly

Gelu = Literal["none", "tanh"]  # torch's names of its approximations
KINDS = {"none": "gelu", "tanh": "gelu_tanh"}
Activation = Literal["silu", "gelu", "gelu_tanh"]
ACTIVATIONS = get_args(Activation)
SQRT_2_OVER_PI = (2 / torch.pi) ** 0.5


def bias_gelu(x: Tensor, bias: Tensor, approximate: Gelu = "none", coefficient: float = SQRT_2_OVER_PI) -> Tensor:
    """Compute ``gelu(x + bias)``; `x` is [..., h], `bias` [h]. By tanh, `coefficient` is sqrt(2 / pi), rounded or not.

    Dtypes are promoted as by ``+``, and half precision is summed in float32 for the bias's gradient.
    """
    check_rows("bias_gelu", {"x": x}, bias=bias)
    if approximate not in KINDS:
        raise ValueError(f"bias_gelu was given {approximate=}, expected 'none' or 'tanh'")
    if approximate == "none" and coefficient != SQRT_2_OVER_PI:
        raise ValueError(f"bias_gelu was given {coefficient=}, expected approximate='tanh' too")
    if runs_plainly(x) and coefficient == SQRT_2_OVER_PI:
        return functional.gelu(x + bias, approximate=approximate)
    return _bias_gelu(x, bias, KINDS[approximate], coefficient)


def gated_product(gate: Tensor, up: Tensor, activation: Activation = "silu") -> Tensor:
    """Compute ``activation(gate) * up``, both [..., h]; dtypes are promoted as by ``*``."""
    check_rows("gated_product", {"gate": gate, "up": up})
    if activation not in ACTIVATIONS:
        raise ValueError(f"gated_product was given {activation=}, expected 'silu', 'gelu' or 'gelu_tanh'")
    return _gated_product(gate, up, activation)


def _allocate_gradients(_: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(others[0]), torch.empty_like(others[1])


@define_operator("bias_gelu", allocate_promoted, triton="elementwise")
def _bias_gelu(x: Tensor, bias: Tensor, kind: str, coefficient: float) -> Tensor:
    total = x + bias
    return _activate(total, kind, total, coefficient)


@define_operator("bias_gelu_backward", _allocate_gradients, triton="elementwise")
def _bias_gelu_backward(gradient: Tensor, x: Tensor, bias: Tensor, kind: str, factor: float) -> tuple[Tensor, Tensor]:
    total = x + bias
    of_total = _differentiate(gradient, total, kind, total, factor)
    return of_total.to(x.dtype), sum_rows(of_total, bias.dtype)


@define_operator("gated_product", allocate_promoted, triton="elementwise")
def _gated_product(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    return _multiply(_activate(gate, kind, out=torch.empty_like(gate)), up)


@define_operator("gated_product_backward", _allocate_gradients, triton="elementwise")
def _gated_product_backward(gradient: Tensor, gate: Tensor, up: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    of_up = _multiply(_activate(gate, kind, out=torch.empty_like(up, dtype=gate.dtype)), gradient)
    of_gate = torch.mul(gradient, up, out=torch.empty_like(gate, dtype=gradient.dtype)).to(gate.dtype)
    return _differentiate(of_gate, gate, kind, out=of_gate), of_up.to(up.dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.options = inputs[2:]


def _call(backward: Callable[..., Any], ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return *backward(gradient, *ctx.saved_tensors, *ctx.options), *[None] * len(ctx.options)


_bias_gelu.register_autograd(partial(_call, _bias_gelu_backward), setup_context=_save)
_gated_product.register_autograd(partial(_call, _gated_product_backward), setup_context=_save)


def _activate(x: Tensor, kind: str, out: Tensor, coefficient: float = SQRT_2_OVER_PI) -> Tensor:
    if kind == "silu":
        torch.ops.aten.silu.out(x, out=out)
    elif coefficient != SQRT_2_OVER_PI:
        x = x.to(widen(x.dtype))
        torch.mul(x, _tanh(x, coefficient).add_(1).mul_(0.5), out=out)
    elif x.is_contiguous() and not out.is_contiguous():  # there torch's exact one writes as `x` lies
        out.copy_(functional.gelu(x, approximate="none" if kind == "gelu" else "tanh"))
    else:
        torch.ops.aten.gelu.out(x, approximate="none" if kind == "gelu" else "tanh", out=out)
    return out


def _differentiate(gradient: Tensor, x: Tensor, kind: str, out: Tensor, coefficient: float = SQRT_2_OVER_PI) -> Tensor:
    """Return `gradient` times the activation's slope at `x`."""
    if kind == "silu":
        torch.ops.aten.silu_backward.grad_input(gradient, x, grad_input=out)
    elif coefficient != SQRT_2_OVER_PI:
        x = x.to(widen(x.dtype))
        tanh = _tanh(x, coefficient)
        inner = (x * x).mul_(3 * 0.044715 * coefficient).add_(coefficient)
        torch.mul(gradient, inner.mul_(1 - tanh * tanh).mul_(x).add_(tanh).add_(1).mul_(0.5), out=out)
    else:
        approximate = "none" if kind == "gelu" else "tanh"
        torch.ops.aten.gelu_backward.grad_input(gradient, x, approximate=approximate, grad_input=out)
    return out


def _tanh(x: Tensor, coefficient: float) -> Tensor:
    """Return the tanh of coefficient (x + 0.044715 x^3); torch's GELU has the coefficient sqrt(2 / pi) alone."""
    return (x * x).mul_(0.044715 * coefficient).add_(coefficient).mul_(x).tanh_()


def _multiply(x: Tensor, factor: Tensor) -> Tensor:
    """Return ``x * factor``, written over `x` where the dtype allows it."""
    return x.mul_(factor) if torch.promote_types(x.dtype, factor.dtype) == x.dtype else x * factor
