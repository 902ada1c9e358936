"""The sequence-first layout: the orders of values, and the rewrite of a graph that layout rules read and write.

The order of a value says where batch and sequence are, by its axes, and whether they changed places. A value in which
the sequence follows right behind the batch, [.., b, s, ..] or merged [.., b * s, ..], may be *transposed*: the new
graph holds it as [.., s, b, ..] or [.., s * b, ..]. The new graph holds all other values as the user wrote them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from math import prod
from typing import Any

import torch
from torch import fx

from autoptd.passes.ir.nodes import add_node, called, describe, info, place_of
from autoptd.passes.operators import axes as ax
from autoptd.passes.operators.axis_map import AxisMap
from autoptd.runtime import aten


@dataclass(frozen=True)
class DimOrder:
    """A value's shape as the user has it; `transposed`: the new graph has batch and sequence exchanged.

    `pair`: the batch's dimension, from the last, before the sequence's, and whether they are merged; `rows`: sizes.
    """

    shape: tuple[int, ...]
    pair: tuple[int, bool] | None = None
    rows: tuple[int, int] = (1, 1)
    transposed: bool = False

    @property
    def permutation(self) -> list[int]:
        """For each dimension of the new graph's value, which of the user's it is."""
        if not self.transposed or self.pair is None or self.pair[1]:
            return list(range(len(self.shape)))
        return _swapped(len(self.shape), self.pair[0])

    def place(self, dim: int) -> int:
        """Return the position of the user's dimension `dim` in the new graph."""
        return self.permutation.index(dim % len(self.shape))

    @property
    def arranged(self) -> list[int]:
        """The shape in the new graph."""
        return [self.shape[dim] for dim in self.permutation]

    def holds(self, dim: int) -> bool:
        """Return whether the user's dimension `dim` is the batch or the sequence of a transposed value (or both)."""
        if not self.transposed or self.pair is None:
            return False
        rank, (at, merged) = len(self.shape), self.pair
        return dim % rank - rank in ((at,) if merged else (at, at + 1))

    @property
    def merged(self) -> bool:
        """Return whether batch and sequence are one dimension of a transposed value."""
        return self.transposed and self.pair is not None and self.pair[1]


Written = tuple[fx.Node, bool] | None  # the new node, and whether its results are transposed


