"""The memory of one microbatch in flight on a stage, the same in every step, and the calls that work on it."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from autoptd.runtime.optimizer.gradient_buckets import BucketWatch
from autoptd.runtime.program.manifest import StageInterface

Weights = Mapping[str, Tensor]


class Kept(NamedTuple):
    """The received leaves and the edges of the roots of a microbatch, for its backward."""

    leaves: Sequence[Tensor] = ()
    edges: Sequence[GradientEdge | None] = ()

    def differentiate(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Add the weights' gradients to their ``.grad``, and return the leaves', from those of the roots."""
        edges = [edge for edge in self.edges if edge is not None]
        seeds = [seed for edge, seed in zip(self.edges, gradients, strict=True) if edge is not None]
        if edges:
            torch.autograd.backward(edges, seeds)
        return [torch.zeros_like(x) if x.grad is None else x.grad for x in self.leaves]


@dataclass(frozen=True)
class StageCall:
    """The function of a stage with its rank, ``function(weights, *received, *inputs)``, and what these are."""

    function: partial[Any]
    interface: StageInterface

    def run(self, weights: Weights, values: Sequence[Tensor], trains: bool) -> tuple[list[Tensor], Kept]:
        """Return the outputs, and what the backward needs where it `trains`."""
        given = list(values)
        leaves = [i for i, b in enumerate(self.interface.receives) if b.requires_grad and trains]
        for index in leaves:
            given[index] = given[index].detach().requires_grad_()
        result = self.function(weights, *given)
        outputs = result if isinstance(result, tuple) else (result,)
        differentiable = [boundary.requires_grad for boundary in self.interface.sends] or [True]  # the loss
        if len(outputs) != (expected := len(differentiable) + len(self.interface.outputs)):
            raise ValueError(f"the stage gave {len(outputs)} values; expected {expected}")
        roots = compress(outputs, differentiable) if trains else ()
        # The edge alone keeps the graph: an output that no operator saved is freed once it has been sent.
        edges = [get_gradient_edge(root) if root.requires_grad else None for root in roots]
        return [x.detach() for x in outputs], Kept([given[i] for i in leaves], edges)


class Slot:
    """A place for one microbatch in flight, from its forward to its backward.

    Its inputs, the `moment` of its masks (see runtime/randomness.py) and the `gradients` of its outputs have memory of
    their own, which a CUDA graph reads. Values that leave it are in memory that the slot does not use again. The slot
    of the stage's last backward has a `watch` over the gradients, where replicas wait for them.
    """

    def __init__(self, call: StageCall, device: torch.device) -> None:
        self.call = call
        self.moment = torch.zeros(4, dtype=torch.int64, device=device)
        self.values: list[Tensor] = []
        self.gradients: list[Tensor] = []
        self.watch: BucketWatch | None = None
        self._kept = Kept()

    def forward(self, weights: Weights, values: list[Tensor], moment: Tensor, trains: bool) -> list[Tensor]:
        """Run the stage on `values`, received and from the batch; keep what `backward` needs where it `trains`."""
        self.moment.copy_(moment)
        self.values = _take_in(self.values, values)
        return [_take_out(x, self.values) for x in self._run(weights, trains)]

    def backward(self, gradients: Sequence[Tensor], last: bool = False) -> list[Tensor]:
        """Differentiate into the ``.grad`` of the weights; return the gradients of the leaves.

        The `last` backward of the stage has its buckets of gradients posted by the `watch`, each as it is complete.
        """
        self.gradients = _take_in(self.gradients, gradients)
        return [_take_out(x, self.gradients) for x in self._differentiate(self.watch if last else None)]

    def _run(self, weights: Weights, trains: bool) -> list[Tensor]:
        outputs, self._kept = self.call.run(weights, self.values, trains)
        return outputs

    def _differentiate(self, watch: BucketWatch | None) -> list[Tensor]:
        kept, self._kept = self._kept, Kept()
        with nullcontext() if watch is None else watch.report(watch.post):
            return kept.differentiate(self.gradients)

    def clear(self) -> None:
        """Forget the microbatch."""
        self._kept = Kept()


def _take_in(own: list[Tensor], values: Sequence[Tensor]) -> list[Tensor]:
    """Copy `values` into the slot's `own` memory, which the first ones make, and return it."""
    own = own or [torch.empty_like(value) for value in values]
    for mine, value in zip(own, values, strict=True):
        mine.copy_(value)
    return own


def _take_out(value: Tensor, own: Sequence[Tensor]) -> Tensor:
    """Return `value` in memory that is not the slot's `own`."""
    memory = {x.untyped_storage().data_ptr() for x in own}
    return value.clone() if value.untyped_storage().data_ptr() in memory else value
