"""Dropout by a keyed mask, the same on every mesh, with the bias before and the residual after it (SC21 §4.2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autoptd.runtime.comm.rank import Rank
from autoptd.runtime.kernels.masking import apply_mask, find_key, keep_factor
from autoptd.runtime.kernels.operands import check_operands, sum_rows
from autoptd.runtime.kernels.precision import promote
from autoptd.runtime.kernels.registration import define_operator
from autoptd.runtime.kernels.selection import runs_plainly


def dropout(
    rank: Rank,
    x: Tensor,
    p: float,
    operator: int,
    sample: int | None = 0,
    divided: int | None = None,
    shape: Sequence[int] | None = None,
) -> Tensor:
    """Zero each element with probability `p` and scale the others by 1 / (1 - p); identity when not training.

    The mask is that of `x` viewed as `shape` (this rank's), whose dimension `sample` is the batch (None: no
    batch) and whose dimension `divided` is this tensor rank's equal, contiguous part; see
    runtime/randomness.py.
    """
    return bias_dropout_add(rank, x, None, None, p, operator, sample, divided, shape)


def bias_dropout_add(
    rank: Rank,
    x: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    p: float = 0.0,
    operator: int = 0,
    sample: int | None = 0,
    divided: int | None = None,
    shape: Sequence[int] | None = None,
) -> Tensor:
    """Compute ``dropout(x + bias) + residual``, as `dropout` does; each of them may be None.

    `x` and `residual` are [..., h], `bias` is [h]. Dtypes are promoted as by ``+``, and half precision is summed
    in float32 for the bias's gradient. Under autocast a bias takes the dtype of `x`, as that of a linear does.
    Raises ValueError on other shapes.
    """
    check_operands("bias_dropout_add", x, bias=bias, residual=residual)
    if bias is not None and (x.dim() == 0 or bias.shape != x.shape[-1:]):
        raise ValueError(
            f"bias_dropout_add was given x {list(x.shape)} and bias {list(bias.shape)}, expected [..., h] and [h]"
        )
    if residual is not None and residual.shape != x.shape:
        raise ValueError(
            f"bias_dropout_add was given x {list(x.shape)} and residual {list(residual.shape)}, expected equal"
        )
    key = find_key(rank, x, p, operator, sample, divided, shape)
    if not key and runs_plainly(x):
        total = x if bias is None else x + bias
        return total if residual is None else residual + total
    if bias is None and residual is None and not key:
        return x
    result: Tensor = bias_dropout_add_operator(x, bias, residual, p, key)
    return result


@define_operator("bias_dropout_add", triton="dropout")
def bias_dropout_add_operator(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    p: float,
    key: Sequence[int],
) -> Tensor:
    """Compute `bias_dropout_add`; nothing is dropped where `key` is empty."""
    dtype = promote(x, bias, residual)
    total = x if bias is None else x + bias
    if key:
        total = apply_mask(total, p, key)
    out = total if total is not x and total.dtype == dtype else torch.empty_like(x, dtype=dtype)
    factor = keep_factor(p) if key else 1.0
    if residual is None:
        return torch.mul(total, factor, out=out)
    return torch.add(residual, total, alpha=factor, out=out)


@define_operator("bias_dropout_add_backward", triton="dropout")
def _bias_dropout_add_backward(
    gradient: Tensor,
    p: float,
    key: Sequence[int],
    x_dtype: torch.dtype,
    bias_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and bias; without a bias, backward is the dropout itself."""
    of_total = bias_dropout_add_operator(gradient, None, None, p, key)
    return of_total.to(x_dtype), sum_rows(of_total, bias_dtype)


@bias_dropout_add_operator.register_fake
def _(x: Tensor, bias: Tensor | None, residual: Tensor | None, *_: Any) -> Tensor:
    return torch.empty_like(x, dtype=promote(x, bias, residual))


@_bias_dropout_add_backward.register_fake
def _(gradient: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    *_, x_dtype, bias_dtype = others
    of_bias = gradient.new_empty(gradient.shape[-1:], dtype=bias_dtype)
    return torch.empty_like(gradient, dtype=x_dtype), of_bias


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Keep no tensor: backward draws the mask again."""
    *operands, ctx.p, ctx.key = inputs
    ctx.dtypes = [None if operand is None else operand.dtype for operand in operands]


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    x_dtype, bias_dtype, residual_dtype = ctx.dtypes
    drawn = ctx.p, ctx.key
    of_bias = None
    if ctx.key and bias_dtype is not None:
        of_x, of_bias = _bias_dropout_add_backward(gradient, *drawn, x_dtype, bias_dtype)
    elif ctx.key:
        of_x = bias_dropout_add_operator(gradient, None, None, *drawn).to(x_dtype)
    else:
        of_x = gradient.to(x_dtype)
        of_bias = None if bias_dtype is None else sum_rows(gradient, bias_dtype)
    of_residual = None if residual_dtype is None else gradient.to(residual_dtype)
    return of_x, of_bias, of_residual, None, None


bias_dropout_add_operator.register_autograd(_differentiate, setup_context=_save)


@bias_dropout_add_operator.register_autocast
def _(x: Tensor, bias: Tensor | None, *others: Any) -> tuple[Any, ...]:
    return x, None if bias is None else bias.to(x.dtype), *others
