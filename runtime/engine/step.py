"""The call of a parallel model as a node of autograd's graph, and the node that hands gradients to the parameters."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autoptd.runtime.engine.dynamo import leave_uncompiled
from autoptd.runtime.kernels.registration import find_kernels
from autoptd.runtime.optimizer.gradient_sums import Key, Row, read_gradients

Rows = list[Row]
Waiting = list[tuple[int, Rows]]


class Handover:
    """The way of gradients to the parameters: a node of autograd's graph, which all calls have in common.

    So a call costs nothing for each of the `leaves`, which get gradients. Steps are attached to `link`, and leave their
    gradients in `waiting`, with the number of the backward, so that one that breaks off in between leaves them to no
    other. Each calls `note_scale` with the factor of its loss, if any.
    """

    note_scale: Callable[[Tensor], None] | None = None

    def __init__(self, leaves: Mapping[Key, Tensor], device: torch.device) -> None:
        self.waiting: Waiting = []
        # Makes the loss differentiable on a rank without parameters too.
        anchor = torch.zeros((), device=device, requires_grad=True)
        self.link: Tensor = _HandOver.apply(self.waiting, tuple(leaves), anchor, *leaves.values())  # type: ignore[no-untyped-call]


class _HandOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, waiting: Waiting, keys: Sequence[Key], anchor: Tensor, *stepped: Tensor) -> Tensor:
        ctx.waiting, ctx.keys = waiting, keys
        return anchor.clone()

    @staticmethod
    @leave_uncompiled
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the steps of this backward, added up."""
        now = torch._C._current_graph_task_id()
        total, *others = (read_gradients(rows, ctx.keys) for number, rows in ctx.waiting if number == now)
        ctx.waiting.clear()
        for other in others:
            total = [x if y is None else y if x is None else x.add_(y) for x, y in zip(total, other, strict=True)]
        return None, None, None, *total


class Step(torch.autograd.Function):
    """The whole step as one node: its forward runs the schedule, its backward hands the kept gradients on."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[], tuple[Tensor, Rows]], handover: Handover, link: Tensor) -> Tensor:
        """Return the loss that `run` gives with the gradients for the `handover`."""
        loss, ctx.kept = run()
        ctx.handover = handover
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
        if ctx.handover.note_scale is not None:
            ctx.handover.note_scale(scale)
        scale_rows([row for row, _, _ in kept], scale)
        ctx.handover.waiting.append((torch._C._current_graph_task_id(), kept))
        return None, None, scale


def scale_rows(rows: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply `rows` in place by `factor`, of one element; a factor of 1 costs neither a pass nor a wait."""
    if factor.is_cpu and factor.item() == 1:
        return
    for row in rows:
        kernels = find_kernels("elementwise", row, factor)
        if kernels is None:
            row.mul_(factor)
        else:
            kernels.scale_row(row, factor)
