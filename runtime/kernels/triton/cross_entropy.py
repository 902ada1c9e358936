"""The local parts of the vocabulary-parallel cross-entropy in Triton: each reads the logits once."""

import triton
import triton.language as tl
from torch import Tensor

from autoptd.runtime.kernels.triton import tiles
from autoptd.runtime.kernels.triton.tiles import ROW_WARPS, as_rows, divide_up, launch, lay_out, round_up


def cross_entropy_statistics(logits: Tensor, own: int, result: Tensor) -> None:
    logits = as_rows(logits)
    columns = min(round_up(logits.shape[1]), tiles.TILE)
    largest, total = result.unbind()
    launch(
        _sum_exponentials, (logits.shape[0],), logits, largest, total, own, logits.stride(0),
        COLUMNS=columns, num_warps=ROW_WARPS, enable_fp_fusion=True
    )  # fmt: skip


def cross_entropy_rows_backward(
    factor: Tensor, logits: Tensor, column: Tensor, rows: Tensor, own: int, result: Tensor
) -> None:
    logits = as_rows(logits)
    count, width = logits.shape
    columns = min(round_up(width), tiles.TILE)
    largest, _, total, _ = rows.unbind()
    launch(
        _differentiate, (count, divide_up(width, columns)),
        *lay_out(factor), logits, *lay_out(column, largest, total), result, own, width, logits.stride(0),
        COLUMNS=columns, num_warps=ROW_WARPS, enable_fp_fusion=True
    )  # fmt: skip


@triton.jit
def _sum_exponentials(logits, largest, total, own, stride, COLUMNS: tl.constexpr):
    """Each column of the tile has a maximum and a sum of its own; only at the end do threads wait for each other."""
    row = tl.program_id(0).to(tl.int64)
    shift = tl.full([COLUMNS], -float("inf"), tl.float32)
    result = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, own, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        value = tl.load(logits + row * stride + column, column < own, -float("inf")).to(tl.float32)
        # The larger of the two has the exponential 1, also where both are -inf, or inf.
        power = tl.exp(tl.where(value == shift, 0.0, -tl.abs(value - shift)))
        result = tl.where(value > shift, result * power + 1.0, result + power)
        shift = tl.where(value > shift, value, shift)
    highest = tl.max(shift, 0)
    # A maximum that is -inf gives exp(-inf), not exp(-inf + inf).
    level = tl.where(highest == -float("inf"), 0.0, highest)
    tl.store(largest + row, highest)
    tl.store(total + row, tl.sum(result * tl.exp(shift - level), 0))


@triton.jit
def _differentiate(factor, logits, target, largest, total, result, own, width, stride, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    value = tl.load(logits + row * stride + column, column < own, -float("inf")).to(tl.float32)
    softmax = tl.exp(value - tl.load(largest + row)) / tl.load(total + row)
    hit = tl.where(column == tl.load(target + row), 1.0, 0.0)
    gradient = tl.where(column < own, softmax - hit, 0.0) * tl.load(factor + row)
    tl.store(result + row * width + column, gradient.to(result.dtype.element_ty), column < width)
