"""The sequence-first layout: the orders of values, and the rewrite of a graph that layout rules read and write.

The order of a value says where batch and sequence are, and whether they changed places. A dimension is a product of
factors, outermost first, of which the batch and the sequence matter. A value in which the sequence follows right
behind the batch, [.., b, s, ..] or merged [.., b * s, ..], may be *transposed*: the new graph holds it as
[.., s, b, ..] or [.., s * b, ..]. The new graph holds all other values as the user wrote them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from math import prod
from typing import Any

import torch
from torch import fx

from autoptd.passes.ir.nodes import called, describe, info
from autoptd.runtime import aten

Factor = tuple[str, int]  # (BATCH, 2), (SEQUENCE, 16), or ("", size) of anything else
Dim = tuple[Factor, ...]  # outermost first; () has size 1
BATCH, SEQUENCE = "b", "s"


def size_of(dim: Dim) -> int:
    return prod(size for _, size in dim)


def plain_dim(size: int) -> Dim:
    return () if size == 1 else (("", size),)


@dataclass(frozen=True)
class DimOrder:
    """A value's dimensions as the user orders them; `transposed`: the new graph has batch and sequence exchanged."""

    dims: tuple[Dim, ...]
    transposed: bool = False

    @cached_property
    def pair(self) -> tuple[int, bool] | None:
        """The dimension of the batch, right before the sequence's, and whether it is merged with that."""
        names = [[name for name, _ in dim] for dim in self.dims]
        at = next((at for at, own in enumerate(names) if own[:1] == [BATCH]), len(names))
        if names[at : at + 2] == [[BATCH], [SEQUENCE]]:
            return at, False
        return (at, True) if at < len(names) and names[at][1:2] == [SEQUENCE] else None

    @property
    def shape(self) -> list[int]:
        """Sizes in the user's order."""
        return [size_of(dim) for dim in self.dims]

    @property
    def permutation(self) -> list[int]:
        """For each dimension of the new graph's value, which of the user's it is."""
        if not self.transposed or self.pair is None or self.pair[1]:
            return list(range(len(self.dims)))
        return _swapped(len(self.dims), self.pair[0])

    def place(self, dim: int) -> int:
        """Return the position of the user's dimension `dim` in the new graph."""
        return self.permutation.index(dim % len(self.dims))

    def arrange(self, sizes: Sequence[int]) -> list[int]:
        """Return `sizes`, one per dimension in the user's order, in the new graph's order."""
        return [sizes[dim] for dim in self.permutation]

    def holds(self, dim: int) -> bool:
        """Return whether the user's dimension `dim` is the batch or the sequence of a transposed value (or both)."""
        if not self.transposed or self.pair is None:
            return False
        at, merged = self.pair
        return dim % len(self.dims) in ((at,) if merged else (at, at + 1))

    @property
    def merged(self) -> bool:
        """Return whether batch and sequence are one dimension of a transposed value."""
        return self.transposed and self.pair is not None and self.pair[1]

    @property
    def rows(self) -> tuple[int, int]:
        """Batch and sequence size of a value that has a pair."""
        assert self.pair is not None
        (_, batch), (_, sequence), *_ = (factor for dim in self.dims[self.pair[0] :] for factor in dim)
        return batch, sequence

    def replaced(self, dim: int, by: Dim) -> DimOrder:
        """Return the same with another dimension `dim`."""
        dim %= len(self.dims)
        return replace(self, dims=(*self.dims[:dim], by, *self.dims[dim + 1 :]))

    def resized(self, dim: int, size: int) -> DimOrder:
        """Dimension `dim` cut or grown to `size`: a batch stays a batch, a sequence a sequence."""
        own = self.dims[dim % len(self.dims)]
        return self.replaced(dim, ((own[0][0], size),) if len(own) == 1 and own[0][0] else plain_dim(size))

    def mapped(self, dims: Sequence[int | None]) -> DimOrder:
        """Return the same with dimensions `dims` of these; None for a new one, of size 1."""
        return replace(self, dims=tuple(() if d is None else self.dims[d] for d in dims))


def plain_order(shape: Sequence[int]) -> DimOrder:
    """Return the order of a value in the user's order, of which nothing is known."""
    return DimOrder(tuple(plain_dim(size) for size in shape))


