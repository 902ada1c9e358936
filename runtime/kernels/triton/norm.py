"""LayerNorm and RMSNorm of dropout(x + bias) + residual in Triton, forward and backward.

A program holds a tile of rows and goes over their columns twice: the second time they are in the cache.
Gradients of weights and biases are summed by each program over its own rows, in float32, and then over the
programs: always in the same order.
"""

# Inside @triton.jit nothing but constants may be annotated.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from autoptd.runtime.kernels.triton.philox import drop, dropout_arguments
from autoptd.runtime.kernels.triton.tiles import ROW_WARPS, lay_out, plan_rows

# A backward program adds to its sums once for all rows of a tile: there must be several.
BACKWARD_COLUMNS = 1024
PROGRAMS_PER_PROCESSOR = 2
# Of a thread, when so many programs share a processor's: with fewer some are spilled, for nothing.
REGISTERS = 65_536 // (PROGRAMS_PER_PROCESSOR * ROW_WARPS * 32)
INTERPRETED_PROGRAMS = 3


def add_norm(
    x: Tensor,
    weight: Tensor,
    norm_bias: Tensor | None,
    eps: float,
    bias: Tensor | None,
    residual: Tensor | None,
    p: float,
    key: Sequence[int],
    moment: Tensor | None,
    centers: bool,
    results: Sequence[Tensor],
) -> None:
    width = x.shape[-1]
    rows = x.numel() // width
    tile = plan_rows(rows, width)
    _normalize[(triton.cdiv(rows, tile["ROWS"]),)](
        *lay_out(x, bias, residual, weight, norm_bias), *_filled(results), rows, width, eps,
        **dropout_arguments(key, moment, p, x), **tile, enable_fp_fusion=False
    )  # fmt: skip


def add_norm_backward(
    d_normed: Tensor,
    d_added: Tensor | None,
    added: Tensor,
    weight: Tensor,
    means: Tensor | None,
    scales: Tensor,
    p: float,
    key: Sequence[int],
    moment: Tensor | None,
    wanted: Sequence[bool],
    results: Sequence[Tensor],
) -> None:
    width = added.shape[-1]
    rows = added.numel() // width
    tile = plan_rows(rows, width, BACKWARD_COLUMNS)
    programs = min(triton.cdiv(rows, tile["ROWS"]), _count_programs(added.device))
    of_rows, of_vectors = _filled(results[:2]), _filled(results[2:])
    sums = [None if vector is None else vector.new_zeros((programs, width)) for vector in of_vectors]
    _differentiate[(programs,)](
        *lay_out(d_added, d_normed, added, weight), means, scales, *of_rows, *sums, rows, width,
        **dropout_arguments(key, moment, p, added), **tile, maxnreg=REGISTERS, enable_fp_fusion=False
    )  # fmt: skip
    for vector, partial in zip(of_vectors, sums, strict=True):
        if partial is not None:
            torch.sum(partial, 0, out=vector)


def _filled(results: Sequence[Tensor]) -> list[Tensor | None]:
    """Return None for results that are left out, which are empty."""
    return [result if result.numel() else None for result in results]


