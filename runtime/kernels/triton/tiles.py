"""Tiles of Triton kernels over [.., width] tensors, whole rows or parts of rows, and their launch."""

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from autoptd.runtime.kernels.operands import Operand
from autoptd.runtime.kernels.triton.philox import dropout_arguments

TILE = 4096  # elements of a program, or of one of its turns
WIDEST = 1024  # columns of an elementwise tile, 32 elements for each of 128 threads
ROW_WARPS = 8  # of a kernel that reduces rows
BLOCK_WARPS = 4  # so that a thread has 8 elements of a row's block: those of one Philox counter
WIDE_FROM = 1 << 30  # offsets are int64 from here on: a tile may reach past its tensor
PROGRAMS = 1024  # enough to fill a large GPU, where a program sums over many rows
PARTIAL_ROWS, PARTIAL_COLUMNS = 32, 64  # of a tile of their sums: few columns, for many programs

_compiled: dict[tuple[Any, ...], Any] = {}


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, dropout: Any = (), **constants: Any) -> None:
    """Launch `kernel` on a `grid` of programs, past Triton's own search where it has compiled such a launch before.

    That takes 40 microseconds. Triton compiles for the constants and for each argument's `_kind`, on one device; the
    stream is the one that is current. Its interpreter compiles nothing. `dropout`, if a kernel has any, comes last.
    """
    if dropout != ():
        arguments = (*arguments, dropout)
    key = (id(kernel), *map(_kind, arguments), *constants.values())
    compiled = _compiled.get(key)
    if compiled is None:
        _compiled[key] = kernel[grid](*arguments, **constants)
    else:  # which wants all that the kernel declares, and ignores the constants
        ignored = [None] * (len(kernel.arg_names) - len(arguments))
        compiled[(*grid, 1, 1)[:3]](*arguments, *ignored)


def _kind(value: Any) -> Any:
    """Return what of an argument, a natural number where it is an integer, Triton compiles a kernel for."""
    if isinstance(value, Tensor):
        return value.dtype, value.get_device(), value.data_ptr() % 16 == 0
    if type(value) is int:
        return value == 1, value % 16 == 0, value.bit_length() // 32
    return tuple(map(_kind, value)) if type(value) is tuple else type(value)


# Triton's own of these two take 6 microseconds each.
def divide_up(count: int, by: int) -> int:
    return -(-count // by)


def round_up(count: int) -> int:
    """Return the power of two that is `count` or next above it."""
    return 1 << (count - 1).bit_length()


def lay_out(*tensors: Operand) -> list[Operand]:
    """Return the tensors contiguous."""
    return [None if tensor is None else tensor.contiguous() for tensor in tensors]


def launch_rows(
    kernel, x: Tensor, dropout: tuple[Any, Any, float], *arguments: Any, blocks: int = 1, **constants: Any
) -> None:
    """Launch a `kernel` with `arguments` over whole rows of `x`, each in so many `blocks`: a few rows a program.

    `dropout` are key, moment and probability. The kernel takes the numbers of rows and columns last.
    """
    width = x.shape[-1]
    rows, extent = x.numel() // width, round_up(width)
    height, warps = max(1, TILE // extent), ROW_WARPS if blocks == 1 else BLOCK_WARPS
    launch(
        kernel, (divide_up(rows, height),), *arguments, rows, width, **dropout_arguments(*dropout, x), **constants,
        WIDE=x.numel() >= WIDE_FROM, ROWS=height, COLUMNS=extent // blocks,
        num_warps=min(32, max(warps, extent // 1024))
    )  # fmt: skip


def launch_tiles(
    kernel, inputs: list[Operand], results: list[Tensor], *others: Any, sums: Operand = None, **constants: Any
) -> None:
    """Let an elementwise `kernel` fill `results` from `inputs`, all of one shape [.., width]; None leaves others out.

    It takes these, `others`, the numbers of rows and columns, and the distance of each input's rows; it writes results
    that are contiguous, which are copied where they are not to be. A program has one tile. But where there are `sums`
    [width], over rows, it has several below each other, and takes two more arguments: where its own sum goes,
    float32, and how many tiles it has.
    """
    first: Any = inputs[0]
    width = first.shape[-1] if first.dim() else 1
    count = first.numel() // width
    rows = [x if x is None or x.is_contiguous() else as_rows(x) for x in inputs]
    strides = [0 if x is None else width if x.is_contiguous() else x.stride(0) for x in rows]
    written = [result if result.is_contiguous() else result.new_empty(result.shape) for result in results]
    wide = count * max(width, *strides) >= WIDE_FROM
    above, beside, turns, tile = _plan_tiles(count, width, wide, sums is not None)
    if sums is not None:
        partial = torch.empty(above, width, dtype=torch.float32, device=sums.device)
        others = (*others, partial, turns)
    launch(kernel, (above * beside,), *rows, *written, *others, count, width, *strides, **tile, **constants)
    for result, filled in zip(results, written, strict=True):
        if filled is not result:
            result.copy_(filled)
    if sums is not None:
        add_partial(partial, sums)


def add_partial(partial: Tensor, sums: Tensor) -> None:
    """Fill `sums` [.., width] with the sums of `partial` [.., programs, width]: one launch for any dtype of theirs."""
    programs, width = partial.shape[-2:]
    launch(
        _add_partial, (divide_up(width, PARTIAL_COLUMNS), partial.numel() // (programs * width)),
        partial, sums, programs, width, ROWS=PARTIAL_ROWS, COLUMNS=PARTIAL_COLUMNS,
        enable_fp_fusion=False
    )  # fmt: skip


@lru_cache(maxsize=1 << 12)
def _plan_tiles(count: int, width: int, wide: bool, sums: bool) -> tuple[int, int, int, dict[str, Any]]:
    """Return how many programs lie above and beside each other, how many tiles each has, and constants."""
    columns = min(WIDEST, max(4, round_up(width)))
    height = min(TILE // columns, round_up(count))
    above, beside = divide_up(count, height), divide_up(width, columns)
    turns = divide_up(above, max(1, min(above, PROGRAMS // beside))) if sums else 1
    return divide_up(above, turns), beside, turns, {"ROWS": height, "COLUMNS": columns, "WIDE": wide}


def as_rows(x: Tensor) -> Tensor:
    """Return `x` as [rows, width] with its elements side by side; a copy only where the strides demand one."""
    rows = x.reshape(-1, x.shape[-1] if x.dim() else 1)
    return rows if rows.stride(1) == 1 else rows.contiguous()


@triton.jit
def read(at, inside):
    return tl.load(at, inside, 0.0).to(tl.float32)


@triton.jit
def number_rows(tile, WIDE: tl.constexpr, ROWS: tl.constexpr):
    """Return the rows [ROWS, 1] of a tile."""
    row = tile * ROWS + tl.arange(0, ROWS)[:, None]
    if WIDE:
        row = row.to(tl.int64)
    return row


@triton.jit
def locate_tile(number, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr):
    """Return a tile's rows [ROWS, 1], its first column, and which elements lie inside; tiles count along rows first."""
    blocks = tl.cdiv(width, COLUMNS)
    row = number_rows(number // blocks, WIDE, ROWS)
    start = number % blocks * COLUMNS
    return row, start, (row < rows) & (start + tl.arange(0, COLUMNS) < width)


@triton.jit
def _add_partial(partial, sums, programs, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.program_id(1).to(tl.int64) * programs
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, programs, ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        total += tl.load(partial + (first + row) * width + column, (row < programs) & (column < width), 0.0)
    tl.store(sums + tl.program_id(1) * width + column, tl.sum(total, 0), column < width)
