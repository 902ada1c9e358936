"""Scale, mask, softmax and keyed dropout in Triton, forward and backward.

A program holds a tile of rows in registers, and reads them once. What a causal row may not see is not read, but for the
rest of a 16-byte word. To draw its mask takes longer than to read it: backward draws blocks of what a row sees.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from autoptd.runtime.kernels.triton.philox import drop
from autoptd.runtime.kernels.triton.tiles import launch_rows, lay_out, read

BLOCKS = 4  # of a causal row in backward


def scaled_softmax(*arguments: Any) -> None:
    scores, mask, is_causal, scale, p, key, moment, (weights, softmax) = arguments
    view, sizes, strides = mask, None, None
    if mask is not None:
        view = (mask.view(torch.uint8) if mask.dtype == torch.bool else mask).expand(scores.shape)
        view = view[None] if view.dim() == 2 else view
        sizes, strides = tuple(view.shape[:-2]), view.stride()
    launch_rows(
        _normalize, scores, (key, moment, p), *lay_out(scores), view, weights, softmax if key else None, scale, sizes,
        strides, scores.shape[-2], ADDED=mask is not None and mask.dtype != torch.bool, CAUSAL=is_causal,
        enable_fp_fusion=True
    )  # fmt: skip


def scaled_softmax_backward(*arguments: Any) -> None:
    gradient, softmax, _, is_causal, scale, p, key, moment, result = arguments
    blocks = BLOCKS if is_causal and softmax.shape[-1] > 4 * BLOCKS else 1
    launch_rows(
        _differentiate, softmax, (key, moment, p), *lay_out(gradient, softmax), result, scale, softmax.shape[-2],
        blocks=blocks, CAUSAL=is_causal, BLOCKS=blocks, enable_fp_fusion=True
    )  # fmt: skip


@triton.jit
def _normalize(
    scores, mask, weights, softmax, scale, sizes, strides, length, rows, width, dropout, ADDED: tl.constexpr,
    CAUSAL: tl.constexpr, ALIGNED: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row, query, _, first = _find_rows(rows, length, width, CAUSAL, WIDE, ROWS)
    column, inside, seen = _limit(row, query, 0, rows, width, CAUSAL, COLUMNS)
    value = read(scores + first + column, inside) * scale
    value = tl.where(seen, value, -float("inf"))
    if mask is not None:
        group = row // length
        offset = query * strides[-2]
        for dim in tl.static_range(len(sizes) - 1, -1, -1):
            offset += (group % sizes[dim] if dim > 0 else group) * strides[dim]
            group = group // sizes[dim]
        at = mask + offset[:, None] + column * strides[-1]
        if ADDED:
            added = tl.load(at, inside, -float("inf")).to(tl.float32)
            value += added
            seen = added != -float("inf")
        else:
            seen = tl.load(at, inside, 0) != 0
            value = tl.where(seen, value, -float("inf"))
    sees = tl.max(seen.to(tl.int32), 1)
    largest = tl.max(value, 1)
    power = tl.exp(value - tl.where(largest == -float("inf"), 0.0, largest)[:, None])
    share = 1.0 / tl.sum(power, 1)
    value = tl.where((sees > 0)[:, None], power * share[:, None], 0.0)
    if softmax is not None:
        _store(softmax, value, first, 0, row, rows, width, COLUMNS)
    value = drop(value, first, dropout, COLUMNS, ALIGNED)
    _store(weights, value, first, 0, row, rows, width, COLUMNS)


@triton.jit
def _differentiate(
    gradient, softmax, result, scale, length, rows, width, dropout, CAUSAL: tl.constexpr, ALIGNED: tl.constexpr,
    WIDE: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row, query, end, first = _find_rows(rows, length, width, CAUSAL, WIDE, ROWS)
    shares, outers, slopes = (), (), ()
    for block in tl.static_range(BLOCKS):
        column, inside, seen = _limit(row, query, block * COLUMNS, rows, width, CAUSAL, COLUMNS)
        shares += (read(softmax + first + column, inside),)
        outers += (tl.where(seen, read(gradient + first + column, inside), 0.0),)
    level = tl.zeros([ROWS, COLUMNS], tl.float32)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for block in tl.static_range(BLOCKS):
        slope = outers[block]
        if block * COLUMNS < end:
            slope = drop(slope, first + block * COLUMNS, dropout, COLUMNS, ALIGNED)
        slopes += (slope,)
        total += shares[block]
        level += shares[block] * slope
    # The rounded softmax of a row sums to nearly 1, and to 0 where the row sees nothing.
    total = tl.sum(total, 1)
    level = (tl.sum(level, 1) / tl.where(total == 0.0, 1.0, total))[:, None]
    for block in tl.static_range(BLOCKS):
        value = shares[block] * (slopes[block] - level) * scale
        _store(result, value, first, block * COLUMNS, row, rows, width, COLUMNS)


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
def _limit(row, query, start, rows, width, CAUSAL: tl.constexpr, COLUMNS: tl.constexpr):
    """Return a tile's columns [1, COLUMNS], which elements are read, and which of them seen.

    Causal rows are read in whole 16-byte words.
    """
    column = start + tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows)[:, None] & (column < width)
    seen = inside
    if CAUSAL:
        seen = inside & (column <= query[:, None])
        inside = inside & (column // 8 * 8 <= query[:, None])
    return column, inside, seen


@triton.jit
def _store(result, value, first, start, row, rows, width, COLUMNS: tl.constexpr):
    column = start + tl.arange(0, COLUMNS)[None, :]
    tl.store(result + first + column, value, (row < rows)[:, None] & (column < width))
