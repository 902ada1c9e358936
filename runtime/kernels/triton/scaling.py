"""A row of gradients times a factor that the kernel reads, in Triton."""

# Inside @triton.jit nothing but constants may be annotated.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from autoptd.runtime.kernels.triton.tiles import PROGRAMS, TILE, WIDE_FROM, divide_up, launch


def scale_row(row: Tensor, factor: Tensor) -> None:
    programs = min(divide_up(row.numel(), TILE), PROGRAMS)
    launch(_scale_row, (programs,), row, factor, row.numel(), TILE=TILE, WIDE=row.numel() >= WIDE_FROM)


@triton.jit
def _scale_row(row, factor, count, TILE: tl.constexpr, WIDE: tl.constexpr):
    scale = tl.load(factor).to(tl.float32)
    if scale != 1.0:
        first = tl.program_id(0)
        if WIDE:
            first = first.to(tl.int64)
        for start in range(first * TILE, count, tl.num_programs(0) * TILE):
            place = start + tl.arange(0, TILE)
            value = tl.load(row + place, place < count)
            tl.store(row + place, value * scale, place < count)
