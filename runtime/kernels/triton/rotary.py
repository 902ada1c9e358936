"""Rotary position embedding in Triton; computed in float32, on strided tensors as attention has them."""

from typing import Any

import triton
import triton.language as tl

from autoptd.runtime.kernels.triton import tiles
from autoptd.runtime.kernels.triton.tiles import number_rows, read

TILE = 2048  # pairs of a program


def rotary_embedding(*arguments: Any) -> None:
    x, cos, sin, interleaved, backward, result = arguments
    turned = cos.shape[-1]
    tensors = [x, result, *(table.expand(*x.shape[:-1], turned) for table in (cos, sin))]
    if x.dim() == 1:
        tensors = [tensor[None] for tensor in tensors]
    # Rows are taken in the order in which they lie in memory.
    order = sorted(range(tensors[0].dim() - 1), key=tensors[0].stride().__getitem__, reverse=True)
    tensors = [tensor.permute(*order, -1) for tensor in tensors]
    *sizes, width = tensors[0].shape
    rows, pairs = x.numel() // width, tiles.round_up(turned // 2)
    height = min(max(1, TILE // pairs), tiles.round_up(rows))
    strides = [tensor.stride() for tensor in tensors]
    extent = max(sum(n * step for n, step in zip((*sizes, width), each, strict=True)) for each in strides)
    tiles.launch(
        _rotate, (tiles.divide_up(rows, height),), *tensors, tuple(sizes), *strides, rows, width, turned,
        INTERLEAVED=interleaved, BACKWARD=backward, ROWS=height, PAIRS=pairs,
        REST=tiles.round_up(width - turned) if turned < width else 0,
        WIDE=extent >= tiles.WIDE_FROM, enable_fp_fusion=True
    )  # fmt: skip


@triton.jit
def _rotate(
    x, out, cos, sin, sizes, x_strides, out_strides, cos_strides, sin_strides, rows, width, turned,
    INTERLEAVED: tl.constexpr, BACKWARD: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr,
    REST: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    row = number_rows(tl.program_id(0), WIDE, ROWS)
    lies = row < rows
    for dim in tl.static_range(len(sizes) - 1, -1, -1):
        place = row % sizes[dim]
        row = row // sizes[dim]
        x += place * x_strides[dim]
        out += place * out_strides[dim]
        cos += place * cos_strides[dim]
        sin += place * sin_strides[dim]

    pair = tl.arange(0, PAIRS)
    inside = lies & (pair < turned // 2)
    first = pair * 2 if INTERLEAVED else pair
    second = first + (1 if INTERLEAVED else turned // 2)
    x1 = read(x + first * x_strides[-1], inside)
    x2 = read(x + second * x_strides[-1], inside)
    cos1 = read(cos + first * cos_strides[-1], inside)
    cos2 = read(cos + second * cos_strides[-1], inside)
    sin1 = read(sin + first * sin_strides[-1], inside)
    sin2 = read(sin + second * sin_strides[-1], inside)
    if BACKWARD:
        sin1, sin2 = -sin2, -sin1
    tl.store(out + first * out_strides[-1], x1 * cos1 - x2 * sin1, mask=inside)
    tl.store(out + second * out_strides[-1], x2 * cos2 + x1 * sin2, mask=inside)
    if REST > 0:
        column = turned + tl.arange(0, REST)
        inside = lies & (column < width)
        others = tl.load(x + column * x_strides[-1], mask=inside)
        tl.store(out + column * out_strides[-1], others, mask=inside)
