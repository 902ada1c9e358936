"""The module that capture exports: the model with its loss, a function of positional tensors."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

import torch
import torch.fx.traceback
from torch import Tensor, fx, nn

from autoptd.capture.autocast_state import NoGradRegions
from autoptd.capture.eval_mode import Calls
from autoptd.capture.example_inputs import Examples
from autoptd.capture.known_values import KnownValues
from autoptd.capture.side_effects import judge_left, refuse_side_effects
from autoptd.runtime.program.manifest import Output


class Result:
    """The rest of a call's results, besides the loss; an object, since torch.export undoes plain attributes."""

    def __init__(self) -> None:
        self.output = Output("tensor")
        self.assigned: dict[str, Tensor] = {}  # the tensors that a traced forward replaced, by place
        self.varying: list[str] = []  # the places where it leaves what differs from batch to batch
        self.calls = Calls()  # that the forward made


class Objective(nn.Module):
    """A module that calls `model` with the inputs of `examples` and returns the scalar loss; `result` is the rest.

    `buffers` are those that a trace may read, as `KnownValues` takes them.
    """

    def __init__(
        self,
        model: nn.Module,
        examples: Examples,
        loss_fn: Callable[..., Tensor] | None,
        buffers: Mapping[str, Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.captured = model
        self.names = [i.name for i in examples.inputs]
        self.constants = dict(examples.constants)
        self.loss_fn = loss_fn
        self.targets = frozenset(examples.targets)
        self.result = Result()
        self.known = KnownValues(self, buffers or {})

    def forward(self, *values: Tensor) -> Tensor:
        try:
            return self._trace(*values) if torch.compiler.is_exporting() else self.find_loss(*values)
        except RuntimeError as error:
            if "data-dependent" in str(error).lower():
                raise DataDependentError from error
            raise

    def _trace(self, *values: Tensor) -> Tensor:
        """Return the loss; note what forward calls and leaves, and refuse what no program can repeat."""
        self.result.calls, left = Calls(), dict[str, Any]()
        effects = refuse_side_effects(self, self.result.assigned, left)
        try:
            with effects, NoGradRegions(), self.known, self.result.calls:
                loss = self.find_loss(*values)
        except LossError as error:
            kept = [place for place, value in left.items() if _is_loss(value) and value.requires_grad]
            if not kept:
                raise
            raise LossError(f"{error}. Forward leaves a scalar in {kept[0]}: return that") from error
        if not loss.requires_grad and any(p.requires_grad for p in self.captured.parameters()):
            raise LossError(
                "the loss has no gradient, and the plain model's loss.backward() raises: forward runs under "
                "torch.no_grad or inference_mode, or detaches what it computes; take that out of forward"
            )
        self.result.varying = judge_left(loss, left, self.known.varies)
        return loss

    def find_loss(self, *values: Tensor) -> Tensor:
        """Return the loss as `forward` does, without what only a trace asks for."""
        given = {**self.constants, **dict(zip(self.names, values, strict=True))}
        result = _call(self.captured, {k: v for k, v in given.items() if k not in self.targets})
        if self.loss_fn is not None:
            loss = self.loss_fn(result, **{k: v for k, v in given.items() if k in self.targets})
            if not _is_loss(loss):
                raise LossError(f"loss_fn returned {describe(loss)}; expected a scalar floating-point tensor")
            return loss
        loss, self.result.output = find_loss(result)
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


class LossError(ValueError):
    """A model or loss_fn that returned no scalar loss."""


def find_loss(result: object) -> tuple[Tensor, Output]:
    """Return the scalar loss in a model's output, and the structure of the output. Raises LossError."""
    if _is_loss(result):
        return result, Output("tensor")
    if isinstance(result, Mapping) or dataclasses.is_dataclass(result):
        items = dict(result) if isinstance(result, Mapping) else vars(result)
        if _is_loss(items.get("loss")):
            kind = "dataclass" if dataclasses.is_dataclass(result) else "dict"
            return items["loss"], Output(kind, "loss", _type_name(result), tuple(items))
    elif isinstance(result, (tuple, list)):
        names = tuple(map(str, range(len(result))))
        for name, item in zip(names, result, strict=True):
            if _is_loss(item):
                return item, Output("tuple", name, _type_name(result), names)
    raise LossError(
        f"the model returned {describe(result)}, which has no scalar loss; return the loss (alone, in a tuple, or "
        "under 'loss'), or pass loss_fn="
    )


def describe(result: object) -> str:
    """Describe a value in a few words: type, shapes, keys."""
    if isinstance(result, Tensor):
        return f"a tensor {list(result.shape)} of {str(result.dtype).removeprefix('torch.')}"
    name = type(result).__name__
    if isinstance(result, Mapping):
        return f"{name} with {', '.join(f'{k}: {describe(v)}' for k, v in result.items())}"
    if isinstance(result, (tuple, list)):
        return f"{name} of {', '.join(describe(v) for v in result)}"
    return f"{name} {result!r}" if isinstance(result, (str, int, float, bool, type(None))) else name


def _type_name(value: object) -> str:
    """Return the name by which every rank finds the class; raise ValueError for one defined in a function."""
    name = type(value).__qualname__
    if "<locals>" in name:
        raise ValueError(
            f"the model returns a {name}, a class defined within a function: define it at the top level of a module, "
            "where every rank can import it, or return a dict"
        )
    return f"{type(value).__module__}:{name}"


def _is_loss(value: object) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.dim() == 0 and torch.is_floating_point(value)
