"""Scale, mask, softmax and keyed dropout in Triton, forward and backward.

A program holds a tile of rows. Rows that fit are read once; wider ones twice, the second time from the cache. What
a causal row may not see is not read, but for the rest of a 16-byte word.
"""

# Inside @triton.jit nothing but constants may be annotated.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from autoptd.runtime.kernels.masking import keep_factor
from autoptd.runtime.kernels.triton.philox import is_aligned, keep, mask_argument
from autoptd.runtime.kernels.triton.rows import WARPS, plan_rows


def normalize_scores(
    scores: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
    p: float,
    key: Sequence[int],
    weights: Tensor,
    softmax: Tensor | None,
) -> None:
    """Fill `weights` with the dropped softmax, and `softmax` (None: nothing is dropped) with the softmax before."""
    length, width = scores.shape[-2:]
    rows = scores.numel() // width
    view, inner, strides = _walk_mask(mask, scores.shape)
    tile = _plan(rows, width, key)
    _normalize[(triton.cdiv(rows, tile["ROWS"]),)](
        scores.contiguous(),
        view,
        weights,
        softmax,
        rows,
        length,
        width,
        scale,
        inner,
        strides,
        keep_factor(p),
        mask_argument(key, p) if key else None,
        ADDED=mask is not None and mask.dtype != torch.bool,
        CAUSAL=is_causal,
        **tile,
        num_warps=WARPS,
        enable_fp_fusion=True,
    )


def differentiate_scores(
    gradient: Tensor,
    softmax: Tensor,
    is_causal: bool,
    scale: float,
    p: float,
    key: Sequence[int],
    result: Tensor,
) -> None:
    """Fill `result` with the gradient of what the softmax was taken of, times `scale`."""
    length, width = softmax.shape[-2:]
    rows = softmax.numel() // width
    tile = _plan(rows, width, key)
    _differentiate[(triton.cdiv(rows, tile["ROWS"]),)](
        gradient.contiguous(),
        softmax.contiguous(),
        result,
        rows,
        length,
        width,
        scale,
        keep_factor(p),
        mask_argument(key, p) if key else None,
        CAUSAL=is_causal,
        **tile,
        num_warps=WARPS,
        enable_fp_fusion=True,
    )


def _plan(rows: int, width: int, key: Sequence[int]) -> dict[str, Any]:
    tile = plan_rows(rows, width)
    return {**tile, "ALIGNED": bool(key) and is_aligned(key, width), "WHOLE": width <= tile["COLUMNS"]}


def _walk_mask(mask: Tensor | None, shape: Sequence[int]) -> tuple[Tensor | None, int, tuple[int, ...]]:
    """Return the mask and its strides over two leading dimensions, rows and columns.

    The second leading dimension has the size handed back. What no two strides describe is copied out.
    """
    if mask is None:
        return None, 1, (0, 0, 0, 0)
    if mask.dtype == torch.bool:
        mask = mask.view(torch.uint8)
    whole = mask.expand(tuple(shape))
    leading: list[tuple[int, int]] = []
    for size, stride in zip(whole.shape[:-2], whole.stride()[:-2], strict=True):
        if size == 1:
            continue
        if leading and leading[-1][1] == size * stride:
            leading[-1] = (leading[-1][0] * size, stride)
        else:
            leading.append((size, stride))
    if len(leading) > 2:
        return _walk_mask(whole.contiguous(), shape)
    (_, outer), (inner, step) = [(1, 0), (1, 0), *leading][-2:]
    return whole, inner, (outer, step, *whole.stride()[-2:])


