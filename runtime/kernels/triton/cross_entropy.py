"""The local parts of the vocabulary-parallel cross-entropy in Triton: each reads the logits once."""

# Inside @triton.jit nothing but constants may be annotated.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from autoptd.runtime.kernels.triton.rows import WARPS, plan_rows


def sum_exponentials(logits: Tensor, own: int, results: Tensor) -> None:
    """Fill `results` [2, N]: each row's maximum of the first `own` columns, and its sum of exponentials."""
    logits = _lay_out(logits)
    columns = plan_rows(*logits.shape)["COLUMNS"]
    largest, total = results.unbind()
    _sum_exponentials[(logits.shape[0],)](
        logits, largest, total, own, logits.stride(0), COLUMNS=columns, num_warps=WARPS, enable_fp_fusion=True
    )


def differentiate_losses(
    factor: Tensor, logits: Tensor, column: Tensor, largest: Tensor, total: Tensor, own: int, result: Tensor
) -> None:
    """Fill `result` with ``(softmax - one_hot(column)) * factor``, and with zeros from column `own` on."""
    logits = _lay_out(logits)
    rows, width = logits.shape
    columns = plan_rows(rows, width)["COLUMNS"]
    _differentiate[(rows, triton.cdiv(width, columns))](
        factor.contiguous(),
        logits,
        column.contiguous(),
        largest.contiguous(),
        total.contiguous(),
        result,
        own,
        width,
        logits.stride(0),
        COLUMNS=columns,
        num_warps=WARPS,
        enable_fp_fusion=True,
    )


def _lay_out(logits: Tensor) -> Tensor:
    """Rows may lie apart, elements of a row not."""
    return logits if logits.stride(1) == 1 else logits.contiguous()


@triton.jit
def _sum_exponentials(logits, largest, total, own, stride, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    shift = -float("inf")
    result = 0.0
    for start in range(0, own, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        value = tl.load(logits + row * stride + column, column < own, -float("inf")).to(tl.float32)
        raised = tl.maximum(shift, tl.max(value, 0))
        # A maximum that is -inf so far gives exp(-inf), not exp(-inf + inf).
        level = tl.where(raised == -float("inf"), 0.0, raised)
        result = result * tl.exp(shift - level) + tl.sum(tl.exp(value - level), 0)
        shift = raised
    tl.store(largest + row, shift)
    tl.store(total + row, result)


@triton.jit
def _differentiate(factor, logits, target, largest, total, result, own, width, stride, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    value = tl.load(logits + row * stride + column, column < own, -float("inf")).to(tl.float32)
    softmax = tl.exp(value - tl.load(largest + row)) / tl.load(total + row)
    hit = tl.where(column == tl.load(target + row), 1.0, 0.0)
    gradient = tl.where(column < own, softmax - hit, 0.0) * tl.load(factor + row)
    tl.store(result + row * width + column, gradient.to(result.dtype.element_ty), column < width)