def regroup(dims: Sequence[Dim], shape: Sequence[int]) -> tuple[Dim, ...]:
    """Regroup `dims` as a ``view`` as `shape` does: a batch or sequence that it cuts is none any longer."""
    pending = [factor for dim in dims for factor in dim][::-1]
    result: list[Dim] = []
    for size in shape:
        taken: list[Factor] = []
        left = size
        while pending and (left > 1 or pending[-1][1] == 1) and (left > 1 or not taken):
            name, extent = pending.pop()
            if left % extent == 0:
                taken.append((name, extent))
                left //= extent
            else:
                if extent % left:  # they do not nest: what is left is one heap
                    extent, pending = extent * prod(other for _, other in pending), []
                pending += [("", extent // left)] * (extent % left == 0)
                taken.append(("", left))
                left = 1
        result.append(_joined(taken))
    return tuple(result)


def _joined(factors: Sequence[Factor]) -> Dim:
    """Neighbours that are neither batch nor sequence as one factor."""
    runs = groupby(factors, lambda factor: factor[0] != "")
    return tuple(f for named, run in runs for f in (run if named else plain_dim(size_of(tuple(run)))))


def broadcast(orders: Sequence[DimOrder], shape: Sequence[int]) -> tuple[Dim, ...]:
    """Return the dimensions of an elementwise result; if its arguments disagree, nothing is known."""
    result: list[Dim] = []
    for back in range(len(shape), 0, -1):
        size = shape[-back]
        dims = [order.dims[-back] for order in orders if len(order.dims) >= back]
        known = {dim for dim in dims if size_of(dim) == size and any(name for name, _ in dim)}
        result.append(known.pop() if len(known) == 1 else plain_dim(size))
    return tuple(result)


Found = DimOrder | tuple[DimOrder, ...]  # one for each of several results
Written = tuple[fx.Node, Any] | None  # the new node and its order, or the orders of its results


@dataclass(eq=False)
class LayoutWriter:
    """The rewrite of one graph: for each of its nodes, the value that stands for it and the order of that value.

    `find_value` gives a new node's meta tensor, with the strides that real kernels give it. `undone` counts the
    operators whose arguments got the user's order back, `exchanged` the activations that are held transposed.
    """

    source: fx.Graph
    find_value: Callable[[fx.Node], Any]
    tokens: Mapping[str, Sequence[int]]
    graph: fx.Graph = field(default_factory=fx.Graph)
    orders: dict[fx.Node, Found] = field(default_factory=dict)
    undone: Counter[str] = field(default_factory=Counter)
    exchanged: int = 0
    current: fx.Node = field(init=False)
    values: dict[fx.Node, fx.Node] = field(default_factory=dict)
    made: dict[tuple[Any, ...], fx.Node] = field(default_factory=dict)

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
            source = self.made["user", node]
            self.values[node] = self.add(aten.transpose.int, (source, 0, 1), f"{node.name}_sb")
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

    def write(self, args: tuple[Any, ...], kwargs: Mapping[str, Any] = {}, target: Any = None) -> fx.Node:
        """Write the operator that is being rewritten, on new arguments."""
        node = self.current
        new = self.graph.create_node("call_function", target or node.target, args, dict(kwargs), node.name)
        new.meta = dict(node.meta)
        new.meta["val"] = self.find_value(new)
        return new

    def write_along(self, source: Any, position: int, dims: Any) -> fx.Node:
        """Write the operator on a new first argument, along `dims`, its argument `position`, unless that is None."""
        args, kwargs = fx.map_arg((self.current.args[1:], self.current.kwargs), self.restore)
        if "dim" in kwargs:
            kwargs = {**kwargs, "dim": dims}
        elif dims is not None:
            args = (*args[: position - 1], dims, *args[position:])
        return self.write((source, *args), kwargs)

    def undo(self, node: fx.Node, args: tuple[Any, ...]) -> fx.Node:
        """Write the operator `node` on arguments in the user's order; for an unfamiliar operator, in memory too."""
        name = called(node)
        if any(map(self.is_transposed, node.all_input_nodes)):
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
