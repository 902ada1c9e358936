"""Rotary position embedding in Triton; computed in float32, on strided tensors as attention has them."""

# Inside @triton.jit nothing but constants may be annotated.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from autoptd.runtime.kernels.triton import tiles

TILE = 2048  # pairs of a program


def rotary_embedding(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, backward: bool) -> Tensor:
    """Turn `x`, of at most 4 dimensions, by the tables."""
    dtype = torch.promote_types(x.dtype, torch.promote_types(cos.dtype, sin.dtype))
    result = torch.empty_like(x, dtype=dtype)
    width, turned = x.shape[-1], cos.shape[-1]
    tables = [table.expand(*x.shape[:-1], turned) for table in (cos, sin)]
    tensors = [tensor[(None,) * (4 - x.dim())] for tensor in (x, result, *tables)]
    # Rows are taken in the order in which they lie in memory.
    order = sorted(range(3), key=tensors[0].stride().__getitem__, reverse=True)
    tensors = [tensor.permute(*order, 3) for tensor in tensors]
    *sizes, _ = tensors[0].shape
    rows, pairs = x.numel() // width, triton.next_power_of_2(turned // 2)
    height = min(max(1, TILE // pairs), triton.next_power_of_2(rows))
    strides = [tensor.stride() for tensor in tensors]
    extents = [sum(n * step for n, step in zip(tensors[0].shape, each, strict=True)) for each in strides]
    _rotate[(triton.cdiv(rows, height),)](
        *tensors, tuple(sizes), *strides, width, turned, INTERLEAVED=interleaved, BACKWARD=backward, ROWS=height,
        PAIRS=pairs, REST=triton.next_power_of_2(width - turned) if turned < width else 0,
        WIDE=max(extents) >= tiles.WIDE_FROM, enable_fp_fusion=True
    )  # fmt: skip
    return result


@triton.jit
def _rotate(
    x, out, cos, sin, sizes, x_strides, out_strides, cos_strides, sin_strides, width, turned,
    INTERLEAVED: tl.constexpr, BACKWARD: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr,
    REST: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0) * ROWS
    if WIDE:
        start = start.to(tl.int64)
    row = start + tl.arange(0, ROWS)[:, None]
    lies = row < sizes[0] * sizes[1] * sizes[2]
    place = row // (sizes[1] * sizes[2]), row // sizes[2] % sizes[1], row % sizes[2]
    x += _offset(place, x_strides)
    out += _offset(place, out_strides)
    cos += _offset(place, cos_strides)
    sin += _offset(place, sin_strides)

    pair = tl.arange(0, PAIRS)
    inside = lies & (pair < turned // 2)
    first = pair * 2 if INTERLEAVED else pair
    second = first + (1 if INTERLEAVED else turned // 2)
    x1 = tl.load(x + first * x_strides[3], mask=inside, other=0).to(tl.float32)
    x2 = tl.load(x + second * x_strides[3], mask=inside, other=0).to(tl.float32)
    cos1 = tl.load(cos + first * cos_strides[3], mask=inside, other=0).to(tl.float32)
    cos2 = tl.load(cos + second * cos_strides[3], mask=inside, other=0).to(tl.float32)
    sin1 = tl.load(sin + first * sin_strides[3], mask=inside, other=0).to(tl.float32)
    sin2 = tl.load(sin + second * sin_strides[3], mask=inside, other=0).to(tl.float32)
    if BACKWARD:
        y1 = x1 * cos1 + x2 * sin2
        y2 = x2 * cos2 - x1 * sin1
    else:
        y1 = x1 * cos1 - x2 * sin1
        y2 = x2 * cos2 + x1 * sin2
    tl.store(out + first * out_strides[3], y1, mask=inside)
    tl.store(out + second * out_strides[3], y2, mask=inside)
    if REST > 0:
        column = turned + tl.arange(0, REST)
        inside = lies & (column < width)
        others = tl.load(x + column * x_strides[3], mask=inside)
        tl.store(out + column * out_strides[3], others, mask=inside)


@triton.jit
def _offset(place, strides):
    return place[0] * strides[0] + place[1] * strides[1] + place[2] * strides[2]
