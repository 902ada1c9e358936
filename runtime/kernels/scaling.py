"""Gradients scaled by the gradient of the loss, which is on the device, and 1 in nearly every step."""

from collections.abc import Sequence

from torch import Tensor

from autoptd.runtime.kernels.registration import find_kernels


def scale_rows(rows: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply `rows` in place by `factor`, of one element; a factor of 1 costs neither a pass nor a wait."""
    if factor.is_cpu and factor.item() == 1:
        return
    for row in rows:
        kernels = find_kernels("elementwise", row, factor)
        if kernels is None:
            row.mul_(factor)
        else:
            kernels.scale_row(row, factor)
