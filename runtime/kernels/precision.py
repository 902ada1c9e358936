"""In what the kernels that reduce rows compute: float32 for half precision, else the own dtype."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)


def widen(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def cast_widely(*arguments: Any) -> tuple[Any, ...]:
    """An operator's arguments as autocast gives them to torch's own norms and softmax."""
    return tuple(
        x.to(widen(x.dtype)) if isinstance(x, Tensor) and x.is_floating_point() else x for x in arguments
    )
