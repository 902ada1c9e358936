"""Tiles of a Triton kernel that reduces rows of [rows, width]: whole rows, or parts of rows in turn."""

from __future__ import annotations

import triton

TILE = 4096  # elements of a tile: 16 for each of 256 threads
WIDEST = 4096
WARPS = 8
WIDE_FROM = 1 << 30  # elements; a tile may reach past its tensor


def plan_rows(rows: int, width: int, widest: int | None = None) -> dict[str, int | bool]:
    """Return a kernel's constants: its tile [ROWS, COLUMNS], and whether indices of elements are WIDE: 64 bits."""
    columns = min(triton.next_power_of_2(width), widest or WIDEST, WIDEST)
    return {"ROWS": max(1, TILE // columns), "COLUMNS": columns, "WIDE": rows * width >= WIDE_FROM}
