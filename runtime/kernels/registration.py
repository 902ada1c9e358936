"""How a kernel becomes an operator of torch: ``torch.ops.autoptd.<name>``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LIBRARY = torch.library.Library("autoptd", "FRAGMENT")


@dataclass(frozen=True)
class Operator:
    """One operator; what is registered with it is called as for ``torch.library.custom_op``."""

    name: str

    def register_fake(self, function: Callable[..., Any]) -> None:
        torch.library.register_fake(f"autoptd::{self.name}", function, lib=LIBRARY)

    def register_autograd(self, backward: Callable[..., Any], *, setup_context: Callable[..., None]) -> None:
        torch.library.register_autograd(
            f"autoptd::{self.name}", backward, setup_context=setup_context, lib=LIBRARY
        )

    def register_autocast(self, cast: Callable[..., tuple[Any, ...]]) -> None:
        """Under autocast call the operator with what `cast` makes of its arguments."""
        operator = getattr(torch.ops.autoptd, self.name)

        def call(*arguments: Any) -> Any:
            arguments = cast(*arguments)
            with torch.autocast(arguments[0].device.type, enabled=False):
                return operator(*arguments)

        for device in ("CPU", "CUDA"):
            LIBRARY.impl(self.name, call, f"Autocast{device}")


def define_operator(name: str) -> Callable[[Callable[..., Any]], Operator]:
    """Make the decorated function, which changes none of its arguments, the operator autoptd::`name`.

    As ``torch.library.custom_op`` does, but that imports torch._dynamo at the first call: 2 s in every process.
    """

    def define(function: Callable[..., Any]) -> Operator:
        def call_on_device(x: Tensor, *others: Any) -> Any:
            with torch.cuda.device(x.device):  # Triton launches on the current one
                return function(x, *others)

        LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=()))
        LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        LIBRARY.impl(name, call_on_device, "CUDA")
        return Operator(name)

    return define