@triton.jit
def _normalize(
    scores,
    mask,
    weights,
    softmax,
    rows,
    length,
    width,
    scale,
    inner,
    strides,
    factor,
    dropout,
    ADDED: tl.constexpr,
    CAUSAL: tl.constexpr,
    ALIGNED: tl.constexpr,
    WIDE: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row, query, end, first = _find_rows(rows, length, width, CAUSAL, WIDE, ROWS)
    masks = mask
    if mask is not None:
        group = row // length
        masks += (group // inner * strides[0] + group % inner * strides[1] + query * strides[2])[:, None]
    if WHOLE:
        column = tl.arange(0, COLUMNS)[None, :]
        inside, seen = _limit(row, query, column, rows, width, CAUSAL)
        value, seen = _read(scores + first + column, masks, column, inside, seen, scale, strides, ADDED)
        sees = tl.max(seen.to(tl.int32), 1)
        largest = tl.max(value, 1)
        power = tl.exp(value - tl.where(largest == -float("inf"), 0.0, largest)[:, None])
        share = 1.0 / tl.sum(power, 1)
        result = tl.where((sees > 0)[:, None], power * share[:, None], 0.0)
        _write(weights, softmax, result, first, 0, row, rows, width, factor, dropout, ALIGNED, COLUMNS)
    else:
        sees = tl.zeros([ROWS], tl.int32)
        largest = tl.full([ROWS], -float("inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        for start in range(0, end, COLUMNS):
            column = start + tl.arange(0, COLUMNS)[None, :]
            inside, seen = _limit(row, query, column, rows, width, CAUSAL)
            value, seen = _read(scores + first + column, masks, column, inside, seen, scale, strides, ADDED)
            sees = tl.maximum(sees, tl.max(seen.to(tl.int32), 1))
            raised = tl.maximum(largest, tl.max(value, 1))
            # A maximum that is -inf so far gives exp(-inf), not exp(-inf + inf).
            level = tl.where(raised == -float("inf"), 0.0, raised)
            total = total * tl.exp(largest - level) + tl.sum(tl.exp(value - level[:, None]), 1)
            largest = raised
        level = tl.where(largest == -float("inf"), 0.0, largest)[:, None]
        share = (1.0 / total)[:, None]
        for start in range(0, end, COLUMNS):
            column = start + tl.arange(0, COLUMNS)[None, :]
            inside, seen = _limit(row, query, column, rows, width, CAUSAL)
            value, seen = _read(scores + first + column, masks, column, inside, seen, scale, strides, ADDED)
            result = tl.where((sees > 0)[:, None], tl.exp(value - level) * share, 0.0)
            _write(
                weights, softmax, result, first, start, row, rows, width, factor, dropout, ALIGNED, COLUMNS
            )
        if CAUSAL:
            for start in range(tl.cdiv(end, COLUMNS) * COLUMNS, width, COLUMNS):
                _clear(weights, first, start, row, rows, width, COLUMNS)
                if softmax is not None:
                    _clear(softmax, first, start, row, rows, width, COLUMNS)


@triton.jit
def _differentiate(
    gradient,
    softmax,
    result,
    rows,
    length,
    width,
    scale,
    factor,
    dropout,
    CAUSAL: tl.constexpr,
    ALIGNED: tl.constexpr,
    WIDE: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row, query, end, first = _find_rows(rows, length, width, CAUSAL, WIDE, ROWS)
    if WHOLE:
        column = tl.arange(0, COLUMNS)[None, :]
        inside, seen = _limit(row, query, column, rows, width, CAUSAL)
        share = tl.load(softmax + first + column, inside, 0.0).to(tl.float32)
        slope = _undrop(gradient, first, 0, inside, seen, factor, dropout, ALIGNED, COLUMNS)
        away = slope - (tl.sum(share * slope, 1) / _total(tl.sum(share, 1)))[:, None]
        value = (share * away * scale).to(result.dtype.element_ty)
        tl.store(result + first + column, value, (row < rows)[:, None] & (column < width))
    else:
        level = tl.zeros([ROWS], tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        for start in range(0, end, COLUMNS):
            column = start + tl.arange(0, COLUMNS)[None, :]
            inside, seen = _limit(row, query, column, rows, width, CAUSAL)
            share = tl.load(softmax + first + column, inside, 0.0).to(tl.float32)
            total += tl.sum(share, 1)
            level += tl.sum(
                share * _undrop(gradient, first, start, inside, seen, factor, dropout, ALIGNED, COLUMNS), 1
            )
        level /= _total(total)
        for start in range(0, end, COLUMNS):
            column = start + tl.arange(0, COLUMNS)[None, :]
            inside, seen = _limit(row, query, column, rows, width, CAUSAL)
            share = tl.load(softmax + first + column, inside, 0.0).to(tl.float32)
            away = (
                _undrop(gradient, first, start, inside, seen, factor, dropout, ALIGNED, COLUMNS)
                - level[:, None]
            )
            value = (share * away * scale).to(result.dtype.element_ty)
            tl.store(result + first + column, value, (row < rows)[:, None] & (column < width))
        if CAUSAL:
            for start in range(tl.cdiv(end, COLUMNS) * COLUMNS, width, COLUMNS):
                _clear(result, first, start, row, rows, width, COLUMNS)


@triton.jit
def _find_rows(rows, length, width, CAUSAL: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr):
    """Return this program's rows, the query of each, how many columns they may see, and where they start [ROWS, 1]."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    query = row % length
    end = width
    if CAUSAL:
        end = tl.minimum(width, tl.max(tl.where(row < rows, query, 0), 0) + 1)
    if WIDE:
        row = row.to(tl.int64)
        query = query.to(tl.int64)
    return row, query, end, row[:, None] * width


@triton.jit
def _limit(row, query, column, rows, width, CAUSAL: tl.constexpr):
    """Return which elements of a tile are read, and which of them seen: causal rows are read in whole 16-byte words."""
    inside = (row < rows)[:, None] & (column < width)
    seen = inside
    if CAUSAL:
        seen = inside & (column <= query[:, None])
        inside = inside & (column // 8 * 8 <= query[:, None])
    return inside, seen


@triton.jit
def _read(at, masks, column, inside, seen, scale, strides, ADDED: tl.constexpr):
    """Return the scaled and masked scores in float32, -inf where nothing is seen, and which elements are seen."""
    value = tl.where(seen, tl.load(at, inside, 0.0).to(tl.float32) * scale, -float("inf"))
    if masks is not None:
        if ADDED:
            added = tl.load(masks + column * strides[3], inside, -float("inf")).to(tl.float32)
            value += added
            seen = added != -float("inf")
        else:
            seen = tl.load(masks + column * strides[3], inside, 0) != 0
            value = tl.where(seen, value, -float("inf"))
    return value, seen


@triton.jit
def _write(
    weights,
    softmax,
    value,
    first,
    start,
    row,
    rows,
    width,
    factor,
    dropout,
    ALIGNED: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    at = first + start + tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows)[:, None] & (start + tl.arange(0, COLUMNS) < width)[None, :]
    if dropout is not None:
        tl.store(softmax + at, value.to(softmax.dtype.element_ty), inside)
        value *= tl.where(keep(first + start, dropout, COLUMNS, ALIGNED), factor, 0.0)
    tl.store(weights + at, value.to(weights.dtype.element_ty), inside)


@triton.jit
def _total(shares):
    """Return the sum of the rounded softmax of a row: nearly 1, and 0 where the row sees nothing."""
    return tl.where(shares == 0.0, 1.0, shares)


@triton.jit
def _undrop(
    gradient, first, start, inside, seen, factor, dropout, ALIGNED: tl.constexpr, COLUMNS: tl.constexpr
):
    """Return the gradient of the softmax from that of its dropout."""
    value = tl.load(gradient + first + start + tl.arange(0, COLUMNS)[None, :], inside, 0.0).to(tl.float32)
    value = tl.where(seen, value, 0.0)
    if dropout is not None:
        value *= tl.where(keep(first + start, dropout, COLUMNS, ALIGNED), factor, 0.0)
    return value


@triton.jit
def _clear(result, first, start, row, rows, width, COLUMNS: tl.constexpr):
    column = start + tl.arange(0, COLUMNS)[None, :]
    tl.store(result + first + column, 0.0, (row < rows)[:, None] & (column < width))
