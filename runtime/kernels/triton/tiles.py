"""Tiles of an elementwise Triton kernel over [..., width] tensors: whole or part rows."""

# Inside @triton.jit nothing but constants may be annotated.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 4096  # elements of a program: 32 for each of 128 threads
WIDEST = 1024
WIDE_FROM = 1 << 30  # offsets are int64 from here on: a tile may reach past its tensor
PROGRAMS = 1024  # enough to fill a large GPU, where a program sums over many rows


def as_rows(x: Tensor) -> Tensor:
    """Return `x` as [rows, width] with its elements side by side; a copy only where the strides demand one."""
    rows = x.reshape(-1, x.shape[-1] if x.dim() else 1)
    return rows if rows.stride(1) == 1 else rows.contiguous()


def plan_tiles(*tensors: Tensor) -> dict[str, int | bool]:
    """Return the constants of a kernel over [rows, width]: its tile [ROWS, COLUMNS], and if offsets are WIDE."""
    rows, width = tensors[0].shape
    columns = min(WIDEST, max(4, triton.next_power_of_2(width)))
    height = min(TILE // columns, triton.next_power_of_2(rows))
    extent = rows * max(width, *(tensor.stride(0) for tensor in tensors))
    return {"ROWS": height, "COLUMNS": columns, "WIDE": extent >= WIDE_FROM}


def count_programs(x: Tensor, tile: dict[str, int | bool]) -> tuple[int]:
    """Return the grid: one program per tile of `x` [rows, width]."""
    rows, width = x.shape
    return (triton.cdiv(rows, tile["ROWS"]) * triton.cdiv(width, tile["COLUMNS"]),)


def plan_sums(x: Tensor, tile: dict[str, int | bool]) -> tuple[int, int]:
    """Return the groups of tiles above each other that one program sums over, and the tiles in each."""
    rows, width = x.shape
    heights = triton.cdiv(rows, tile["ROWS"])
    groups = max(1, min(heights, PROGRAMS // triton.cdiv(width, tile["COLUMNS"])))
    steps = triton.cdiv(heights, groups)
    return triton.cdiv(heights, steps), steps


def empty_rows(like: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return a result with the strides of ``empty_like(like)``, and the contiguous tensor a kernel writes it into.

    They are one where they can be; otherwise the second is to be copied into the first.
    """
    result = torch.empty_like(like, dtype=dtype)
    if result.is_contiguous():
        return result, result
    return result, torch.empty(like.shape, dtype=dtype, device=like.device)


@triton.jit
def locate_tile(number, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr):
    """Return a tile's rows [ROWS, 1], its first column, and which elements lie inside; tiles count along rows first."""
    blocks = tl.cdiv(width, COLUMNS)
    row = number // blocks * ROWS
    if WIDE:
        row = row.to(tl.int64)
    row = row + tl.arange(0, ROWS)[:, None]
    start = number % blocks * COLUMNS
    return row, start, (row < rows) & (start + tl.arange(0, COLUMNS) < width)
