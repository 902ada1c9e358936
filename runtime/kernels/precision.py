"""In what kernels compute: those that reduce rows in float32 for half precision, else in the own dtype."""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)


def widen(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def promote(*tensors: Tensor | None) -> torch.dtype:
    return reduce(torch.promote_types, (tensor.dtype for tensor in tensors if tensor is not None))


def cast_widely(*arguments: Any) -> tuple[Any, ...]:
    """An operator's arguments as autocast gives them to torch's own norms and softmax."""
    return tuple(
        x.to(widen(x.dtype)) if isinstance(x, Tensor) and x.is_floating_point() else x for x in arguments
    )
