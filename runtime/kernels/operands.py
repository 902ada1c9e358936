"""The tensors of kernels: their precision, checks of them, and the sum over rows for a bias's gradient."""

from collections.abc import Mapping
from functools import reduce
from typing import Any

import torch
from torch import Tensor

Operand = Tensor | None
HALF = (torch.float16, torch.bfloat16)
KERNEL_DTYPES = (torch.float32, *HALF)


def widen(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which rows are reduced: half precision in float32, others in their own."""
    return torch.promote_types(dtype, torch.float32)


def promote(*arguments: Any) -> torch.dtype:
    """Return the dtype that all tensors among the `arguments` are promoted to."""
    return reduce(torch.promote_types, [each.dtype for each in arguments if isinstance(each, Tensor)])


def allocate_promoted(x: Tensor, *others: Any) -> Tensor:
    return torch.empty_like(x, dtype=promote(x, *others))


def check_operands(kernel: str, **tensors: Tensor | None) -> None:
    """Raise ValueError unless all are floating-point tensors on the device of the first."""
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    first, *_ = given.values()
    for name, tensor in given.items():
        if tensor.dtype not in (torch.float64, *KERNEL_DTYPES):
            raise ValueError(
                f"{kernel} was given {name} of {tensor.dtype}, expected float64, float32, float16 or bfloat16"
            )
        if tensor.device != first.device:
            raise ValueError(f"{kernel} was given {name} on {tensor.device}, others are on {first.device}")


def check_rows(kernel: str, rows: Mapping[str, Tensor | None], **vectors: Tensor | None) -> None:
    """Raise ValueError unless all `rows` have the shape [.., h] of the first, and the `vectors` [h]; None has any."""
    check_operands(kernel, **rows, **vectors)
    (first, x), *_ = rows.items()
    assert x is not None
    for name, tensor in {**rows, **vectors}.items():
        shape = x.shape[-1:] if name in vectors else x.shape
        if tensor is not None and (tensor.shape != shape or (name in vectors and x.dim() == 0)):
            raise ValueError(
                f"{kernel} was given {first} {list(x.shape)} and {name} {list(tensor.shape)}, expected [.., h] and "
                + ("[h]" if name in vectors else "the same")
            )


def sum_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum `x` [..., h] to [h], half precision in float32, and give the sum in `dtype`."""
    x, dims = x.unsqueeze(0), list(range(x.dim()))  # so that there is one: a sum over none is over all
    if x.dtype == dtype:
        return x.sum(dims)  # torch adds half precision in float32, and on a CPU faster than when told to
    return x.sum(dims, dtype=torch.promote_types(x.dtype, torch.float32)).to(dtype)
