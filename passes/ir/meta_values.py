"""Shapes, by running operators on the meta device: each distinct call once."""

from __future__ import annotations

from functools import cache
from inspect import isfunction, signature
from typing import Any

import torch
from torch import fx

from autoptd.passes.ir.node_info import info
from autoptd.runtime.comm.rank import Rank
from autoptd.runtime.program.mesh import Mesh

Key = tuple[Any, ...]


@cache
def _operator_place(target: Any) -> int | None:
    """Return the position of the operator's number among the arguments of a kernel; None if it has none."""
    names = list(signature(target).parameters) if isfunction(target) else []
    return names.index("operator") if "operator" in names else None


def shaping_arguments(node: fx.Node) -> tuple[Any, ...]:
    """Return the arguments of a call without the number of a dropout, which says nothing about shapes or costs."""
    place = _operator_place(node.target)
    return node.args if place is None else (*node.args[:place], *node.args[place + 1 :])


class Propagation:
    """Runs nodes on their arguments' ``meta["val"]``; equal calls of repeated layers share one result."""

    def __init__(self, mesh: Mesh) -> None:
        self.rank = Rank.local(mesh)
        self.known: dict[Key, Any] = {}

    def run(self, node: fx.Node) -> Any:
        """Return the meta value of a ``call_function`` node, from its arguments' values."""
        key = node.target, self._key((shaping_arguments(node), tuple(sorted(node.kwargs.items()))))
        if key not in self.known:
            args, kwargs = fx.map_arg((node.args, node.kwargs), self._value)
            with torch.no_grad():
                self.known[key] = node.target(*args, **kwargs)  # type: ignore[operator]
        return self.known[key]

    def _value(self, node: fx.Node) -> Any:
        return self.rank if info(node).role == "rank" else node.meta["val"]

    def _key(self, value: Any) -> Key:
        if isinstance(value, fx.Node):
            found = self._value(value)
            return ("rank",) if found is self.rank else self._key(found)
        if isinstance(value, torch.Tensor):
            return (tuple(value.shape), value.stride(), value.dtype)
        if isinstance(value, (tuple, list)):
            return tuple(self._key(v) for v in value)
        return (type(value), value if value.__hash__ else str(value))
