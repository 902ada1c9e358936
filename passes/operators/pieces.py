"""Slices, splits, joins and scatters: results with some rows of a dimension, or with more."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import fx

from autoptd.passes.ir.nodes import argument, called, operator_name, shape_of
from autoptd.passes.ir.views import read_cut, read_dim
from autoptd.passes.operators import axes as ax
from autoptd.passes.operators.axes import Axes, Axis
from autoptd.passes.operators.axis_map import AxisMap, opaque
from autoptd.passes.operators.dim_order import DimOrder, broadcast, plain_dim
from autoptd.passes.operators.layout_writer import LayoutWriter, Written
from autoptd.passes.operators.localizer import Localizer
from autoptd.passes.operators.record import OperatorRules, Trait
from autoptd.passes.operators.shares import (
    PARTIAL,
    UNKNOWN,
    WHOLE,
    Found,
    Share,
    Shares,
    keep_partial,
    merge,
    read,
    refuse_partial,
    spread,
    take,
)
from autoptd.passes.operators.views import view_backward
from autoptd.runtime import aten
from autoptd.runtime.program.placement import Segment, Shard

# Axes


def _slice_axes(axis_map: AxisMap, node: fx.Node) -> Axes:
    """Make the axis a sum of segments, of which the slice takes some."""
    own, cut = list(axis_map.of(node.args[0])), read_cut(node)
    axis, start, (length,) = ax.find(own[cut.dim]), cut.start, cut.lengths
    if length in (0, axis.size):
        own[cut.dim] = axis if length else Axis(0)
        return tuple(own)
    pieces = ax.segment(axis, [start, start + length]) if cut.step == 1 else None
    if pieces is None:
        ax.block(axis, f"{called(node)} slices it")
        own[cut.dim] = Axis(length, blocked=f"{called(node)} makes it")
        return tuple(own)
    position = 0
    for piece in pieces:
        if position == start:
            own[cut.dim] = piece
        position += ax.find(piece).size
    return tuple(own)


def _split_axes(axis_map: AxisMap, node: fx.Node) -> tuple[Axes, ...]:
    """Equal pieces share one axis, counted by a block index outside it; unequal ones are segments."""
    own, cut = axis_map.of(node.args[0]), read_cut(node)
    sizes, axis = cut.lengths, own[cut.dim]
    if len(sizes) == 1:
        return (own,)
    pieces: list[Axis] | None = None
    if len(set(sizes)) == 1 and sizes[0]:
        pair = ax.split_product(axis, [len(sizes), sizes[0]])
        if pair is not None:
            ax.block(pair[0], f"{called(node)} takes it apart")
            pieces = [pair[1]] * len(sizes)
    if pieces is None:
        filled = [size for size in sizes if size]
        bounds = [sum(filled[:i]) for i in range(1, len(filled))]
        segments = ax.segment(axis, bounds)
        if segments is not None:
            rest = iter(segments)
            pieces = [next(rest) if size else Axis(0) for size in sizes]
    if pieces is None:
        ax.block(axis, f"{called(node)} splits it")
        pieces = [Axis(size, blocked=f"{called(node)} makes it") for size in sizes]
    return tuple((*own[: cut.dim], piece, *own[cut.dim + 1 :]) for piece in pieces)


def _cat_axes(axis_map: AxisMap, node: fx.Node) -> Axes:
    """Make the joined dimension the sum of its arguments'."""
    sources: Any = node.args[0]
    parts = [axis_map.of(s) for s in sources]
    dim = read_dim(node, 1, len(parts[0]))
    for other in parts[1:]:
        for d, (a, b) in enumerate(zip(parts[0], other, strict=True)):
            if d != dim:
                ax.unify(a, b)
    segments = tuple(p[dim] for p in parts if ax.find(p[dim]).size)
    joined = segments[0] if len(segments) == 1 else Axis(shape_of(node)[dim], "sum", segments)
    return (*parts[0][:dim], joined, *parts[0][dim + 1 :])


