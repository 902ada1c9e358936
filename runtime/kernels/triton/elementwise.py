"""Activations and dropout with their neighbours, and rows scaled, in Triton; computed in float32.

A dropout's product and sum are rounded apart, here and in `norm`: a fused multiply-add in one of them alone would give
the sum other bits where a stage or a recomputed layer ends before its norm.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from autoptd.runtime.kernels.activation import SQRT_2_OVER_PI
from autoptd.runtime.kernels.triton import tiles
from autoptd.runtime.kernels.triton.philox import drop, dropout_arguments
from autoptd.runtime.kernels.triton.tiles import launch_tiles, lay_out, locate_tile, read


def bias_gelu(x: Tensor, bias: Tensor, kind: str, coefficient: float, result: Tensor) -> None:
    launch_tiles(_forward, [x, None], [result], *lay_out(bias), **_activation(kind, coefficient))


def bias_gelu_backward(*arguments: Any) -> None:
    gradient, x, bias, *kind, (of_x, of_bias) = arguments
    launch_tiles(_backward_and_sum, [gradient, x], [of_x], *lay_out(bias), sums=of_bias, **_activation(*kind))


def gated_product(gate: Tensor, up: Tensor, kind: str, result: Tensor) -> None:
    launch_tiles(_forward, [gate, up], [result], None, **_activation(kind))


def gated_product_backward(*arguments: Any) -> None:
    gradient, gate, up, kind, results = arguments
    constants = {"KIND": kind, "COEFFICIENT": SQRT_2_OVER_PI, "enable_fp_fusion": True}
    launch_tiles(_gated_product_backward, [gradient, gate, up], results, **constants)


def _activation(kind: str, coefficient: float = SQRT_2_OVER_PI) -> dict[str, Any]:
    constants = {"KIND": kind, "COEFFICIENT": coefficient, "enable_fp_fusion": True}
    return {"dropout": None, "ALIGNED": False, **constants}


def _dropout(*place: Any) -> dict[str, Any]:
    return {**dropout_arguments(*place), "KIND": None, "COEFFICIENT": None, "enable_fp_fusion": False}


def bias_dropout_add(*arguments: Any) -> None:
    x, bias, residual, p, key, moment, result = arguments
    launch_tiles(_forward, [x, residual], [result], *lay_out(bias), **_dropout(key, moment, p, x))


def bias_dropout_add_backward(*arguments: Any) -> None:
    gradient, p, key, moment, *_, (of_x, of_bias) = arguments
    constants = _dropout(key, moment, p, gradient)
    launch_tiles(_backward_and_sum, [gradient, None], [of_x], None, sums=of_bias, **constants)


def scale_row(row: Tensor, factor: Tensor) -> None:
    programs = min(tiles.divide_up(row.numel(), tiles.TILE), tiles.PROGRAMS)
    tiles.launch(_scale_row, (programs,), row, factor, row.numel(), TILE=tiles.TILE)


@triton.jit
def _tail_over_density(x):
    """Return the normal distribution's tail beyond `x` >= 0, times exp(x^2 / 2), within 1.5e-7 of it.

    Least squares, weighted until the largest relative error on 0 to 14 was least. libdevice's erf takes twice the
    instructions, more than memory gives time for, cancels where x is negative, and has no use of the slope's exp.
    """
    t = 1 / (1 + 0.3 * x)
    series = ((0.03567617 * t - 0.15720913) * t + 0.2063643) * t - 0.0536939
    series = ((series * t + 0.12856721) * t + 0.09991176) * t + 0.12075424
    return (series * t + 0.11962928) * t


@triton.jit
def _activate(x, KIND: tl.constexpr, COEFFICIENT: tl.constexpr):
    """Return the activation's value and slope at `x`, both float32."""
    if KIND == "gelu":
        density = tl.exp2(-0.7213475204444817 * x * x)  # exp(-x^2 / 2)
        beyond = density * _tail_over_density(tl.abs(x))
        share = tl.where(x < 0, beyond, 1 - beyond)
        slope = share + x * 0.3989422804014327 * density
    elif KIND == "silu":
        share = tl.sigmoid(x)
        slope = share + x * share * (1 - share)
    else:
        # 0.5 (1 + tanh(z)) = sigmoid(2 z), with z = sqrt(2 / pi) (x + 0.044715 x^3)
        share = tl.sigmoid(2 * COEFFICIENT * (x + 0.044715 * x * x * x))
        slope = share + x * share * (1 - share) * (2 * COEFFICIENT) * (1 + 0.134145 * x * x)
    return x * share, slope


