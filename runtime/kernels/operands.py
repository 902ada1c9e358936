"""Checks of the tensors of elementwise kernels, and the sum over rows for a bias's gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from autoptd.runtime.kernels.selection import KERNEL_DTYPES


def check_operands(kernel: str, x: Tensor, **others: Tensor | None) -> None:
    """Raise ValueError unless all are floating-point tensors on the device of `x`."""
    for name, tensor in {**others, "x": x}.items():
        if tensor is None:
            continue
        if tensor.dtype not in (torch.float64, *KERNEL_DTYPES):
            raise ValueError(
                f"{kernel} was given {name} of {tensor.dtype}, expected float64, float32, float16 or bfloat16"
            )
        if tensor.device != x.device:
            raise ValueError(f"{kernel} was given {name} on {tensor.device}, the others are on {x.device}")


def sum_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum `x` [..., h] to [h], half precision in float32, and give the sum in `dtype`."""
    x, dims = x.unsqueeze(0), list(range(x.dim()))  # so that there is one: a sum over none is over all
    if x.dtype == dtype:
        return x.sum(dims)  # torch adds half precision in float32, and on a CPU faster than when told to
    return x.sum(dims, dtype=torch.promote_types(x.dtype, torch.float32)).to(dtype)