def _stack_axes(axis_map: AxisMap, node: fx.Node) -> Axes:
    sources: Any = node.args[0]
    parts = [axis_map.of(s) for s in sources]
    for other in parts[1:]:
        for a, b in zip(parts[0], other, strict=True):
            ax.unify(a, b)
    dim = read_dim(node, 1, len(parts[0]) + 1)
    index = Axis(len(parts), blocked=f"{called(node)} makes it")
    return (*parts[0][:dim], index, *parts[0][dim:])


def _repeat_axes(axis_map: AxisMap, node: fx.Node) -> Any:
    """Each index of one dimension, several times in a row: [kv, group]."""
    own, shape = list(axis_map.of(node.args[0])), shape_of(node)
    dim = argument(node, 2, "dim")
    if dim is None or not isinstance(node.args[1], int):
        return opaque(axis_map, node)
    dim %= len(own)
    own[dim] = ax.product([own[dim], Axis(shape[dim] // ax.find(own[dim]).size, copied=True)])
    return tuple(own)


def _roll_axes(axis_map: AxisMap, node: fx.Node) -> Axes:
    own = axis_map.of(node.args[0])
    listed = len(node.args) > 1 + ("roll" in str(node.target))
    dims: Any = node.args[-1] if listed else range(len(own))
    for dim in dims:
        ax.block(own[dim], f"{called(node)} moves along it")
    return own


def _slice_scatter_axes(axis_map: AxisMap, node: fx.Node) -> Axes:
    """Some rows of a dimension replaced by others: it stays whole, and the rest of both is the same."""
    into, rows = axis_map.of(node.args[0]), axis_map.of(node.args[1])
    dim = read_dim(node, 2, len(into))
    for place, (own, other) in enumerate(zip(into, rows, strict=True)):
        if place != dim:
            ax.unify(own, other)
        else:
            ax.block(own, f"{called(node)} replaces rows of it")
            ax.block(other, f"{called(node)} replaces rows by it")
    return into


def _select_scatter_axes(axis_map: AxisMap, node: fx.Node) -> Axes:
    """One row of a dimension replaced by another: it stays whole, and the rest of both is the same."""
    into = axis_map.of(node.args[0])
    dim = read_dim(node, 2, len(into))
    for own, other in zip((*into[:dim], *into[dim + 1 :]), axis_map.of(node.args[1]), strict=True):
        ax.unify(own, other)
    ax.block(into[dim], f"{called(node)} replaces a row of it")
    return into


def _getitem_axes(axis_map: AxisMap, node: fx.Node) -> Axes:
    axes = axis_map.results[node.args[0]]  # type: ignore[index]
    return axes[node.args[1]]  # type: ignore[index]


# One rank's call


def _slice_local(localizer: Localizer, node: fx.Node) -> fx.Node:
    """Write a run of rows that lies on this rank."""
    own, cut = localizer.axis_map.of(node.args[0]), read_cut(node)
    axis = own[cut.dim]
    if not localizer.is_divided((axis,)):
        return localizer.copy(node)
    length, made = cut.lengths[0], localizer.extent(localizer.axis_map.of(node)[cut.dim])
    first = 0 if length == ax.find(axis).size else localizer.offset(axis, cut.start)
    args = (localizer.whole(node.args[0]), cut.dim, first, first + made)
    return localizer.copy(node, args=args, target=aten.slice.Tensor)


def _split_local(localizer: Localizer, node: fx.Node) -> fx.Node:
    """Pieces of local size."""
    name, results = operator_name(node.target), localizer.axis_map.all_of(node)
    if name == "aten.chunk" or not any(map(localizer.is_divided, results)):
        return localizer.copy(node)
    dim = int(argument(node, 2, "dim", 0))
    sizes = [localizer.extent(axes[dim]) for axes in results]
    one = name == "aten.split" and isinstance(node.args[1], int)
    target = aten.split.Tensor if one else aten.split_with_sizes.default
    args = (localizer.whole(node.args[0]), sizes[0] if one else sizes, dim)
    return localizer.copy(node, args=args, target=target)


def _repeat_local(localizer: Localizer, node: fx.Node) -> fx.Node:
    """``repeat_interleave`` by the local size of the group it makes."""
    axes = localizer.axis_map.of(node)
    dim = argument(node, 2, "dim")
    if dim is None or not localizer.is_divided(axes):
        return localizer.copy(node)
    times = localizer.extent(axes[dim]) // localizer.extent(localizer.axis_map.of(node.args[0])[dim])
    return localizer.copy(node, args=(localizer.whole(node.args[0]), times, dim))


# The proof


def _cut_placed(node: fx.Node, shares: Shares) -> Found:
    own: Any = node.args[0]
    share, cut = read(own, shares), read_cut(node)
    if share.dim != cut.dim:
        return spread(node, share)
    if cut.step != 1:
        return UNKNOWN
    starts = [cut.start + sum(cut.lengths[:i]) for i in range(len(cut.lengths))]
    found = tuple(take(own, share, *rows) for rows in zip(starts, cut.lengths, strict=True))
    return found if isinstance(node.meta["val"], (tuple, list)) else found[0]


def _cat_placed(node: fx.Node, shares: Shares) -> Share:
    """Along the divided dimension the parts add up."""
    values: Any = node.args[0]  # not all_input_nodes: a value may be there twice
    sources = [n for n in values if n.meta["val"].numel()]
    dim = read_dim(node, 1, len(shape_of(node)))
    given = [read(n, shares) for n in sources]
    if all(share.dim != dim for share in given):
        return merge(list(zip(sources, given, strict=True)), shape_of(node))
    parts: list[Segment] = []
    for source, share in zip(sources, given, strict=True):
        if share is not WHOLE and not (share.dim == dim and share.segments):
            return UNKNOWN
        parts += share.segments or (Segment(1, shape_of(source)[dim], 1, False),)
    return Shard(dim, tuple(parts))


def _stack_placed(node: fx.Node, shares: Shares) -> Share:
    share = merge([(n, read(n, shares)) for n in node.all_input_nodes], shape_of(node.all_input_nodes[0]))
    dim = read_dim(node, 1, len(shape_of(node)))
    return share if share.dim is None else replace(share, dim=share.dim + (dim <= share.dim))


def _repeat_placed(node: fx.Node, shares: Shares) -> Share:
    """Each row several times in a row."""
    share, dim, times = read(node.args[0], shares), argument(node, 2, "dim"), node.args[1]
    if dim is None or not isinstance(times, int):
        return UNKNOWN
    if share.dim != dim % len(shape_of(node)):
        return share
    parts = tuple(replace(part, inner=part.inner * times) for part in share.segments)
    return replace(share, segments=parts, extent=None)


def _getitem_placed(node: fx.Node, shares: Shares) -> Share:
    own, index = node.args[:2]
    found = shares[own]  # type: ignore[index]
    if isinstance(found, tuple):
        return found[index]  # type: ignore[index]
    return found if found is PARTIAL else UNKNOWN


# The sequence-first layout


def resize_order(position: int, default: int | None = 0) -> Callable[[LayoutWriter, fx.Node], Written]:
    """Return the rule of an operator that cuts or stretches one dimension, which its argument `position` names."""

    def rule(writer: LayoutWriter, node: fx.Node) -> Written:
        order, dim = writer.order(node.args[0]), argument(node, position, "dim", default)
        if not isinstance(dim, int) or (order.merged and order.holds(dim)):
            return None
        args, kwargs = replace_dim(node, position, order.place(dim) if order.transposed else dim)
        rest = fx.map_arg((args[1:], kwargs), writer.restore)
        new, val = writer.write((writer.value(node.args[0]), *rest[0]), rest[1]), node.meta["val"]
        if isinstance(val, (tuple, list)):
            return new, tuple(order.resized(dim, v.shape[dim]) for v in val)
        return new, order.resized(dim, val.shape[dim])

    return rule


def replace_dim(node: fx.Node, position: int, dim: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the call's arguments with another dimension."""
    args, kwargs = list(node.args), dict(node.kwargs)
    if position < len(args):
        args[position] = dim
    else:
        kwargs["dim"] = dim
    return tuple(args), kwargs


def _join_order(writer: LayoutWriter, node: fx.Node) -> Written:
    sources: Any = node.args[0]
    stacks = operator_name(node.target) == "aten.stack"
    orders, shape = [writer.order(n) for n in sources], list(shape_of(node))
    dim = read_dim(node, 1, len(shape))
    if len({len(order.dims) for order in orders}) > 1:
        return None  # cat takes an empty list for a tensor of any rank
    one = shape[:dim] + shape[dim + 1 :] if stacks else shape
    known = DimOrder(broadcast(orders, one))
    transposed = [order for order in orders if order.transposed]
    if not stacks and transposed:  # of the joined dimension, sizes differ
        known = known.replaced(dim, transposed[0].resized(dim, shape[dim]).dims[dim])
    joined = (*known.dims[:dim], plain_dim(shape[dim]), *known.dims[dim:])
    out = replace(known, dims=joined) if stacks else known
    fits = all(order.pair == known.pair for order in transposed)
    if transposed and (
        not fits or known.pair is None or out.pair is None or (known.pair[1] and dim == out.pair[0])
    ):
        return None
    known, out = (replace(order, transposed=bool(transposed)) for order in (known, out))
    args, kwargs = replace_dim(node, 1, out.place(dim))
    return writer.write(([writer.fit(n, known) for n in sources], *args[1:]), kwargs), out


def _getitem_order(writer: LayoutWriter, node: fx.Node) -> Written:
    source, index = node.args
    return writer.write((writer.value(source), index)), writer.orders[source][index]  # type: ignore[index]


_SLICE = OperatorRules(
    axes=_slice_axes,
    local=_slice_local,
    placed=_cut_placed,
    of_partial=keep_partial,
    order=resize_order(1),
    backward=view_backward,
)
_SPLIT = replace(_SLICE, axes=_split_axes, local=_split_local, order=resize_order(2))
_JOIN = OperatorRules(order=_join_order, keeps="nothing", traits=Trait.LINEAR)

RULES: Mapping[Any, OperatorRules] = {
    **dict.fromkeys((aten.slice, aten.narrow), replace(_SLICE, traits=Trait.TAKES)),
    **dict.fromkeys((aten.split, aten.split_with_sizes, aten.chunk), _SPLIT),
    aten.tensor_split: replace(_SPLIT, of_partial=refuse_partial),
    **dict.fromkeys(
        (aten.cat, aten.concat, aten.concatenate), replace(_JOIN, axes=_cat_axes, placed=_cat_placed)
    ),
    aten.stack: replace(_JOIN, axes=_stack_axes, placed=_stack_placed),
    aten.repeat_interleave: OperatorRules(
        axes=_repeat_axes,
        local=_repeat_local,
        placed=_repeat_placed,
        order=resize_order(2, default=None),
        keeps="nothing",
    ),
    **dict.fromkeys((aten.roll, aten.flip), OperatorRules(axes=_roll_axes)),
    aten.slice_scatter: OperatorRules(axes=_slice_scatter_axes),
    aten.select_scatter: OperatorRules(axes=_select_scatter_axes),
    operator.getitem: OperatorRules(
        axes=_getitem_axes,
        placed=_getitem_placed,
        of_partial=_getitem_placed,
        order=_getitem_order,
        traits=Trait.FREE,
    ),
}
