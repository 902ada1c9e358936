"""The call of a parallel model as one node of autograd's graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from autoptd.runtime.uncompiled import leave_uncompiled


class Step(torch.autograd.Function):
    """The whole step as one node: its forward runs the schedule, its backward hands the kept gradients on."""

    @staticmethod
    def forward(
        ctx: Any,
        parallel: Any,
        shape: int,
        batch: Mapping[str, Tensor],
        keys: tuple[str | int, ...],
        anchor: Tensor,
        *stepped: Tensor,
    ) -> Tensor:
        with parallel._connection.position.call(training=True, shape=shape):
            loss: Tensor = parallel._run(shape, batch, gradients=True)
        ctx.kept = parallel._shape.sums.take(keys)
        alone = parallel._manifest.mesh.size == 1
        ctx.steps = None if alone else parallel._steps
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
        kept, ctx.kept = ctx.kept, None
        if ctx.steps is not None:
            ctx.steps.scale(scale)
        # The plain loss.backward() needs no pass over the gradients; on a GPU looking would wait for the step.
        if not (scale.is_cpu and scale.item() == 1):
            kept = [g if g is None else g.mul_(scale) for g in kept]
        return None, None, None, None, None, *kept
