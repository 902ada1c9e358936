"""The values of a graph in the sequence-first layout, which layout rules read and write."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import fx

from autoptd.passes.ir.node_info import describe, info
from autoptd.passes.ir.nodes import called
from autoptd.passes.operators.dim_order import DimOrder
from autoptd.runtime import aten

Found = DimOrder | tuple[DimOrder, ...]  # one for each of several results
Written = tuple[fx.Node, Any] | None  # the new node and its order, or the orders of its results


class LayoutWriter:
    """The rewrite of one graph: for each of its nodes, the value that stands for it and the order of that value.

    `find_value` gives a new node's meta tensor, with the strides that real kernels give it. `undone` counts the
    operators whose arguments got the user's order back, `exchanged` the activations that are held transposed.
    """

    def __init__(
        self, source: fx.Graph, find_value: Callable[[fx.Node], Any], tokens: Mapping[str, Sequence[int]]
    ) -> None:
        self.source = source
        self.tokens = tokens
        self.graph = fx.Graph()
        self.find_value = find_value
        self.orders: dict[fx.Node, Found] = {}
        self.undone: Counter[str] = Counter()
        self.exchanged = 0
        self.current: fx.Node
        self.values: dict[fx.Node, fx.Node] = {}
        self.made: dict[tuple[Any, ...], fx.Node] = {}

    # What rules read

    def order(self, node: Any) -> DimOrder:
        found = self.orders[node]
        assert isinstance(found, DimOrder)
        return found

    def is_transposed(self, node: Any) -> bool:
        found = self.orders.get(node)
        return isinstance(found, DimOrder) and found.transposed

    def value(self, node: Any) -> Any:
        """Return the new graph's node for a value; a number, or None, as it is."""
        if not isinstance(node, fx.Node):
            return node
        if node not in self.values:  # token numbers, when they are first read
            self.values[node] = self.add(
                aten.transpose.int, (self.made["user", node], 0, 1), f"{node.name}_sb"
            )
        return self.values[node]

    def restore(self, node: Any) -> Any:
        """Return the new graph's node for a value, in the user's order."""
        if not isinstance(node, fx.Node) or not self.is_transposed(node):
            return self.value(node)
        key = ("user", node)
        if key not in self.made:
            order, name = self.order(node), f"{node.name}_bs"
            (at, merged), (batch, sequence) = order.pair or (0, False), order.rows
            rows = (sequence, batch) if merged else None
            self.made[key] = self._exchange(self.value(node), order.arrange(order.shape), at, rows, name)
        return self.made[key]

    def fit(self, node: Any, out: DimOrder) -> Any:
        """Return the argument of an operator whose result has the order `out`, broadcast against it."""
        if not isinstance(node, fx.Node) or node not in self.orders or not out.transposed or out.pair is None:
            return self.restore(node)
        order, (at, merged) = self.order(node), out.pair
        at -= len(out.dims) - len(order.dims)
        if order.transposed and order.pair == (at, merged) and (not merged or order.rows == out.rows):
            return self.value(node)
        shape = order.shape
        end = at if merged else at + 1
        if end < 0 or all(size == 1 for size in shape[max(at, 0) : end + 1]):
            return self.restore(node)
        key = ("fit", node, at, out.rows if merged else None)
        if key not in self.made:
            source, name = self.restore(node), f"{node.name}_sb"
            if at < 0:
                self.made[key] = self.add(aten.unsqueeze.default, (source, 1), name)
            else:
                self.made[key] = self._exchange(source, shape, at, out.rows if merged else None, name)
        return self.made[key]

    # What rules write

    def write(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None, target: Any = None
    ) -> fx.Node:
        """Write the operator that is being rewritten, on new arguments."""
        node = self.current
        new = self.graph.create_node(
            "call_function", target or node.target, args, dict(kwargs or {}), name=node.name
        )
        new.meta = dict(node.meta)
        new.meta["val"] = self.find_value(new)
        return new

    def undo(self, node: fx.Node, args: tuple[Any, ...], target: Any = None) -> fx.Node:
        """Write the operator `node` on arguments in the user's order; for an unfamiliar operator, in memory too."""
        name = called(node)
        if any(map(self.is_transposed, node.all_input_nodes)):
            self.undone[name] += 1
        read = self.restore if name.startswith(("aten.", "kernels.", "_operator.")) else self._restore_memory
        return self.write(fx.map_arg(args, read), fx.map_arg(node.kwargs, read), target)

    def _restore_memory(self, node: fx.Node) -> fx.Node:
        value, val = self.restore(node), node.meta["val"]
        if isinstance(val, torch.Tensor) and val.is_contiguous() and not value.meta["val"].is_contiguous():
            made: fx.Node = self.add(aten.contiguous.default, (value,), f"{node.name}_dense")
            return made
        return value  # type: ignore[no-any-return]

    def add(self, target: Any, args: tuple[Any, ...], name: str) -> fx.Node:
        """Write a further operator before or after the one that is being rewritten."""
        new = self.graph.create_node("call_function", target, args, {}, name=name)
        describe(new, None, info(self.current).place)
        new.meta["val"] = self.find_value(new)
        return new

    def permute(self, value: fx.Node, order: Sequence[int], name: str) -> fx.Node:
        """Permute the dimensions of `value`; return it as it is if that changes nothing."""
        changed = [d for d, source in enumerate(order) if d != source]
        if not changed:
            return value
        if len(changed) == 2:
            return self.add(aten.transpose.int, (value, *changed), name)
        return self.add(aten.permute.default, (value, list(order)), name)

    def _exchange(
        self, value: fx.Node, shape: list[int], at: int, rows: tuple[int, int] | None, name: str
    ) -> fx.Node:
        """`value`, of `shape`, with dimensions `at` and the next exchanged, or the two that `at` merges (`rows`)."""
        if rows is None:
            return self.permute(value, _swapped(len(shape), at), name)
        opened = [*shape[:at], *rows, shape[at] // prod(rows), *shape[at + 1 :]]
        value = self.add(aten.reshape.default, (value, opened), f"{name}_rows")
        value = self.permute(value, _swapped(len(opened), at), f"{name}_swapped")
        return self.add(aten.reshape.default, (value, shape), name)


def _swapped(rank: int, at: int) -> list[int]:
    order = list(range(rank))
    order[at], order[at + 1] = at + 1, at
    return order
