"""The precision of kernels: those that reduce rows compute half precision in float32, others in their own dtype."""

from functools import reduce

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)


def widen(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def promote(*tensors: Tensor | None) -> torch.dtype:
    return reduce(torch.promote_types, (tensor.dtype for tensor in tensors if tensor is not None))