def _count_programs(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETED_PROGRAMS
    return torch.cuda.get_device_properties(device).multi_processor_count * PROGRAMS_PER_PROCESSOR


@triton.jit
def _normalize(
    x, bias, residual, weight, norm_bias, added, normed, means, scales, rows, width, eps, dropout,
    ALIGNED: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if WIDE:
        row = row.to(tl.int64)
    first = row[:, None] * width
    mean = tl.zeros([ROWS], tl.float32)
    squares = tl.zeros([ROWS], tl.float32)
    for start in range(0, width, COLUMNS):
        column, at, inside = _locate(first, start, row, rows, width, COLUMNS)
        value = tl.load(x + at, inside, 0.0).to(tl.float32)
        if bias is not None:
            value += tl.load(bias + column, column < width, 0.0).to(tl.float32)[None, :]
        value = drop(value, first + start, dropout, COLUMNS, ALIGNED)
        if residual is not None:
            value += tl.load(residual + at, inside, 0.0).to(tl.float32)
        if added is not None:
            rounded = value.to(added.dtype.element_ty)
            tl.store(added + at, rounded, inside)
            value = rounded.to(tl.float32)
        if means is not None:  # joins the columns before with these (Chan, Golub and LeVeque)
            count = tl.minimum(width - start, COLUMNS)
            here = tl.sum(value, 1) / count
            away = tl.where(inside, value - here[:, None], 0.0)
            step = here - mean
            share = count / (start + count)
            squares += tl.sum(away * away, 1) + step * step * start * share
            mean += step * share
        else:
            squares += tl.sum(value * value, 1)
    scale = 1.0 / tl.sqrt(squares / width + eps)
    tl.store(scales + row, scale, row < rows)
    if means is not None:
        tl.store(means + row, mean, row < rows)
    tl.debug_barrier()  # what other threads of this program have stored is read now
    for start in range(0, width, COLUMNS):
        column, at, inside = _locate(first, start, row, rows, width, COLUMNS)
        gain = tl.load(weight + column, column < width, 0.0).to(tl.float32)[None, :]
        source = added if added is not None else x
        value = tl.load(source + at, inside, 0.0)
        if means is not None:
            result = (value.to(tl.float32) - mean[:, None]) * scale[:, None] * gain
        else:
            result = (value.to(tl.float32) * scale[:, None]).to(value.dtype).to(tl.float32) * gain
        if norm_bias is not None:
            result += tl.load(norm_bias + column, column < width, 0.0).to(tl.float32)[None, :]
        tl.store(normed + at, result.to(normed.dtype.element_ty), inside)


@triton.jit
def _differentiate(
    d_added, d_normed, added, weight, means, scales, d_total, d_x, d_weights, d_norm_biases, d_biases,
    rows, width, dropout, ALIGNED: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS)
        if WIDE:
            row = row.to(tl.int64)
        first = row[:, None] * width
        scale = tl.load(scales + row, row < rows, 0.0)[:, None]
        mean = tl.load(means + row, row < rows, 0.0)[:, None] if means is not None else 0.0
        level = tl.zeros([ROWS], tl.float32)
        slope = tl.zeros([ROWS], tl.float32)
        for start in range(0, width, COLUMNS):
            column, at, inside = _locate(first, start, row, rows, width, COLUMNS)
            gain = tl.load(weight + column, column < width, 0.0).to(tl.float32)[None, :]
            gradient = tl.load(d_normed + at, inside, 0.0).to(tl.float32) * gain
            unit = (tl.load(added + at, inside, 0.0).to(tl.float32) - mean) * scale
            level += tl.sum(gradient, 1)
            slope += tl.sum(gradient * unit, 1)
        slope = (slope / width)[:, None]
        level = (level / width)[:, None] if means is not None else 0.0
        for start in range(0, width, COLUMNS):
            column, at, inside = _locate(first, start, row, rows, width, COLUMNS)
            gain = tl.load(weight + column, column < width, 0.0).to(tl.float32)[None, :]
            outer = tl.load(d_normed + at, inside, 0.0).to(tl.float32)
            unit = (tl.load(added + at, inside, 0.0).to(tl.float32) - mean) * scale
            total = ((outer * gain - unit * slope - level) * scale).to(added.dtype.element_ty)
            if d_weights is not None:
                _add_rows(d_weights, outer * unit, column, width)
            if d_norm_biases is not None:
                _add_rows(d_norm_biases, outer, column, width)
            if d_added is not None:
                total = (total.to(tl.float32) + tl.load(d_added + at, inside, 0.0)).to(total.dtype)
            if d_total is not None:
                tl.store(d_total + at, total, inside)
            inner = drop(total.to(tl.float32), first + start, dropout, COLUMNS, ALIGNED)
            if d_x is not None:
                tl.store(d_x + at, inner.to(d_x.dtype.element_ty), inside)
            if d_biases is not None:
                _add_rows(d_biases, tl.where(inside, inner, 0.0), column, width)
        tl.debug_barrier()  # the sums are read again, by whichever thread


@triton.jit
def _locate(first, start, row, rows, width, COLUMNS: tl.constexpr):
    """Return a tile's columns [COLUMNS], the index of each of its elements, and which lie inside."""
    column = start + tl.arange(0, COLUMNS)
    return column, first + column[None, :], (row < rows)[:, None] & (column < width)[None, :]


@triton.jit
def _add_rows(sums, values, column, width):
    """Add the sum of the tile `values` over its rows to this program's row of `sums`."""
    at = sums + tl.program_id(0).to(tl.int64) * width + column
    tl.store(at, tl.load(at, column < width, 0.0) + tl.sum(values, 0), column < width)