@dataclass(eq=False)
class LayoutWriter:
    """The rewrite of one graph: for each of its nodes, the value that stands for it and whether that is transposed.

    `find_value` gives a new node's meta tensor, with the strides that real kernels give it. `tokens` are
    inputs [b, s], and `undone` counts the operators whose arguments got the user's order back.
    """

    find_value: Callable[[fx.Node], Any]
    axis_map: AxisMap
    tokens: Sequence[fx.Node]
    graph: fx.Graph = field(default_factory=fx.Graph)
    transposed: set[fx.Node] = field(default_factory=set)
    undone: Counter[str] = field(default_factory=Counter)
    current: fx.Node = field(init=False)
    values: dict[fx.Node, fx.Node] = field(default_factory=dict)
    made: dict[tuple[Any, ...], fx.Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        own = [self.axis_map.of(node) for node in self.tokens]
        leaves = ({leaf for axes in own for leaf in ax.leaves(axes[dim])} for dim in (0, 1))
        self._named = dict(zip("bs", leaves, strict=True))
        self._orders: dict[tuple[fx.Node, bool], list[DimOrder]] = {}
        self.transposed.update(node for node in self.tokens if self.order(node).pair)

    # What rules read

    def order(self, node: Any) -> DimOrder:
        """Return the order of a value; of the one that is being written, the user's order."""
        (order,) = self.orders(node)
        return order

    def orders(self, node: fx.Node) -> list[DimOrder]:
        """Return the order of each of a node's results."""
        key = node, node in self.transposed
        if key not in self._orders:
            self._orders[key] = [self._order(axes, key[1]) for axes in self.axis_map.all_of(node)]
        return self._orders[key]

    def _order(self, axes: ax.Axes, transposed: bool) -> DimOrder:
        shape = tuple(axis.size for axis in axes)
        factors = [ax.factors(axis) or [ax.find(axis)] for axis in axes]
        runs = [[(name, prod(f.size for f in run)) for name, run in groupby(own, self._name)] for own in factors]
        words = ["".join(name for name, _ in run) for run in runs]
        at = next((at for at, word in enumerate(words) if word[0] == "b"), len(words))
        merged = any(word.startswith("bs") for word in words[at : at + 1])
        if not merged and words[at : at + 2] != ["b", "s"]:
            return DimOrder(shape)
        batch, sequence, *_ = (size for run in runs[at:] for _, size in run)
        return DimOrder(shape, (at - len(axes), merged), (batch, sequence), transposed)

    def _name(self, factor: ax.Axis) -> str:
        leaves = set(ax.leaves(factor))
        return next((name for name, own in self._named.items() if not own.isdisjoint(leaves)), "-")

    def carries(self, node: fx.Node, order: DimOrder) -> bool:
        """Return whether the results of an operator on a value of this `order` may be transposed if that is."""
        merged = [own.pair and own.pair[1] for own in self.orders(node)]
        return not order.transposed or merged == [order.merged] * len(merged)

    def value(self, node: Any) -> Any:
        """Return the new graph's node for a value."""
        if node not in self.values:  # token numbers, when they are first read
            source = self.made["user", node]
            self.values[node] = self.add(aten.transpose.int, (source, 0, 1), f"{node.name}_sb")
        return self.values[node]

    def restore(self, node: Any) -> Any:
        """Return the new graph's node for a value, in the user's order."""
        if node not in self.transposed:
            return self.value(node)
        key = ("user", node)
        if key not in self.made:
            order = self.order(node)
            (at, _), rows = order.pair or (0, False), order.rows[::-1] if order.merged else None
            self.made[key] = self._exchange(self.value(node), at, rows, f"{node.name}_bs")
        return self.made[key]

    def spread(self, node: fx.Node) -> DimOrder:
        """Return the order of an elementwise result: transposed where an argument is."""
        out = self.order(node)
        given = [order for source in node.all_input_nodes for order in self.orders(source)]
        return replace(out, transposed=any(order.transposed and order.pair == out.pair for order in given))

    def fit(self, node: Any, out: DimOrder) -> Any:
        """Return the argument of an operator whose result has the order `out`, broadcast against it."""
        if node not in self.axis_map.axes or not out.transposed or out.pair is None:
            return self.restore(node)
        order, (at, merged) = self.order(node), out.pair
        if order.transposed and order.pair == out.pair and (not merged or order.rows == out.rows):
            return self.value(node)
        shape, at = order.shape, at + len(order.shape)
        end = at if merged else at + 1
        if end < 0 or all(size == 1 for size in shape[max(at, 0) : end + 1]):
            return self.restore(node)
        key = ("fit", node, at, out.rows if merged else None)
        if key not in self.made:
            source, name = self.restore(node), f"{node.name}_sb"
            if at < 0:
                self.made[key] = self.add(aten.unsqueeze.default, (source, 1), name)
            else:
                self.made[key] = self._exchange(source, at, out.rows if merged else None, name)
        return self.made[key]

    # What rules write

    def write(self, args: tuple[Any, ...], kwargs: Mapping[str, Any] = {}, target: Any = None) -> fx.Node:
        """Write the operator that is being rewritten, on new arguments."""
        node = self.current
        new = add_node(self.graph, "call_function", target or node.target, args, kwargs, node.name, node.meta)
        new.meta["val"] = self.find_value(new)
        return new

    def write_along(self, source: Any, dims: Any) -> fx.Node:
        """Write the operator on a new first argument, along `dims`, unless that is None."""
        args, kwargs = fx.map_arg((self.current.args[1:], self.current.kwargs), self.restore)
        place = place_of(self.current.target, "dim")
        if "dim" in kwargs:
            kwargs = {**kwargs, "dim": dims}
        elif dims is not None and place is not None:
            args = (*args[: place - 1], dims, *args[place:])
        return self.write((source, *args), kwargs)

    def undo(self, node: fx.Node, args: tuple[Any, ...]) -> fx.Node:
        """Write the operator `node` on arguments in the user's order; for an unfamiliar operator, in memory too."""
        name = called(node)
        if not self.transposed.isdisjoint(node.all_input_nodes):
            self.undone[name] += 1
        read = self.restore if name.startswith(("aten.", "kernels.", "_operator.")) else self._restore_memory
        return self.write(fx.map_arg(args, read), fx.map_arg(node.kwargs, read))

    def _restore_memory(self, node: fx.Node) -> fx.Node:
        value, val = self.restore(node), node.meta["val"]
        if isinstance(val, torch.Tensor) and val.is_contiguous() and not value.meta["val"].is_contiguous():
            return self.add(aten.contiguous.default, (value,), f"{node.name}_dense")
        return value  # type: ignore[no-any-return]

    def add(self, target: Any, args: tuple[Any, ...], name: str) -> fx.Node:
        """Write a further operator before or after the one that is being rewritten."""
        new = add_node(self.graph, "call_function", target, args, name=name)
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

    def _exchange(self, value: fx.Node, at: int, rows: tuple[int, int] | None, name: str) -> fx.Node:
        """`value` with dimensions `at` and the next exchanged, or the two that `at` merges (`rows`)."""
        shape = list(value.meta["val"].shape)
        if rows is None:
            return self.permute(value, _swapped(len(shape), at), name)
        at %= len(shape)
        opened = [*shape[:at], *rows, shape[at] // prod(rows), *shape[at + 1 :]]
        value = self.add(aten.reshape.default, (value, opened), f"{name}_rows")
        value = self.permute(value, _swapped(len(opened), at), f"{name}_swapped")
        return self.add(aten.reshape.default, (value, shape), name)


def _swapped(rank: int, at: int) -> list[int]:
    order = list(range(rank))
    order[at], order[at + 1] = order[at + 1], order[at]
    return order


def users_order(writer: LayoutWriter, node: fx.Node) -> Written:
    """Write an operator that reads strided views in place, in the user's order.

    Attention over [b, heads, s, size] reads [s, b, heads, size] so, and fused attention writes it so too.
    """
    args, kwargs = fx.map_arg((node.args, node.kwargs), writer.restore)
    return writer.write(args, kwargs), False
