"""The autocast that is on around `compile`: read, traced under, and left for all that the compiler computes itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from autoptd.passes.autocast import KERNELS, Autocast


def read_autocast(model: nn.Module) -> Autocast | None:
    """The autocast that holds for `model` here; None: none.

    Where one is on it counts whatever device the weights are on, as the program will run elsewhere. Of two that of the
    weights' device does, or for a model on the meta device that of CUDA devices.
    """
    states = {d: Autocast(d, torch.get_autocast_dtype(d)) for d in KERNELS if torch.is_autocast_enabled(d)}
    if len(states) < 2:
        return next(iter(states.values()), None)
    tensors = (*model.parameters(), *model.buffers())
    return states["cpu" if any(tensor.is_cpu for tensor in tensors) else "cuda"]


@contextmanager
def trace_under(state: Autocast | None) -> Iterator[None]:
    """Let the trace, whose tensors are on the CPU, see the dtypes of `state`: forwards read ``x.dtype``."""
    if state is None:
        yield
        return
    with torch.autocast("cpu", state.dtype):
        yield


@contextmanager
def leave_autocast() -> Iterator[None]:
    """Compute as written, whatever is on around."""
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield
