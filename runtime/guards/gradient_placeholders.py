"""Placeholders in the ``.grad`` of parameters that a sharded optimizer steps, whose gradient no rank has whole."""

import weakref
from collections.abc import Mapping
from functools import partial
from math import nan

import torch
from torch import Tensor, nn

from autoptd.runtime.engine.dynamo import leave_uncompiled
from autoptd.runtime.optimizer.zero1 import FlatShard

LEAVE = "or train without shard_optimizer"


class GradientPlaceholders:
    """NaNs in the ``.grad`` of a shard's parameters while this replica's part of their gradient is in the shard's.

    They say that there is a gradient, and clearing all of them clears the shard's. What reads them gets NaN, and what
    writes them is refused: by torch, since one NaN stands for all elements, or before the next step.
    """

    def __init__(self, shard: FlatShard, parameters: Mapping[str, nn.Parameter]) -> None:
        """Place them after each backward from now on; the shard's are among the model's `parameters`."""
        self.parameters = parameters = {name: parameters[name] for name in shard.names}
        self._own = shard.own
        self._accumulated: weakref.ref[Tensor] | None = None
        self._placeholders = {name: _make_placeholder(p) for name, p in parameters.items()}
        shard.own.register_hook(self._prepare)  # before the gradient is added
        shard.own.register_post_accumulate_grad_hook(self._place)
        refused = [p.register_hook(partial(_refuse_gradient, name)) for name, p in parameters.items()]
        self.hooks = {handle.id for handle in refused}

    def settle(self) -> None:
        """Clear the gradient of the shard's part where those of all its parameters were cleared.

        A gradient that the caller gave the part, from torch.autograd.grad, stays. Raises ValueError where only some
        were cleared, whose part has the others' too, and where one was replaced or written.
        """
        for name, parameter in self.parameters.items():
            own = self._placeholders[name]
            if parameter.grad is not None and (parameter.grad is not own or own._version):
                raise ValueError(
                    f"the gradient of {name} was replaced or written, but a sharded optimizer steps by the .grad of "
                    f"its own part of it: change it there (optimizer.param_groups), {LEAVE}"
                )
        cleared = [name for name, parameter in self.parameters.items() if parameter.grad is None]
        placed, grad = len(cleared) < len(self.parameters), self._own.grad
        # Whether a backward left the gradient that the shard's part has.
        accumulated = grad is not None and self._accumulated is not None and self._accumulated() is grad
        if placed and grad is not None and not accumulated:
            raise ValueError(
                f"the gradient of the part of {', '.join(self.parameters)} that a sharded optimizer steps was replaced "
                f"by another tensor: change it in place (p.grad.div_, p.grad.copy_), {LEAVE}"
            )
        if not cleared or not accumulated:
            return
        if placed:
            raise ValueError(
                f"the gradient of {cleared[0]} was cleared, but not of all that a sharded optimizer steps with it: "
                "clear all (optimizer.zero_grad()), or give those that are not to be stepped a group with lr=0"
            )
        self._own.grad = None

    @leave_uncompiled
    def _prepare(self, _: Tensor) -> None:
        # Until then parameters may have gradients from before they were sharded.
        if self._accumulated is not None:
            self.settle()

    @leave_uncompiled
    def _place(self, own: Tensor) -> None:
        assert own.grad is not None
        self._accumulated = weakref.ref(own.grad)
        for name, parameter in self.parameters.items():
            if self._placeholders[name]._version:  # it was written, and cleared since
                self._placeholders[name] = _make_placeholder(parameter)
            parameter.grad = self._placeholders[name]


def _make_placeholder(parameter: nn.Parameter) -> Tensor:
    return torch.full((), nan, dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)


def _refuse_gradient(name: str, gradient: Tensor | None) -> None:
    if gradient is None:  # a call's
        return
    raise ValueError(
        f"{name} got a gradient of another loss than the call's, which a sharded optimizer would not see: add that "
        f"loss to the one that the model returns, {LEAVE}"
    )
