"""Run a function of a program text on traced values: each call becomes a node, with its meta value."""

import difflib
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from traceback import walk_stack
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload, OpOverloadPacket
from torch.fx.proxy import GraphAppendingTracer

from autoptd.passes.ir.nodes import NodeInfo, Propagation, Role, add_node, describe, info
from autoptd.runtime.comm.rank import Rank
from autoptd.runtime.kernels.autograd_function import AutogradFunction, autograd_function
from autoptd.runtime.program.program_text import line_of
from autoptd.runtime.recomputation import recompute
from autoptd.text.call_arguments import resolve_overload, spread_call

META = torch.device("meta")
# What is known of a traced tensor; its elements are not.
_KNOWN = frozenset({"shape", "dtype", "device", "ndim", "size", "dim", "numel"})
Targets = Mapping[int, tuple[str, ...]]


class RecordingError(ValueError):
    """A program text that cannot be read back; names file and line."""


class TracedValue(fx.Proxy):
    """A value of a traced program: its shape is known, its elements are not."""

    @property
    def device(self) -> torch.device:
        return META

    def __getattr__(self, name: str) -> Any:
        if name not in _KNOWN:
            return super().__getattr__(name)
        return getattr(_value_of(self.node), name)

    def __iter__(self) -> Iterator[fx.Proxy]:
        return (self.__getitem__(index) for index in range(len(self)))

    def __len__(self) -> int:
        return len(_value_of(self.node))

    def __bool__(self) -> bool:
        raise ValueError(f"the value of {self.node.name} is read, but a program may depend on shapes only")


class Recorder(GraphAppendingTracer):
    """A recorder of one function of the text `filename` as `graph`.

    `parameters` are meta tensors for the contents of ``p``; `targets` the names that each line assigns to its nodes.
    """

    def __init__(self, path: str, targets: Targets, parameters: Mapping[str, Tensor], propagation: Propagation) -> None:
        super().__init__(fx.Graph())
        self.filename = path
        self.parameters = TracedParameters(self, parameters)
        self._propagation = propagation
        self._targets = targets
        self._groups: Counter[str] = Counter()
        self._group: str | None = None

    def record(self, function: Callable[..., Any], *args: object) -> fx.Graph:
        """Run `function` on traced values and return its graph. Raises RecordingError if it does not run."""
        scope = function.__globals__
        scope.update({name: _Recorded.wrap(self, value) for name, value in scope.items()})
        try:
            result = self.create_arg(function(*args))
        except RecordingError:
            raise
        except Exception as error:
            line = line_of(error, self.filename)
            raise RecordingError(f"{self.filename}:{line}: in {function.__name__}: {error}") from error
        describe(self.graph.output(result), fx.map_arg(result, _value_of), NodeInfo())
        return self.graph

    def placeholder(self, name: str, target: str, role: Role, value: Rank | Tensor) -> TracedValue:
        """Add an argument of the function: `name` in its signature, `target` in the manifest."""
        node = self.graph.create_node("placeholder", target, (), {}, name)
        describe(node, value, NodeInfo(role=role))
        return self.proxy(node)

    def run_group(self, rank: object, function: Callable[..., Any], *values: object) -> Any:
        """Run the function of ``recompute(rank, function, *values)``, its calls marked with its name.

        A function inside another is recomputed with it.
        """
        if getattr(rank, "node", None) is None or info(rank.node).role != "rank":  # type: ignore[attr-defined]
            raise ValueError(f"recompute begins with {rank}; expected recompute(rank, function, *values)")
        if self._group is not None:
            return function(rank, *values)
        name = function.__name__
        count = self._groups[name]
        self._groups[name] += 1
        self._group = f"{name}_again{count}" if count else name
        try:
            return function(rank, *values)
        finally:
            self._group = None

    def proxy(self, node: fx.Node) -> TracedValue:
        return TracedValue(node, self)

    def create_node(
        self, kind: str, target: Any, args: Any, kwargs: Any, name: str | None = None, type_expr: Any = None
    ) -> fx.Node:
        frames = walk_stack(sys._getframe(1))
        line = next((line for frame, line in frames if frame.f_code.co_filename == self.filename), 0)
        if kind == "call_method":  # an edit's x.view(...)
            kind, target = "call_function", getattr(Tensor, target)
        if kind == "call_function":
            name = self._assigned_name(line, args) or name
        try:
            if isinstance(target, OpOverloadPacket):
                target = resolve_overload(target, *fx.map_arg((args, kwargs), _value_of))
            schema = target._schema.arguments if isinstance(target, OpOverload) else ()
            if "device" not in kwargs and any(a.name == "device" and a.kwarg_only for a in schema):
                kwargs = {**kwargs, "device": META}  # a text leaves the device to the default
            if kind == "call_function":
                args, kwargs = spread_call(target, args, kwargs)
            node = add_node(self.graph, kind, target, args, kwargs, name)
            val = self._propagation.run(node) if kind != "get_attr" else self.parameters.tensors[target]
            group = self._group if kind == "call_function" else None
            describe(node, val, NodeInfo(line=f"{self.filename}:{line}", recompute=group))
        except Exception as error:  # any error of any operator
            called = target.__name__ if inspect.isroutine(target) else target
            raise RecordingError(f"{self.filename}:{line}: {called} failed: {error}") from error
        return node

    def _assigned_name(self, line: int, args: tuple[Any, ...]) -> str | None:
        names = self._targets.get(line, ())
        if len(names) == 1:
            return names[0]
        if len(names) > 1 and len(args) == 2 and isinstance(args[1], int) and 0 <= args[1] < len(names):
            return names[args[1]]
        return None


class TracedParameters(dict[str, fx.Proxy]):
    """The ``p`` of a function that is being traced."""

    def __init__(self, recorder: Recorder, tensors: Mapping[str, Tensor]) -> None:
        self.tensors, self._recorder = tensors, recorder

    def __missing__(self, name: str) -> fx.Proxy:
        if name not in self.tensors:
            near = difflib.get_close_matches(str(name), self.tensors, n=1, cutoff=0.0)
            hint = f'did you mean p["{near[0]}"]?' if near else "it has none"
            raise ValueError(f'p["{name}"] is not a parameter, buffer or constant of this function; {hint}')
        self[name] = made = self._recorder.create_proxy("get_attr", name, (), {})
        return made


class _Recorded:
    """A module, operator or function of torch or the runtime, as a traced function sees it."""

    def __init__(self, recorder: Recorder, value: Any) -> None:
        self._recorder = recorder
        self._value = value

    @classmethod
    def wrap(cls, recorder: Recorder, value: Any) -> Any:
        """Return the recorded form of `value` if calling it or its members belongs in the graph, else `value`."""
        if isinstance(value, _Recorded):  # wrapped before, for another function of the text
            value = value._value
        if not isinstance(value, (ModuleType, OpOverload, OpOverloadPacket)) and not inspect.isroutine(value):
            return value
        home = str(getattr(value, "__name__" if isinstance(value, ModuleType) else "__module__", ""))
        return cls(recorder, value) if home.partition(".")[0] in ("torch", "autoptd") else value

    def __getattr__(self, name: str) -> Any:
        return self.wrap(self._recorder, getattr(self._value, name))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._value is recompute:
            return self._recorder.run_group(*args, **kwargs)
        target = self._value
        if target is autograd_function:
            rank, path, *given = args
            target, args = AutogradFunction(path), (rank, *given)
        return self._recorder.create_proxy("call_function", target, args, kwargs)


def _value_of(node: fx.Node) -> Any:
    return node.meta["val"]
