"""Bytes that operators copy because their arguments lie in memory as they do."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from autoptd.passes.ir.program import tensor_bytes


def is_view(x: Tensor, shape: Sequence[int]) -> bool:
    """Return whether `x` can be viewed as `shape` without a copy."""
    if x.is_contiguous():
        return True
    try:
        x.view(tuple(shape))
    except RuntimeError:
        return False
    return True


def is_matrix(x: Tensor) -> bool:
    """Return whether a matrix product can read the last two dimensions as they lie."""
    if x.dim() < 2:
        return x.stride(-1) == 1
    (rows, columns), (row, column) = x.shape[-2:], x.stride()[-2:]
    if columns == 1 or rows == 1:
        return column == 1 or row == 1 or columns == rows
    return (column == 1 and row >= columns) or (row == 1 and column >= rows)


def float_bytes(x: Tensor) -> int:
    return tensor_bytes(x) if x.is_floating_point() else 0


def contiguous_copies(given: Sequence[Any], value: Any) -> int:
    return 0 if given[0].is_contiguous() else float_bytes(given[0])
