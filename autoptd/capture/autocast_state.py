"""The autocast that is on around `compile`: read, traced under, and left for all that the compiler computes itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autoptd.passes.ir.autocast import KERNELS, Autocast


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
        with NoGradRegions():
            yield
        return
    with torch.autocast("cpu", state.dtype), NoGradRegions():
        yield


class NoGradRegions(TorchFunctionMode):
    """Writes ``torch.no_grad`` inside of autocast regions as detached results: torch.export forgets it there."""

    def __init__(self) -> None:
        super().__init__()
        self.outside = _nesting()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.is_grad_enabled() or _nesting() == self.outside:
            return result
        if isinstance(result, tuple) and type(result) is tuple:
            return tuple(_detached(part, args) for part in result)
        return _detached(result, args)


def _detached(result: Any, args: Sequence[Any]) -> Any:
    """A new floating tensor detached; what a call was given and gives back as it is."""
    if not isinstance(result, Tensor) or not result.is_floating_point() or any(result is x for x in args):
        return result
    return result.detach()


def _nesting() -> int:
    """How many regions of autocast this is in."""
    count = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return int(count)


@contextmanager
def leave_autocast() -> Iterator[None]:
    """Compute as written, whatever is on around."""
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield
