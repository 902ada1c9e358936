"""Relate the axes of operators that keep, move, cut or join dimensions (see `axis_rules`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from autoptd.passes.ir.nodes import argument, called, shape_of, where
from autoptd.passes.tensor_parallel import axes as ax
from autoptd.passes.tensor_parallel.axes import Axes, Axis
from autoptd.passes.tensor_parallel.axis_map import AxisMap


def broadcast(axis_map: AxisMap, node: fx.Node) -> Axes:
    """Unify the tensor arguments dimension by dimension; a dimension of size 1 spreads over the others."""
    shape = shape_of(node)
    result = [Axis(1)] * len(shape)
    for source in node.all_input_nodes:
        if source not in axis_map.axes:
            continue
        own = axis_map.axes[source]
        for back in range(1, len(own) + 1):
            axis = own[-back]
            if ax.vanishes(axis):
                continue
            if ax.vanishes(result[-back]):
                result[-back] = axis
            elif ax.find(axis).size == 1:
                continue
            elif ax.find(result[-back]).size == 1:
                result[-back] = axis
            else:
                ax.unify(result[-back], axis)
    return tuple(result)


def view(axis_map: AxisMap, node: fx.Node) -> Axes:
    """Regroup factors; an axis that cannot be regrouped is blocked."""
    source, shape = axis_map.of(node.args[0]), shape_of(node)
    grouped = ax.regroup(source, shape)
    if grouped is not None:
        return tuple(grouped)
    for axis in source:
        ax.block(axis, f"{called(node)} regroups it as {list(shape)}")
    return tuple(Axis(size, blocked=f"{called(node)} makes it") for size in shape)


def transpose(axis_map: AxisMap, node: fx.Node) -> Axes:
    own = list(axis_map.of(node.args[0]))
    first, second = int(node.args[1]), int(node.args[2])  # type: ignore[arg-type]
    own[first], own[second] = own[second], own[first]
    return tuple(own)


def transpose_two(axis_map: AxisMap, node: fx.Node) -> Axes:
    return tuple(reversed(axis_map.of(node.args[0])))


def permute(axis_map: AxisMap, node: fx.Node) -> Axes:
    own = axis_map.of(node.args[0])
    return tuple(own[d] for d in node.args[1])  # type: ignore[union-attr, index]


def unsqueeze(axis_map: AxisMap, node: fx.Node) -> Axes:
    own = list(axis_map.of(node.args[0]))
    dim = int(node.args[1])  # type: ignore[arg-type]
    own.insert(dim if dim >= 0 else dim + len(own) + 1, Axis(1))
    return tuple(own)


def squeeze(axis_map: AxisMap, node: fx.Node) -> Axes:
    own = axis_map.of(node.args[0])
    dims = argument(node, 1, "dim", list(range(len(own))))
    dropped = {d % len(own) for d in ([dims] if isinstance(dims, int) else dims)}
    return tuple(a for d, a in enumerate(own) if d not in dropped or ax.find(a).size != 1)


def expand(axis_map: AxisMap, node: fx.Node) -> Axes:
    """Make a dimension of size 1 a new axis, with the same value at each index."""
    own, shape = axis_map.of(node.args[0]), shape_of(node)
    lead = len(shape) - len(own)
    return tuple(
        own[d - lead] if d >= lead and ax.find(own[d - lead]).size == size else Axis(size, copied=True)
        for d, size in enumerate(shape)
    )


def repeat_interleave(axis_map: AxisMap, node: fx.Node) -> Axes:
    """Each index of one dimension, several times in a row: [kv, group]."""
    own, shape = list(axis_map.of(node.args[0])), shape_of(node)
    dim = argument(node, 2, "dim")
    if dim is None or not isinstance(node.args[1], int):
        return opaque_tensor(axis_map, node)
    dim %= len(own)
    own[dim] = ax.product([own[dim], Axis(shape[dim] // ax.find(own[dim]).size, copied=True)])
    return tuple(own)


def select(axis_map: AxisMap, node: fx.Node) -> Axes:
    own = list(axis_map.of(node.args[0]))
    ax.block(own.pop(int(node.args[1])), f"{called(node)} selects from it")  # type: ignore[arg-type]
    return tuple(own)


def index(axis_map: AxisMap, node: fx.Node) -> Axes:
    """Rows picked out of one dimension by a tensor of numbers: that dimension is needed whole."""
    own = axis_map.of(node.args[0])
    picks = [(d, i) for d, i in enumerate(node.args[1]) if i is not None]  # type: ignore[arg-type]
    if (
        len(picks) != 1
        or picks[0][1].meta["val"].is_floating_point()
        or picks[0][1].meta["val"].dtype == torch.bool
    ):
        return opaque_tensor(axis_map, node)
    dim, numbers = picks[0]
    ax.block(own[dim], f"{called(node)} picks from it")
    if not axis_map.reads_batch(numbers):
        for axis in axis_map.of(numbers):
            ax.block(axis, f"{called(node)} picks by it")
    return (*own[:dim], *axis_map.of(numbers), *own[dim + 1 :])


def roll(axis_map: AxisMap, node: fx.Node) -> Axes:
    own = axis_map.of(node.args[0])
    listed = len(node.args) > 1 + ("roll" in str(node.target))
    dims: Any = node.args[-1] if listed else range(len(own))
    for dim in dims:
        ax.block(own[dim], f"{called(node)} moves along it")
    return own


def unbind(axis_map: AxisMap, node: fx.Node) -> tuple[Axes, ...]:
    own = list(axis_map.of(node.args[0]))
    axis = own.pop(int(argument(node, 1, "dim", 0)))
    ax.block(axis, f"{called(node)} takes it apart")
    return (tuple(own),) * ax.find(axis).size


def slice_rows(axis_map: AxisMap, node: fx.Node) -> Axes:
    """Make the axis a sum of segments, of which the slice takes some."""
    own, shape = list(axis_map.of(node.args[0])), shape_of(node)
    dim = int(argument(node, 1, "dim", 0)) % len(own)
    axis, start = ax.find(own[dim]), argument(node, 2, "start") or 0
    if isinstance(start, fx.Node):
        raise ValueError(
            f"{where(node)}: {node.target} begins where a tensor says: give its start as a number, or use index_select"
        )
    if shape[dim] in (0, axis.size):
        own[dim] = axis if shape[dim] else Axis(0)
        return tuple(own)
    start = start + axis.size if start < 0 else start
    step = argument(node, 4, "step", 1) if str(node.target).startswith("aten.slice") else 1
    pieces = ax.segment(axis, [start, start + shape[dim]]) if step == 1 else None
    if pieces is None:
        ax.block(axis, f"{called(node)} slices it")
        own[dim] = Axis(shape[dim], blocked=f"{called(node)} makes it")
        return tuple(own)
    position = 0
    for piece in pieces:
        if position == start:
            own[dim] = piece
        position += ax.find(piece).size
    return tuple(own)


def split(axis_map: AxisMap, node: fx.Node) -> tuple[Axes, ...]:
    """Equal pieces share one axis, counted by a block index outside it; unequal ones are segments."""
    values = node.meta["val"]
    own = axis_map.of(node.args[0])
    dim = int(argument(node, 2, "dim", 0)) % len(own)
    sizes = [int(v.shape[dim]) for v in values]
    if len(sizes) == 1:
        return (own,)
    pieces: list[Axis] | None = None
    if len(set(sizes)) == 1 and sizes[0]:
        pair = ax.split_product(own[dim], [len(sizes), sizes[0]])
        if pair is not None:
            ax.block(pair[0], f"{called(node)} takes it apart")
            pieces = [pair[1]] * len(sizes)
    if pieces is None:
        filled = [size for size in sizes if size]
        bounds = [sum(filled[:i]) for i in range(1, len(filled))]
        segments = ax.segment(own[dim], bounds)
        if segments is not None:
            rest = iter(segments)
            pieces = [next(rest) if size else Axis(0) for size in sizes]
    if pieces is None:
        ax.block(own[dim], f"{called(node)} splits it")
        pieces = [Axis(size, blocked=f"{called(node)} makes it") for size in sizes]
    return tuple((*own[:dim], piece, *own[dim + 1 :]) for piece in pieces)


def concatenate(axis_map: AxisMap, node: fx.Node) -> Axes:
    """Make the joined dimension the sum of its arguments'."""
    sources: Sequence[fx.Node] = node.args[0]  # type: ignore[assignment]
    parts = [axis_map.of(s) for s in sources]
    dim = int(argument(node, 1, "dim", 0)) % len(parts[0])
    for other in parts[1:]:
        for d, (a, b) in enumerate(zip(parts[0], other, strict=True)):
            if d != dim:
                ax.unify(a, b)
    segments = tuple(p[dim] for p in parts if ax.find(p[dim]).size)
    joined = segments[0] if len(segments) == 1 else Axis(shape_of(node)[dim], "sum", segments)
    return (*parts[0][:dim], joined, *parts[0][dim + 1 :])


def view_as_complex(axis_map: AxisMap, node: fx.Node) -> Axes:
    """Relate [.., 2] to complex numbers [..]."""
    *own, pair = axis_map.of(node.args[0])
    ax.block(pair, f"{called(node)} makes numbers of it")
    return tuple(own)


def view_as_real(axis_map: AxisMap, node: fx.Node) -> Axes:
    return (*axis_map.of(node.args[0]), Axis(2, blocked=f"{called(node)} makes it"))


def stack(axis_map: AxisMap, node: fx.Node) -> Axes:
    sources: Sequence[fx.Node] = node.args[0]  # type: ignore[assignment]
    parts = [axis_map.of(s) for s in sources]
    for other in parts[1:]:
        for a, b in zip(parts[0], other, strict=True):
            ax.unify(a, b)
    dim = int(argument(node, 1, "dim", 0)) % (len(parts[0]) + 1)
    index = Axis(len(parts), blocked=f"{called(node)} makes it")
    return (*parts[0][:dim], index, *parts[0][dim:])


def pad(axis_map: AxisMap, node: fx.Node) -> Axes:
    """Make a padded dimension a new axis, of which nothing is known."""
    own, shape = axis_map.of(node.args[0]), shape_of(node)
    result = []
    for axis, size in zip(own, shape, strict=True):
        if ax.find(axis).size == size:
            result.append(axis)
        else:
            ax.block(axis, f"{called(node)} pads it")
            result.append(Axis(size, blocked=f"{called(node)} makes it"))
    return tuple(result)


def getitem(axis_map: AxisMap, node: fx.Node) -> Axes:
    axes = axis_map.results[node.args[0]]  # type: ignore[index]
    return axes[node.args[1]]  # type: ignore[index]


def make_new(axis_map: AxisMap, node: fx.Node) -> Axes:
    """Let the dimensions of a tensor filled with one value match any others."""
    return tuple(Axis(size) for size in shape_of(node))


def slice_scatter(axis_map: AxisMap, node: fx.Node) -> Axes:
    """Some rows of a dimension replaced by others: it stays whole, and the rest of both is the same."""
    into, rows = axis_map.of(node.args[0]), axis_map.of(node.args[1])
    dim = int(argument(node, 2, "dim", 0)) % len(into)
    for place, (own, other) in enumerate(zip(into, rows, strict=True)):
        if place != dim:
            ax.unify(own, other)
        else:
            ax.block(own, f"{called(node)} replaces rows of it")
            ax.block(other, f"{called(node)} replaces rows by it")
    return into


def select_scatter(axis_map: AxisMap, node: fx.Node) -> Axes:
    """One row of a dimension replaced by another: it stays whole, and the rest of both is the same."""
    into = axis_map.of(node.args[0])
    dim = int(argument(node, 2, "dim", 0)) % len(into)
    for own, other in zip((*into[:dim], *into[dim + 1 :]), axis_map.of(node.args[1]), strict=True):
        ax.unify(own, other)
    ax.block(into[dim], f"{called(node)} replaces a row of it")
    return into


def opaque_tensor(axis_map: AxisMap, node: fx.Node) -> Axes:
    """Apply `opaque` to an operator with one result."""
    axes: Axes = opaque(axis_map, node)
    return axes


def opaque(axis_map: AxisMap, node: fx.Node) -> Any:
    """Nothing is known: all dimensions that come in or go out stay whole, as every rank computes them."""
    reason = f"no rule divides {called(node)}"
    for source in node.all_input_nodes:
        for own in axis_map.all_of(source):
            for axis in own:
                ax.block(axis, reason)
    value = node.meta["val"]
    many = isinstance(value, (tuple, list))
    found = [tuple(Axis(size, blocked=reason) for size in v.shape) for v in (value if many else [value])]
    return tuple(found) if many else found[0]