@triton.jit
def _forward(
    x, other, out, bias, rows, width, stride, other_stride, dropout, ALIGNED: tl.constexpr,
    KIND: tl.constexpr, COEFFICIENT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Compute ``activation(x + bias) * other``, or ``dropout(x + bias) + other`` where there is no `KIND`."""
    row, start, inside = locate_tile(tl.program_id(0), rows, width, ROWS, COLUMNS, WIDE)
    column = start + tl.arange(0, COLUMNS)
    total = read(x + row * stride + column, inside)
    if bias is not None:
        total += read(bias + column, column < width)
    if KIND is None:
        total = drop(total, row * width + start, dropout, COLUMNS, ALIGNED)
    else:
        total, _ = _activate(total, KIND, COEFFICIENT)
    if other is not None:
        beside = read(other + row * other_stride + column, inside)
        total = total + beside if KIND is None else total * beside
    tl.store(out + row * width + column, total, mask=inside)


@triton.jit
def _backward_and_sum(
    gradient, x, of_x, bias, partial, turns, rows, width, gradient_stride, stride, dropout, ALIGNED: tl.constexpr,
    KIND: tl.constexpr, COEFFICIENT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of ``activation(x + bias)``, or of a dropout where there is no `KIND`, and their sum."""
    blocks = tl.cdiv(width, COLUMNS)
    group, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    if KIND is not None:
        shift = read(bias + column, column < width)
    for turn in range(turns):
        tile = (group * turns + turn) * blocks + block
        row, start, inside = locate_tile(tile, rows, width, ROWS, COLUMNS, WIDE)
        slope = read(gradient + row * gradient_stride + column, inside)  # outside it is 0 and adds nothing
        if KIND is None:
            slope = drop(slope, row * width + start, dropout, COLUMNS, ALIGNED)
        else:
            _, own = _activate(read(x + row * stride + column, inside) + shift, KIND, COEFFICIENT)
            slope *= own
        tl.store(of_x + row * width + column, slope, mask=inside)
        total += slope
    tl.store(partial + group * width + column, tl.sum(total, 0), mask=column < width)


@triton.jit
def _gated_product_backward(
    gradient, gate, up, of_gate, of_up, rows, width, gradient_stride, gate_stride, up_stride,
    KIND: tl.constexpr, COEFFICIENT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    row, start, inside = locate_tile(tl.program_id(0), rows, width, ROWS, COLUMNS, WIDE)
    column = start + tl.arange(0, COLUMNS)
    slopes = read(gradient + row * gradient_stride + column, inside)
    activated, slope = _activate(read(gate + row * gate_stride + column, inside), KIND, COEFFICIENT)
    ups = read(up + row * up_stride + column, inside)
    tl.store(of_gate + row * width + column, slopes * ups * slope, mask=inside)
    tl.store(of_up + row * width + column, slopes * activated, mask=inside)


@triton.jit
def _scale_row(row, factor, count, TILE: tl.constexpr):
    scale = tl.load(factor).to(tl.float32)
    if scale != 1.0:
        for start in range(tl.program_id(0).to(tl.int64) * TILE, count, tl.num_programs(0) * TILE):
            place = start + tl.arange(0, TILE)
            tl.store(row + place, tl.load(row + place, place < count) * scale, place < count)
