"""The module that capture exports: the model with its loss, a function of positional tensors."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
import torch.fx.traceback
from torch import Tensor, fx, nn

from autoptd.capture.autocast_state import NoGradRegions
from autoptd.capture.eval_mode import Calls
from autoptd.capture.example_inputs import Examples
from autoptd.capture.expert_loops import KnownExperts
from autoptd.capture.flex_attention import write_flex_attention
from autoptd.capture.results import LossFunction, Outputs, find_loss, find_outputs
from autoptd.capture.side_effects import judge_left, refuse_side_effects
from autoptd.capture.source_lines import CaptureError
from autoptd.capture.traced_device import seem_on
from autoptd.runtime.program.manifest import Output


class Result:
    """The rest of a call's results, besides the loss; an object, since torch.export undoes plain attributes."""

    def __init__(self) -> None:
        self.output = Output("tensor")
        self.outputs: dict[tuple[str, ...], Tensor] = {}  # the tensors asked for, by their paths
        self.assigned: dict[str, Tensor] = {}  # the tensors that a traced forward replaced, by place
        self.varying: list[str] = []  # the places where it leaves what differs from batch to batch
        self.calls = Calls()  # that the forward made


class Objective(nn.Module):
    """A module that calls `model` with the inputs of `examples` and returns the scalar loss; `result` is the rest.

    A trace may read values of `known`, returns the loss and the `wanted` outputs, and sees tensors on the `device`.
    """

    def __init__(
        self, model: nn.Module, examples: Examples, loss_fn: LossFunction, wanted: Outputs, device: str
    ) -> None:
        super().__init__()
        self.captured = model
        self.inputs = examples.inputs
        self.constants = dict(examples.constants)
        self.loss_fn, self.wanted, self.device = loss_fn, wanted, device
        self.targets = frozenset(examples.targets)
        self.result = Result()
        self.known = KnownExperts(self)

    def forward(self, *values: Tensor) -> Tensor | tuple[Tensor, ...]:
        try:
            if not torch.compiler.is_exporting():
                return self.find_loss(*values)
            loss = self._trace(*values)
            return (loss, *self.result.outputs.values()) if self.result.outputs else loss
        except RuntimeError as error:
            if "data-dependent" in str(error).lower():
                raise DataDependentError from error
            raise

    def _trace(self, *values: Tensor) -> Tensor:
        """Return the loss; note what forward calls and leaves, and refuse what no program can repeat."""
        self.result.calls, left = Calls(), dict[str, Any]()
        effects = refuse_side_effects(self, self.result.assigned, left)
        with effects, NoGradRegions(), self.known, self.result.calls:
            loss = self.find_loss(*values)
        for loop in self.known.loops:
            loop.check()
        if not loss.requires_grad and any(p.requires_grad for p in self.captured.parameters()):
            raise CaptureError(
                "the loss has no gradient, and the plain model's loss.backward() raises: forward runs under "
                "torch.no_grad or inference_mode, or detaches what it computes; take that out of forward"
            )
        self.result.varying = judge_left((loss, *self.result.outputs.values()), left, self.known.varies)
        return loss

    def find_loss(self, *values: Tensor) -> Tensor:
        """Return the loss as `forward` does, without what only a trace asks for."""
        given = {**self.constants, **dict(zip((i.name for i in self.inputs), values, strict=True))}
        targets = {name: given.pop(name) for name in [*given] if name in self.targets}
        with write_flex_attention(), seem_on(self.device):
            result = _call(self.captured, given)
            loss, output = find_loss(result, self.loss_fn, targets, self.wanted)
        self.result.output, self.result.outputs = output, find_outputs(result, output, self.wanted)
        return loss


def _call(model: nn.Module, given: Mapping[str, Any]) -> object:
    if not isinstance(model, fx.GraphModule):
        return model(**given)
    # Node by node, so that each keeps the module path and the line that the user's graph knows.
    bound = inspect.signature(model.forward).bind(**given)
    bound.apply_defaults()
    with fx.traceback.preserve_node_meta():
        return fx.Interpreter(model).run(*bound.args)


class DataDependentError(Exception):
    """Control flow that depends on a tensor's values; the cause has the place, and prints the whole graph so far."""
