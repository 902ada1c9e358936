"""Choose the form of an operator: its Triton kernels where they can run, else plain torch."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from autoptd.runtime.kernels.precision import HALF

KERNEL_DTYPES = (torch.float32, *HALF)
# Tests add "cpu", where Triton's interpreter runs the kernels.
kernel_devices = {"cuda"}


def runs_plainly(x: Tensor) -> bool:
    """Return whether a chain of torch's own operators, differentiated by torch, may stand for an operator here.

    So it does where no kernel runs, no mask is drawn and autocast has no say, without the 50 microseconds that a call
    of ours takes.
    """
    device = x.device.type
    return device not in kernel_devices and not (device == "cpu" and torch.is_autocast_enabled(device))


def find_kernels(name: str, x: Tensor, *others: Any) -> Any:
    """Return the module triton/<name>.py where it takes these tensors, else None.

    It takes non-empty float32, float16 and bfloat16 tensors (integer and bool ones beside them) on the current
    GPU, where Triton launches; Triton is an extra and may not be installed.
    """
    if x.device.type not in kernel_devices or (x.is_cuda and x.get_device() != torch.cuda.current_device()):
        return None
    for tensor in (argument for argument in (x, *others) if isinstance(argument, Tensor)):
        if tensor.numel() == 0 or (tensor.is_floating_point() and tensor.dtype not in KERNEL_DTYPES):
            return None
    return _load(name)


@cache
def _load(name: str) -> Any:
    """Return None where Triton is not installed."""
    return import_module(f"autoptd.runtime.kernels.triton.{name}") if find_spec("triton") else None
