"""One capture for all tests that trace the same module in the same way: half of what compiling a tiny GPT takes.

A capture is shared where everything that it depends on is equal, and can be seen to be: the classes of all modules and
their attributes, the shapes and dtypes of weights, the bytes of buffers, the examples, the loss function, and torch's
modes. Whatever else a module holds, and whatever warns or raises, is traced anew. `Captures.check` finds a user of a
shared program that changed it.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import types
import warnings
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._pytree import tree_map_only  # private, with no public twin

from autoptd.capture.export import capture
from autoptd.passes.ir.nodes import NodeInfo
from autoptd.passes.ir.program import Program
from autoptd.runtime.program.mesh import Mesh

# `warn_caller` takes the frames of the library for its own, and ours stands between two of them.
__name__ = f"autoptd.{__name__}"

PLAIN = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis), torch.dtype, torch.device, enum.Enum)
FUNCTIONS = (type, types.FunctionType, types.BuiltinFunctionType)
MOST = 200  # captures that are held


class UnknownError(Exception):
    """A module holds something that is not known to be equal in another one."""


class Captures:
    """What `capture` returned, by all that it depends on."""

    def __init__(self) -> None:
        self.enabled = True
        self.hits = 0
        self._programs: OrderedDict[Hashable, tuple[Program, str]] = OrderedDict()

    def capture(self, model: nn.Module, *, mesh: Mesh, loss_fn: Any = None, **given: Any) -> Program:
        """`capture`, or the program of an earlier call with equal arguments, on `mesh` and with `model`'s buffers."""
        try:
            if not self.enabled:
                raise UnknownError
            key = (freeze_modes(), freeze(model), freeze(loss_fn), freeze(tree_map_only(Tensor, freeze_example, given)))
        except (UnknownError, RecursionError):
            return capture(model, mesh=mesh, loss_fn=loss_fn, **given)
        if key in self._programs:
            self.hits += 1
            self._programs.move_to_end(key)
            program, _ = self._programs[key]
            own = {name: program.buffers[name] for name in program.buffers} | {
                name: tensor.detach() for name, tensor in name_buffers(model, loss_fn) if name in program.buffers
            }
            return replace(program, mesh=mesh, buffers=own)
        with count_warnings() as counted:
            program = capture(model, mesh=mesh, loss_fn=loss_fn, **given)
        if not counted:
            self._programs[key] = program, describe(program)
            if len(self._programs) > MOST:
                self._programs.popitem(last=False)
        return program

    def check(self) -> None:
        """AssertionError where a shared program is no longer what was captured."""
        for program, described in self._programs.values():
            assert describe(program) == described, f"a test changed a shared capture: {program.log[0]}"


def describe(program: Program) -> str:
    """Everything that a pass reads of a captured program, as text."""
    (stage,) = program.stages
    lines = [repr(replace(program, stages=())), repr(stage.parameters), str(stage.constants)]
    for node in stage.graph.nodes:
        line = (node.op, node.name, node.target, node.args, node.kwargs, describe_value(node.meta))
        lines.append(repr(line))
    return "\n".join(lines)


def describe_value(value: Any) -> Any:
    """A value of ``node.meta``, with tensors and graphs as text."""
    if isinstance(value, Tensor):
        return value.dtype, value.size(), value.stride()
    if isinstance(value, fx.Graph):
        return str(value)
    if isinstance(value, NodeInfo):
        return describe_value(value._asdict())
    if isinstance(value, Mapping):
        return {key: describe_value(part) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return [describe_value(part) for part in value]
    return value


def freeze(value: Any) -> Hashable:
    """A hashable twin of `value`, equal for what a trace cannot tell apart. UnknownError if there is none."""
    if isinstance(value, PLAIN):
        return type(value), value
    if isinstance(value, FUNCTIONS) and getattr(value, "__closure__", None) is None:
        return value
    if isinstance(value, nn.Module):
        return freeze_module(value)
    if isinstance(value, Mapping):
        return type(value), tuple((freeze(key), freeze(part)) for key, part in value.items())
    if isinstance(value, tuple | list):
        return type(value), tuple(map(freeze, value))
    if isinstance(value, set | frozenset):
        return type(value), frozenset(map(freeze, value))
    if isinstance(value, functools.partial):
        return functools.partial, freeze(value.func), freeze(value.args), freeze(value.keywords)
    if dataclasses.is_dataclass(value) or type(value).__name__.endswith("Config"):
        return type(value), freeze(vars(value))
    raise UnknownError


def freeze_module(root: nn.Module) -> Hashable:
    """All modules below `root` with their classes and attributes, and the tensors, tied ones by their first name."""
    homes: dict[int, str] = {}
    found: list[Hashable] = []
    for path, module in root.named_modules(remove_duplicate=False):
        if homes.setdefault(id(module), path) != path:
            found.append((path, homes[id(module)]))
            continue
        attributes = {n: v for n, v in vars(module).items() if n not in ("_parameters", "_buffers", "_modules")}
        found.append((path, type(module), type(module).forward, freeze(tuple(module._modules)), freeze(attributes)))
        for name, parameter in module._parameters.items():
            found.append((name, parameter is None or freeze_tensor(parameter, homes, f"{path}.{name}")))
        for name, buffer in module._buffers.items():
            found.append((name, buffer is None or (freeze_tensor(buffer, homes, f"{path}.{name}"), hash_bytes(buffer))))
    return tuple(found)


def freeze_example(tensor: Tensor) -> Hashable:
    return tensor.dtype, tensor.size(), tensor.stride(), tensor.device


def freeze_tensor(tensor: Tensor, homes: dict[int, str], name: str) -> Hashable:
    home = homes.setdefault(id(tensor), name)
    return (type(tensor), home, tensor.dtype, tensor.size(), tensor.stride(), tensor.device, tensor.requires_grad)


def hash_bytes(tensor: Tensor) -> str | None:
    if tensor.is_meta:
        return None
    return hashlib.sha256(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def freeze_modes() -> Hashable:
    """What torch does otherwise in some modes; UnknownError in one that sees every function."""
    if _get_current_function_mode_stack():
        raise UnknownError
    casts = tuple(
        (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cpu", "cuda")
    )
    return casts, torch.get_default_dtype(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()


def name_buffers(model: nn.Module, loss_fn: object) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_buffers()
    if isinstance(loss_fn, nn.Module):
        yield from loss_fn.named_buffers("loss_fn")


@contextmanager
def count_warnings() -> Iterator[list[str]]:
    """The texts that the library warned of."""
    texts: list[str] = []
    warn = warnings.warn_explicit

    def note(message: Any, *args: Any, **kwargs: Any) -> None:
        texts.append(str(message))
        warn(message, *args, **kwargs)

    warnings.warn_explicit = note
    try:
        yield texts
    finally:
        warnings.warn_explicit = warn


SHARED = Captures()
shared_capture = SHARED.capture
