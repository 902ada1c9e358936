"""Refuse optimizers of the model that was compiled, and those that would step slices otherwise than whole tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from autoptd.runtime.engine.dynamo import leave_uncompiled
from autoptd.runtime.guards.state_marks import StateMarks
from autoptd.runtime.guards.weight_agreement import StepLog
from autoptd.runtime.optimizer.zero1 import ELEMENTWISE, list_elementwise
from autoptd.runtime.user_warnings import warn_caller

SHOWN = 3  # parameters
# Options that do not say what a step does, but how.
IMPLEMENTATIONS = frozenset(["foreach", "fused", "capturable", "differentiable"])


class StepHooks:
    """Hooks on every optimizer's step in this process, each for as long as its parallel model lives.

    torch goes through its own hooks while they run, and ends the step in a RuntimeError if one is removed meanwhile;
    the collector may free a parallel model at any time. So torch has one hook for good, which goes through a copy.
    """

    def __init__(self, register: Callable[[Any], Any]) -> None:
        self._hooks: dict[object, Callable[[Optimizer, Any, Any], None]] = {}
        register(self._call)

    def add(self, parallel: nn.Module, hook: Callable[[Optimizer, Any, Any], None]) -> None:
        """Call `hook` from now on; it keeps no reference to `parallel`."""
        key = object()
        self._hooks[key] = hook
        weakref.finalize(parallel, self._hooks.pop, key)

    @leave_uncompiled
    def _call(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for hook in list(self._hooks.values()):
            hook(optimizer, args, kwargs)


BEFORE = StepHooks(register_optimizer_step_pre_hook)
AFTER = StepHooks(register_optimizer_step_post_hook)


def refuse_forgotten(parallel: nn.Module, plain: Iterable[tuple[str, Tensor]]) -> None:
    """Refuse from now on the step of an optimizer that has parameters of the `plain` model instead of `parallel`'s.

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

    BEFORE.add(parallel, check)


def watch_steps(parallel: nn.Module, marks: StateMarks, steps: StepLog) -> None:
    """Note in `steps` from now on each optimizer's step of parameters of `parallel`, and its options."""

    def note(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Note a step that was made: one that broke off may be tried again."""
        options = [key for key in optimizer.defaults if key not in IMPLEMENTATIONS]
        for group in optimizer.param_groups:
            if names := [name for p in group["params"] for name in marks.names(p)]:
                steps.add(names, {key: group[key] for key in options if key in group})

    AFTER.add(parallel, note)


def watch_divided(parallel: nn.Module, marks: StateMarks) -> None:
    """Judge each optimizer from now on at its first step of parameters of `parallel`, which are slices of the model's.

    An optimizer that is not known to step each element by itself is warned of once. The step raises ValueError where a
    state was loaded whose `marks` are of other slices, and for LBFGS, whose directions are of all parameters together.
    """
    judged: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # Of every optimizer in the process: this neither looks through modules nor waits for weights on their way.
        if not any(marks.names(p) for group in optimizer.param_groups for p in group["params"]):
            return
        marks.check(optimizer)
        if optimizer in judged:
            return
        if type(optimizer) not in ELEMENTWISE:
            reason = (
                f"{type(optimizer).__name__} is not known to step each element by itself, and on this mesh a rank has "
                "only slices of tensors, or some of the layers: computations over a whole tensor, or over all "
                "parameters together, would be over these alone, and train otherwise than on one device. Known "
                f"to be right are {list_elementwise()}"
            )
            if isinstance(optimizer, torch.optim.LBFGS):
                raise ValueError(reason)
            warn_caller(reason)
        marks.mark(optimizer)
        judged.add(optimizer)

    BEFORE.add(parallel, check)
