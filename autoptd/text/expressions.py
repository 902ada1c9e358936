"""Write a node as an expression of a rank program: names, operator, arguments."""

import keyword
import math
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload, OpOverloadPacket

from autoptd.passes.ir.names import free_name
from autoptd.passes.ir.nodes import info, operator_name, where
from autoptd.runtime.kernels.autograd_function import AutogradFunction
from autoptd.text.call_arguments import resolve_overload, shorten_call

# Names that a stage function uses itself, besides Python's keywords.
RESERVED = frozenset({"rank", "p", "aten", "collectives", "kernels", "recompute", "torch", "float", "slice"})

_LITERALS = (int, bool, type(None), torch.dtype, torch.layout, torch.memory_format, complex)
_DEVICE_KWARGS = frozenset({"device", "pin_memory", "layout"})
_PLAIN = re.compile(r"[^\"\\\n\r\t]*")


class Names(dict[fx.Node, str]):
    """The names of one function's values: those of the nodes, made legal and distinct.

    `device` is how the function writes a device; None leaves device, layout and pinning out of calls.
    """

    def __init__(self, nodes: Iterable[fx.Node] = (), device: str | None = "rank.device") -> None:
        super().__init__()
        self.device = device
        self._taken: set[str] = set(RESERVED)
        for node in nodes:
            self.add(node)

    def add(self, node: fx.Node) -> None:
        """Give `node` its name: ``p["..."]`` for a parameter, ``rank`` for the rank."""
        if node.op == "get_attr":
            self[node] = f"p[{quote(str(node.target))}]"
        elif node.op == "placeholder" and info(node).role == "rank":
            self[node] = "rank"
        else:
            self[node] = self.take(node.name)

    def take(self, name: str) -> str:
        """Return a name like `name` that is still free."""
        if not name.isidentifier():
            name = "_" + re.sub(r"\W", "_", name)
        if keyword.iskeyword(name):
            name += "_"
        free = free_name(name, self._taken)
        self._taken.add(free)
        return free


def write_call(node: fx.Node, names: Names) -> tuple[str, list[str]]:
    """Return the operator and the arguments of a call, ``("aten.linear", ["x", 'p["w"]'])``.

    Raises ValueError for a node that a rank program cannot hold.
    """
    text = _function(node.target)
    if text is None:
        raise ValueError(
            f"cannot write {node.target!r}, the target of node {node.name} at {where(node)}; expected a "
            "torch operator or a function of autoptd.runtime.kernels or autoptd.runtime.collectives"
        )
    args, kwargs = shorten_call(node.target, node.args, node.kwargs)
    # The rank decides on which device a factory makes its tensor.
    off = (None, False, torch.strided)
    left = {name for name in _DEVICE_KWARGS if names.device is None or kwargs.get(name) in off}
    options = {name: value for name, value in kwargs.items() if name not in left}
    if isinstance(node.target, OpOverload) and not _packet_suffices(node.target, args, options):
        text = f"{text}.{node.target._overloadname}"
    if isinstance(node.target, AutogradFunction):
        args = (args[0], node.target.path, *args[1:])
    texts = [write_value(arg, names) for arg in args]
    texts += [f"{name}={write_value(value, names)}" for name, value in options.items()]
    return text, texts


def is_index(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is operator.getitem


def write_value(value: Any, names: Names) -> str:
    """Write an argument as Python source."""
    kind = type(value)
    if kind is fx.Node:
        return names[value]
    if kind in _LITERALS:
        return repr(value)
    if kind is float:
        return repr(value) if math.isfinite(value) else f'float("{value}")'
    if kind is str:
        return quote(value)
    if isinstance(value, (list, torch.Size)):
        return f"[{', '.join(write_value(item, names) for item in value)}]"
    if isinstance(value, tuple):
        inner = ", ".join(write_value(item, names) for item in value)
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if kind is torch.device:
        return names.device or f"torch.device({quote(str(value))})"
    raise ValueError(f"cannot write {value!r} of type {kind.__name__} as an argument")


def quote(text: str) -> str:
    """Write a string literal, in double quotes where nothing needs an escape."""
    return f'"{text}"' if _PLAIN.fullmatch(text) and text.isprintable() else repr(text)


@cache
def _function(target: Any) -> str | None:
    """Write ``aten.linear`` and the like, without the overload; None if a program cannot name it."""
    if isinstance(target, OpOverload | OpOverloadPacket):
        name = operator_name(target)
        return name if name.startswith("aten.") else f"torch.ops.{name}"
    if isinstance(target, AutogradFunction):
        return "kernels.autograd_function"
    room = re.match(r"autoptd\.runtime\.(kernels|collectives)\b", getattr(target, "__module__", None) or "")
    return f"{room[1]}.{target.__name__}" if room else None


def _packet_suffices(overload: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether ``aten.add(...)`` means this very overload for these arguments."""
    packet = overload.overloadpacket
    if len(packet.overloads()) == 1:
        return True
    values, options = fx.map_arg((tuple(args), dict(kwargs)), lambda n: n.meta.get("val"))
    try:
        return resolve_overload(packet, values, options) is overload
    except RuntimeError:  # none fits what is known of the arguments: be explicit
        return False
