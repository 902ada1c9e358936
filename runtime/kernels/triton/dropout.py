"""dropout(x + bias) + residual and its backward in Triton; computed in float32, masks drawn on the way.

Product and sum are rounded apart, here and in `norm`: a fused multiply-add in one of them alone would give
the sum other bits where a stage or a recomputed layer ends before its norm.
"""

# Inside @triton.jit nothing but constants may be annotated.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from autoptd.runtime.kernels.masking import keep_factor
from autoptd.runtime.kernels.precision import promote
from autoptd.runtime.kernels.triton.philox import is_aligned, keep, mask_argument
from autoptd.runtime.kernels.triton.tiles import (
    as_rows,
    count_programs,
    empty_rows,
    locate_tile,
    plan_sums,
    plan_tiles,
)


def bias_dropout_add(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, p: float, key: Sequence[int]
) -> Tensor:
    rows = as_rows(x)
    others = rows if residual is None else as_rows(residual)
    tile = plan_tiles(rows, others)
    result, written = empty_rows(x, promote(x, bias, residual))
    _bias_dropout_add[count_programs(rows, tile)](
        rows, None if bias is None else bias.contiguous(), None if residual is None else others, written,
        *rows.shape, rows.stride(0), others.stride(0), keep_factor(p), mask_argument(key, p) if key else None,
        ALIGNED=bool(key) and is_aligned(key, rows.shape[1]), enable_fp_fusion=False, **tile
    )  # fmt: skip
    return result if written is result else result.copy_(written)


def bias_dropout_add_backward(
    gradient: Tensor, p: float, key: Sequence[int], x_dtype: torch.dtype, bias_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    rows = as_rows(gradient)
    tile = plan_tiles(rows)
    groups, steps = plan_sums(rows, tile)
    of_x, written = empty_rows(gradient, x_dtype)
    partial = torch.empty(groups, rows.shape[1], dtype=torch.float32, device=gradient.device)
    _bias_dropout_add_backward[(groups * triton.cdiv(rows.shape[1], tile["COLUMNS"]),)](
        rows, written, partial, *rows.shape, rows.stride(0), steps, keep_factor(p), mask_argument(key, p),
        ALIGNED=is_aligned(key, rows.shape[1]), enable_fp_fusion=False, **tile
    )  # fmt: skip
    of_x = of_x if written is of_x else of_x.copy_(written)
    return of_x, partial.sum(0).to(bias_dtype)


@triton.jit
def _bias_dropout_add(
    x, bias, residual, out, rows, width, stride, residual_stride, factor, mask,
    ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    row, start, inside = locate_tile(tl.program_id(0), rows, width, ROWS, COLUMNS, WIDE)
    column = start + tl.arange(0, COLUMNS)
    total = tl.load(x + row * stride + column, mask=inside, other=0).to(tl.float32)
    if bias is not None:
        total += tl.load(bias + column, mask=column < width, other=0).to(tl.float32)
    if mask is not None:
        # Multiplied, not chosen: NaNs stay, as in torch.
        total *= tl.where(keep(row * width + start, mask, COLUMNS, ALIGNED), factor, 0.0)
    if residual is not None:
        total += tl.load(residual + row * residual_stride + column, mask=inside, other=0).to(tl.float32)
    tl.store(out + row * width + column, total, mask=inside)


@triton.jit
def _bias_dropout_add_backward(
    gradient, of_x, partial, rows, width, stride, steps, factor, mask,
    ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(width, COLUMNS)
    group, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for step in range(steps):
        tile = (group * steps + step) * blocks + block
        row, start, inside = locate_tile(tile, rows, width, ROWS, COLUMNS, WIDE)
        slope = tl.load(gradient + row * stride + column, mask=inside, other=0).to(tl.float32)
        slope *= tl.where(keep(row * width + start, mask, COLUMNS, ALIGNED), factor, 0.0)
        tl.store(of_x + row * width + column, slope, mask=inside)
        total += slope
    tl.store(partial + group * width + column, tl.sum(total, 0), mask=column < width)
