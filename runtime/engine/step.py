"""The call of a parallel model as one node of autograd's graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from autoptd.runtime.engine.dynamo import leave_uncompiled


class Step(torch.autograd.Function):
    """The whole step as one node: its forward runs the schedule, its backward hands the kept gradients on.

    Its inputs are the leaves that get them, and then the parameters in shards, which get none.
    """

    @classmethod
    def apply(cls, *arguments: Any) -> Any:
        """Run the step, past torch's own look at each argument in Python: it is for wrappers of torch.func."""
        way: Any = (
            super() if torch._C._are_functorch_transforms_active() else super(torch.autograd.Function, cls)
        )
        return way.apply(*arguments)

    @staticmethod
    def forward(
        ctx: Any,
        run: Callable[[], tuple[Tensor, list[Tensor | None]]],
        note_scale: Callable[[Tensor], None] | None,
        anchor: Tensor,
        *stepped: Tensor,
    ) -> Tensor:
        """Return the loss that `run` gives with the gradients of `stepped`; backward calls `note_scale` first."""
        loss, ctx.kept = run()
        ctx.sharded = stepped[len(ctx.kept) :]
        ctx.note_scale = note_scale
        return loss

    @staticmethod
    @leave_uncompiled
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.kept is None:
            raise RuntimeError(
                "the gradients of this step were handed to .grad by an earlier backward: "
                "call the parallel model again, or scale the loss before its one backward"
            )
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True: the gradients of a parallel model's step were computed in its call, and have no "
                "graph of their own to be differentiated by; leave it out, or compute the second order in forward"
            )
        if any(map(_is_asked_for, ctx.sharded)):
            raise RuntimeError(
                "torch.autograd.grad asks for gradients of parameters that a sharded optimizer steps, and a rank has "
                "only parts of them: ask for those of the parts (optimizer.param_groups), or train by loss.backward()"
            )
        kept, ctx.kept = ctx.kept, None
        if ctx.note_scale is not None:
            ctx.note_scale(scale)
        # The plain loss.backward() needs no pass over the gradients; on a GPU looking would wait for the step.
        if not (scale.is_cpu and scale.item() == 1):
            kept = [g if g is None else g.mul_(scale) for g in kept]
        return None, None, None, *kept, *[None for _ in ctx.sharded]


def _is_asked_for(parameter: Tensor) -> bool:
    """Return whether the torch.autograd.grad that runs now is to return the gradient of this `parameter`."""
    try:
        torch._C._will_engine_execute_node(get_gradient_edge(parameter).node)
    except RuntimeError:  # torch does not answer for tensors asked for, whose nodes are not run
        return True
    return False
