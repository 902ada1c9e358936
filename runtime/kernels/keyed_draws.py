"""Uniform numbers and dropout masks that are drawn by a key, the same on every mesh.

Programs make other distributions of the numbers; a dropout takes bias before and residual behind along (SC21 §4.2).
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from autoptd.runtime.comm.rank import Rank
from autoptd.runtime.kernels.operands import Operand, allocate_promoted, check_rows, promote, sum_rows
from autoptd.runtime.kernels.registration import define_operator, runs_plainly
from autoptd.runtime.randomness import DRAWS, Dim, Key, Shape, draw_mask, draw_uniform, mask_key


def dropout(
    rank: Rank, x: Tensor, p: float, operator: int, sample: Dim = 0, divided: Dim = None, shape: Shape = None
) -> Tensor:
    """Zero each element with probability `p` and scale the others by 1 / (1 - p); identity when not training.

    The mask is that of `x` viewed as `shape` (this rank's), whose dimension `sample` is the batch (None: no batch) and
    whose dimension `divided` is this tensor rank's equal, contiguous part; see runtime/randomness.py.
    """
    return bias_dropout_add(rank, x, None, None, p, operator, sample, divided, shape)


def bias_dropout_add(
    rank: Rank,
    x: Tensor,
    bias: Operand = None,
    residual: Operand = None,
    p: float = 0.0,
    operator: int = 0,
    sample: Dim = 0,
    divided: Dim = None,
    shape: Shape = None,
) -> Tensor:
    """Compute ``dropout(x + bias) + residual``, as `dropout` does; each of them may be None.

    `x` and `residual` are [..., h], `bias` is [h]. Dtypes are promoted as by ``+``, and half precision is summed in
    float32 for the bias's gradient. Raises ValueError on other shapes.
    """
    check_rows("bias_dropout_add", {"x": x, "residual": residual}, bias=bias)
    key, moment = find_key(rank, x, p, operator, sample, divided, shape)
    if not key and (runs_plainly(x) or (bias is None and residual is None)):
        total = x if bias is None else x + bias
        return total if residual is None else residual + total
    return drop_and_add(x, bias, residual, p, key, moment)


def uniform(
    rank: Rank, x: Tensor, operator: int, sample: Dim = None, divided: Dim = None, shape: Shape = None
) -> Tensor:
    """Draw a number between 0 and 1, both excluded, for each element of `x`, of which only shape and dtype count.

    They are keyed as the mask of `dropout` is, but drawn in evaluation too; None `sample`: all samples share them.
    """
    key, moment = place_key(rank, x, DRAWS + operator, shape, sample=sample, divided=divided)
    return uniform_operator(moment, key, list(x.shape), x.dtype)  # type: ignore[no-any-return]


@define_operator("uniform", lambda moment, _, shape, dtype: moment.new_empty(shape, dtype=dtype))
def uniform_operator(moment: Tensor, key: Key, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Compute `uniform`, contiguous."""
    return draw_uniform(key, moment, shape, dtype)


@define_operator("bias_dropout_add", allocate_promoted, triton="elementwise")
def drop_and_add(x: Tensor, bias: Operand, residual: Operand, p: float, key: Key, moment: Operand) -> Tensor:
    """Compute `bias_dropout_add`; nothing is dropped where `key` is empty and the `moment` None."""
    dtype = promote(x, bias, residual)
    total = x if bias is None else x + bias
    if moment is not None:
        total = apply_mask(total, p, key, moment)
    out = total if total is not x and total.dtype == dtype else torch.empty_like(x, dtype=dtype)
    factor = keep_factor(p) if key else 1.0
    return torch.mul(total, factor, out=out) if residual is None else torch.add(residual, total, alpha=factor, out=out)


def _allocate_gradients(gradient: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    *_, of_x, of_bias = others
    return torch.empty_like(gradient, dtype=of_x), gradient.new_empty(gradient.shape[-1:], dtype=of_bias)


@define_operator("bias_dropout_add_backward", _allocate_gradients, triton="elementwise")
def _bias_dropout_add_backward(
    gradient: Tensor, p: float, key: Key, moment: Tensor, x_dtype: torch.dtype, bias_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and bias; without a bias, backward is the dropout itself."""
    of_total = drop_and_add(gradient, None, None, p, key, moment)
    return of_total.to(x_dtype), sum_rows(of_total, bias_dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Keep no tensor: backward draws the mask again."""
    *operands, ctx.p, ctx.key, ctx.moment = inputs
    ctx.dtypes = [None if operand is None else operand.dtype for operand in operands]


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Operand, ...]:
    x_dtype, bias_dtype, residual_dtype = ctx.dtypes
    mask = ctx.p, ctx.key, ctx.moment
    of_residual = None if residual_dtype is None else gradient.to(residual_dtype)
    if ctx.key and bias_dtype is not None:
        return *_bias_dropout_add_backward(gradient, *mask, x_dtype, bias_dtype), of_residual, None, None, None
    of_x = drop_and_add(gradient, None, None, *mask) if ctx.key else gradient
    of_bias = None if bias_dtype is None else sum_rows(gradient, bias_dtype)
    return of_x.to(x_dtype), of_bias, of_residual, None, None, None


drop_and_add.register_autograd(_differentiate, setup_context=_save)


def find_key(
    rank: Rank, x: Tensor, p: float, operator: int, sample: Dim, divided: Dim, shape: Shape
) -> tuple[list[int], Operand]:
    """Return key and moment of the mask of `x`, for the arguments of `dropout`; [] and None where nothing drops."""
    if not 0 <= p <= 1:
        raise ValueError(f"dropout probability is {p}, expected 0 to 1")
    if p == 0 or not rank.randomness.training:
        return [], None
    return place_key(rank, x, operator, shape, sample=sample, divided=divided)


def place_key(rank: Rank, x: Tensor, operator: int, shape: Shape, **place: Any) -> tuple[list[int], Tensor]:
    """Return key and moment of what `rank` draws for each element of `x`; `place` are arguments of `mask_key`."""
    shape = x.shape if shape is None else shape
    if prod(shape) != x.numel():
        raise ValueError(f"the numbers drawn for {list(x.shape)} cannot be seen as {list(shape)}")
    tensor = rank.group("tensor")
    return mask_key(operator, shape, size=tensor.size, index=tensor.index, **place), rank.randomness.locate(x.device)


def apply_mask(x: Tensor, p: float, key: Key, moment: Tensor) -> Tensor:
    """Return `x` times its mask, unscaled, like `x` in memory."""
    return torch.empty_like(x).copy_(draw_mask(key, moment, p, x.shape)).mul_(x)


def keep_factor(p: float) -> float:
    """Return the factor of a kept element; no element is kept where p is 1."""
    return 0.0 if p == 1 else 1 / (1 - p)
