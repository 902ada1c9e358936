"""An optimizer made from the model that was compiled trains nothing: its first step after a backward says so."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

SHOWN = 3  # parameters


def refuse_forgotten(parallel: nn.Module, plain: Iterable[tuple[str, Tensor]]) -> None:
    """From now on, refuse the step of an optimizer that has parameters of the `plain` model instead of `parallel`'s.

    The step raises ValueError where none of these has a gradient, and it would change nothing, while `parallel` has
    some. So whoever trains the plain model too, whose backward gives it gradients, is not disturbed.
    """
    known = {id(parameter): (name, weakref.ref(parameter)) for name, parameter in plain}
    own = weakref.ref(parallel)

    def check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        held = [p for group in optimizer.param_groups for p in group["params"]]
        # An id may have passed on to another tensor.
        found = [known[id(p)][0] for p in held if id(p) in known and known[id(p)][1]() is p]
        module = own()
        if not found or module is None or any(p.grad is not None for p in held):
            return
        if any(p.grad is not None for p in module.parameters()):
            listed = ", ".join(found[:SHOWN]) + ", ..." * (len(found) > SHOWN)
            kind = type(optimizer).__name__
            raise ValueError(
                f"the optimizer has {len(found)} parameters of the model that was compiled ({listed}); the parallel "
                "model has copies of its own, so this would train nothing. Make it after bind, from these: "
                f"optimizer = {kind}(parallel.parameters(), ...)"
            )

    handle = register_optimizer_step_pre_hook(check)
    weakref.finalize(parallel, handle.remove)
