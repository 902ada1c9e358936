"""LayerNorm and RMSNorm of dropout(x + bias) + residual in Triton, forward and backward.

A row is read once and stays in registers. In backward a program on each processor goes over its rows and holds its sums
of the gradients of weight and biases beside them, in float32; at the end it writes them, and those of all programs
are added. The order of every sum follows from width, rows, dtype and kind of norm, not from what is added or
dropped: else a sum and its norm would have other bits apart than together.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from autoptd.runtime.kernels.triton import tiles
from autoptd.runtime.kernels.triton.philox import drop, dropout_arguments
from autoptd.runtime.kernels.triton.tiles import ROW_WARPS, TILE, lay_out, number_rows, read

HELD = 8192  # columns that fit into a processor's registers beside their three sums
STAGES = 3  # tiles of which one is computed, and the others are under way
INTERPRETED = 3, 232_448  # processors, and bytes that a program may share on each, as an H100's


def add_norm(*arguments: Any) -> None:
    x, weight, norm_bias, eps, bias, residual, p, key, moment, _, results = arguments
    given = lay_out(x, bias, residual, weight, norm_bias)
    tiles.launch_rows(_normalize, x, (key, moment, p), *given, *_filled(results), eps, enable_fp_fusion=False)


def add_norm_backward(*arguments: Any) -> None:
    d_normed, d_added, added, weight, means, scales, p, key, moment, wanted, results = arguments
    width = added.shape[-1]
    rows = added.numel() // width
    tile = plan_backward(width, added.itemsize, means is not None, d_added is not None, added.device)
    processors, _ = _describe(added.device)
    programs = min(tiles.divide_up(rows, tile["ROWS"]), processors)
    of_sum, of_x, vectors = results
    apart = wanted[4] and not tile["HELD"]
    held = vectors[:-1] if apart else vectors
    sums = held.new_empty((len(held), programs, width))
    tiles.launch(
        _differentiate, (programs,),
        *lay_out(d_added, d_normed, added, weight), means, scales, *_filled((of_sum, of_x)), sums, rows, width,
        **dropout_arguments(key, moment, p, added), WEIGHT=wanted[2], OFFSET=wanted[3], BIAS=wanted[4] and not apart,
        WIDE=rows * width >= tiles.WIDE_FROM, **tile, enable_fp_fusion=False
    )  # fmt: skip
    tiles.add_partial(sums, held)
    if apart:
        torch.sum((of_x if key else of_sum).view(rows, width), 0, dtype=vectors.dtype, out=vectors[-1])


def _filled(results: Sequence[Tensor]) -> list[Tensor | None]:
    """Return None for results that are left out, which are empty."""
    return [result if result.numel() else None for result in results]


@cache
def plan_backward(width: int, item: int, centers: bool, adds: bool, device: torch.device) -> dict[str, Any]:
    """Return the constants of `_differentiate`, as they were found best on an H100 in bfloat16.

    A tile is [ROWS, COLUMNS] in BLOCKS beside each other: three, where they come nearer to `width` than one. `item` are
    the bytes of an element. A row too wide for the registers is not HELD there, beside the sums, but read again from
    the cache. Only STAGES, which change no sum, may depend on whether a gradient is added.
    """
    extent = max(4, tiles.round_up(width))
    blocks = 3 if extent > TILE and 4 * width <= 3 * extent else 1
    columns = extent // 4 if blocks == 3 else extent
    extent = blocks * columns
    height = max(1, (4 if centers else 2) * TILE // (item * extent))
    loaded = (3 if adds else 2) * item * height * extent  # bytes of a tile
    _, shared = _describe(device)
    held = extent <= HELD
    stages = min(STAGES, 1 + shared * 3 // 4 // loaded) if held else 1
    tile = {"BLOCKS": blocks, "COLUMNS": columns, "ROWS": height}
    return {**tile, "HELD": held, "STAGES": stages, "num_warps": ROW_WARPS if held else 2 * ROW_WARPS}


@cache
def _describe(device: torch.device) -> tuple[int, int]:
    """Return how many processors `device` has, and how many bytes a program may share on each."""
    if device.type != "cuda":
        return INTERPRETED
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.shared_memory_per_block_optin  # type: ignore[attr-defined]


@triton.jit
def _normalize(
    x, bias, residual, weight, norm_bias, added, normed, means, scales, eps, rows, width, dropout,
    ALIGNED: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = number_rows(tl.program_id(0), WIDE, ROWS)
    at, inside = _locate(row, 0, rows, width, COLUMNS)
    value = read(x + at, inside)
    if bias is not None:
        value += _read_vector(bias, 0, width, COLUMNS)
    value = drop(value, row * width, dropout, COLUMNS, ALIGNED)
    if residual is not None:
        value += read(residual + at, inside)
    source = x if added is None else added
    total = value.to(source.dtype.element_ty)
    value = total.to(tl.float32)
    if means is not None:
        mean = tl.sum(value, 1)[:, None] / width
        tl.store(means + row, mean, row < rows)
        value = tl.where(inside, value - mean, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, 1)[:, None] / width + eps)
    tl.store(scales + row, scale, row < rows)
    result = value * scale
    if means is None:
        result = result.to(source.dtype.element_ty).to(tl.float32)
    result *= _read_vector(weight, 0, width, COLUMNS)
    if norm_bias is not None:
        result += _read_vector(norm_bias, 0, width, COLUMNS)
    tl.store(normed + at, result.to(normed.dtype.element_ty), inside)
    if added is not None:  # stored last: else Triton 3.6 adds some rows up a second time, in another order
        tl.store(added + at, total, inside)


@triton.jit
def _differentiate(
    d_added, d_normed, added, weight, means, scales, d_total, d_x, sums, rows, width, dropout, ALIGNED: tl.constexpr,
    WEIGHT: tl.constexpr, OFFSET: tl.constexpr, BIAS: tl.constexpr, WIDE: tl.constexpr, HELD: tl.constexpr,
    BLOCKS: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    nothing = tl.zeros([ROWS, COLUMNS], tl.float32)
    gains, of_weight, of_offset, of_bias = (), (), (), ()
    for block in tl.static_range(BLOCKS):
        gains += (_read_vector(weight, block, width, COLUMNS),)
        of_weight += (nothing,)
        of_offset += (nothing,)
        of_bias += (nothing,)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = number_rows(tile, WIDE, ROWS)
        scale = tl.load(scales + row, row < rows, 0.0)
        mean = 0.0
        if means is not None:
            mean = tl.load(means + row, row < rows, 0.0)
        outers, units, others = (), (), ()
        slope, level = _add_fours(nothing), _add_fours(nothing)
        for block in tl.static_range(BLOCKS):
            at, inside = _locate(row, block, rows, width, COLUMNS)
            outer = read(d_normed + at, inside)
            unit = (read(added + at, inside) - mean) * scale
            if d_added is not None:
                others += (tl.load(d_added + at, inside, 0.0),)
            outers += (outer,)
            units += (unit,)
            gain = gains[block] if HELD else _read_vector(weight, block, width, COLUMNS)
            slope += _add_fours(outer * gain * unit)
            level += _add_fours(outer * gain)
        slope = tl.sum(slope, 1)[:, None] / width
        level = tl.sum(level, 1)[:, None] / width if means is not None else 0.0
        weights, offsets, biases = (), (), ()
        for block in tl.static_range(BLOCKS):
            at, inside = _locate(row, block, rows, width, COLUMNS)
            if HELD:
                outer, unit, gain = outers[block], units[block], gains[block]
            else:  # from the cache
                outer = read(d_normed + at, inside)
                unit = (read(added + at, inside) - mean) * scale
                gain = _read_vector(weight, block, width, COLUMNS)
            total = ((outer * gain - unit * slope - level) * scale).to(added.dtype.element_ty)
            if d_added is not None:
                total = (total.to(tl.float32) + others[block].to(tl.float32)).to(total.dtype)
            if d_total is not None:
                tl.store(d_total + at, total, inside)
            inner = drop(total.to(tl.float32), row * width + block * COLUMNS, dropout, COLUMNS, ALIGNED)
            if d_x is not None:
                tl.store(d_x + at, inner.to(d_x.dtype.element_ty), inside)
            # Outside all of these are 0, but for columns that are not stored.
            weights += (of_weight[block] + outer * unit,)
            offsets += (of_offset[block] + outer,)
            biases += (of_bias[block] + inner,)
        of_weight, of_offset, of_bias = weights, offsets, biases
    if WEIGHT:
        _store_sums(sums, of_weight, 0, width, BLOCKS, COLUMNS)
    if OFFSET:
        _store_sums(sums, of_offset, WEIGHT, width, BLOCKS, COLUMNS)
    if BIAS:
        _store_sums(sums, of_bias, WEIGHT + OFFSET, width, BLOCKS, COLUMNS)


@triton.jit
def _add_fours(x):
    """Return the sums of four columns each, which one thread has: as they are they would take its registers."""
    return tl.sum(tl.reshape(x, [x.shape[0], x.shape[1] // 4, 4]), 2)


@triton.jit
def _read_vector(vector, block, width, COLUMNS: tl.constexpr):
    column = block * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    return read(vector + column, column < width)


@triton.jit
def _locate(row, block, rows, width, COLUMNS: tl.constexpr):
    """Return the indices of the elements of a block, and which lie inside."""
    column = block * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    return row * width + column, (row < rows) & (column < width)


@triton.jit
def _store_sums(sums, values, place, width, BLOCKS: tl.constexpr, COLUMNS: tl.constexpr):
    """Store the sums over rows of this program's `values` as a row of `sums` [.., programs, width]."""
    first = (place * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * width
    for block in tl.static_range(BLOCKS):
        column = block * COLUMNS + tl.arange(0, COLUMNS)
        tl.store(sums + first + column, tl.sum(values[block], 0), column < width)
