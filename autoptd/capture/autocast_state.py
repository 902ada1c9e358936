"""The enclosing autocast context: read for the trace, and switched off for the compiler's own computations."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only  # private, with no public twin

from autoptd.passes.ir.autocast import KERNELS, Autocast


def read_autocast(model: nn.Module) -> Autocast | None:
    """Return the enabled autocast context that applies to `model`, or None.

    It applies whatever device the weights are on, since the program may run on another. If two are enabled, the one of
    the weights' device applies; for a model on the meta device, that of CUDA.
    """
    own = "cpu" if any(tensor.is_cpu for tensor in (*model.parameters(), *model.buffers())) else "cuda"
    enabled = [device for device in (own, *KERNELS) if torch.is_autocast_enabled(device)]
    return Autocast(enabled[0], torch.get_autocast_dtype(enabled[0])) if enabled else None


class NoGradRegions(TorchFunctionMode):
    """Detached results in place of ``torch.no_grad`` inside autocast regions, where torch.export forgets it.

    Entered in forward alone: around torch.export it would slow down each call that the tracer makes for itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.outside = _nesting()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.is_grad_enabled() or _nesting() == self.outside:
            return result

        def detach(part: Tensor) -> Tensor:
            return part if any(part is x for x in args) or not part.is_floating_point() else part.detach()

        return tree_map_only(Tensor, detach, result)


def _nesting() -> int:
    count = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return int(count)


@contextmanager
def leave_autocast() -> Iterator[None]:
    """Switch every autocast context off."""
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield
