"""Register kernels as operators of torch: ``torch.ops.autoptd.<name>``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from autoptd.runtime.kernels.selection import find_kernels

LIBRARY = torch.library.Library("autoptd", "FRAGMENT")


class Operator:
    """One operator, with registrations named as those of ``torch.library.custom_op``."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name = name
        self._function = function
        self._node: type[torch.autograd.Function] | None = None

    def __call__(self, *arguments: Any) -> Any:
        """Call the operator, past torch's dispatcher where nobody listens there.

        Its way through Python costs 25 microseconds more, backward included, in a step hundreds of times. It is for
        those who look at operators: compilers, tracers, dispatch modes, profilers, autocast, torch.func.
        """
        if not self._stands_alone(arguments):
            return getattr(torch.ops.autoptd, self.name)(*arguments)
        if self._node is None or not torch.is_grad_enabled():
            return self._function(*arguments)
        return self._node.apply(*arguments)

    def _stands_alone(self, arguments: tuple[Any, ...]) -> bool:
        """Return whether the operator's function may be called directly, and differentiated by its own formula."""
        if torch.compiler.is_compiling() or torch._C._autograd._profiler_enabled():
            return False
        modes: int = torch._C._len_torch_dispatch_stack()  # of this thread
        if modes or torch._C._are_functorch_transforms_active():
            return False
        differentiates = False
        for argument in arguments:
            if isinstance(argument, Tensor):
                if type(argument) is not Tensor and type(argument) is not Parameter:
                    return False
                differentiates = differentiates or argument.requires_grad
        device = arguments[0].device.type
        if device not in ("cpu", "cuda") or torch.is_autocast_enabled(device):
            return False
        return self._node is not None or not (differentiates and torch.is_grad_enabled())

    def register_fake(self, function: Callable[..., Any]) -> None:
        torch.library.register_fake(f"autoptd::{self.name}", function, lib=LIBRARY)

    def register_autograd(self, backward: Callable[..., Any], *, setup_context: Callable[..., None]) -> None:
        def forward(ctx: Any, *arguments: Any) -> Any:
            output = self._function(*arguments)
            setup_context(ctx, arguments, output)
            return output

        torch.library.register_autograd(
            f"autoptd::{self.name}", backward, setup_context=setup_context, lib=LIBRARY
        )
        methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        self._node = type(self.name, (torch.autograd.Function,), methods)

    def register_autocast(self, cast: Callable[..., tuple[Any, ...]]) -> None:
        """Let autocast call the operator with the arguments that `cast` returns for its own."""
        operator = getattr(torch.ops.autoptd, self.name)

        def call(*arguments: Any) -> Any:
            arguments = cast(*arguments)
            with torch.autocast(arguments[0].device.type, enabled=False):
                return operator(*arguments)

        for device in ("CPU", "CUDA"):
            LIBRARY.impl(self.name, call, f"Autocast{device}")


def define_operator(name: str, triton: str | None = None) -> Callable[[Callable[..., Any]], Operator]:
    """Make the decorated function, which changes none of its arguments, the operator autoptd::`name`.

    As ``torch.library.custom_op`` does, but that imports torch._dynamo at the first call: 2 s in every process.
    Where the module triton/<triton>.py can run, its function of this `name` is called instead, with the same arguments.
    """

    def define(function: Callable[..., Any]) -> Operator:
        def call_on_device(x: Tensor, *others: Any) -> Any:
            # Triton launches on the current one.
            with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
                kernels = find_kernels(triton, x, *others) if triton else None
                return (getattr(kernels, name) if kernels else function)(x, *others)

        LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=()))
        LIBRARY.impl(name, call_on_device, "CompositeExplicitAutograd")
        return Operator(name, call_on_device)

    return define
