"""Slices, splits, joins, scatters, and picks by numbers: results with some rows of a dimension, or with more."""

import operator
from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate, chain
from typing import Any

import torch
from torch import fx

from autoptd.passes.ir.nodes import argument, as_results, called, operator_name, shape_of
from autoptd.passes.ir.views import read_cut, read_dim
from autoptd.passes.operators import axes as ax
from autoptd.passes.operators import proof
from autoptd.passes.operators.axis_map import AxisMap, opaque
from autoptd.passes.operators.layout import LayoutWriter, Written
from autoptd.passes.operators.localizer import Localizer
from autoptd.passes.operators.record import OperatorRules, Trait
from autoptd.passes.operators.views import PART
from autoptd.runtime import aten
from autoptd.runtime.program.placement import AxisPlacement, Segment, Shard

# Axes


def _cut_axes(axis_map: AxisMap, node: fx.Node) -> Any:
    """Equal pieces share one axis, counted by a block index outside it; other pieces are segments of a sum."""
    own, cut, several = axis_map.of(node.args[0]), read_cut(node), isinstance(node.meta["val"], (tuple, list))
    axis, lengths = own[cut.dim], cut.lengths
    equal = several and len(set(lengths)) == 1 and lengths[0] > 0
    pieces: list[ax.Axis] | None = None
    if lengths == (axis.size,):
        pieces = [axis]
    elif equal and (pair := ax.regroup([axis], [len(lengths), lengths[0]])):
        ax.block(pair[0], f"{called(node)} takes it apart")
        pieces = [pair[1]] * len(lengths)
    elif cut.step == 1:
        filled = [length for length in lengths if length]
        bounds = [cut.start, *(cut.start + end for end in accumulate(filled))] if filled else []
        segments = ax.segment(axis, bounds)
        rest = iter(segments[min(cut.start, 1) :] if segments else [])  # behind the one before the first
        pieces = [next(rest) if length else ax.Axis(0) for length in lengths] if segments else None
    if pieces is None:
        ax.block(axis, f"{called(node)} {'splits' if several else 'slices'} it")
        pieces = [ax.Axis(length, blocked=f"{called(node)} makes it") for length in lengths]
    return as_results(node, [(*own[: cut.dim], piece, *own[cut.dim + 1 :]) for piece in pieces])


def _join_axes(axis_map: AxisMap, node: fx.Node) -> ax.Axes:
    """Make the joined dimension the sum of its arguments', or a new one that counts them."""
    sources: Any = node.args[0]
    stacks, parts = operator_name(node.target) == "aten.stack", [axis_map.of(s) for s in sources]
    dim = read_dim(node, len(parts[0]) + stacks)
    for other in parts[1:]:
        for d, pair in enumerate(zip(parts[0], other, strict=True)):
            if stacks or d != dim:
                ax.unify(*pair)
    if stacks:
        index = ax.Axis(len(parts), blocked=f"{called(node)} makes it")
        return (*parts[0][:dim], index, *parts[0][dim:])
    segments = tuple(p[dim] for p in parts if p[dim].size)
    joined = segments[0] if len(segments) == 1 else ax.Axis(shape_of(node)[dim], "sum", segments)
    return (*parts[0][:dim], joined, *parts[0][dim + 1 :])


def _scatter_axes(axis_map: AxisMap, node: fx.Node) -> ax.Axes:
    """Replace rows of a dimension, or one, by others: it stays whole, and the rest of both is the same."""
    into, rows = axis_map.of(node.args[0]), axis_map.of(node.args[1])
    dim = read_dim(node, len(into))
    if len(rows) < len(into):
        rows = (*rows[:dim], into[dim], *rows[dim:])
    for place, pair in enumerate(zip(into, rows, strict=True)):
        if place != dim:
            ax.unify(*pair)
        for axis in pair if place == dim else ():
            ax.block(axis, f"{called(node)} replaces rows of it")
    return into


def _index_axes(axis_map: AxisMap, node: fx.Node) -> Any:
    """Rows picked out of one dimension by a tensor of numbers: that dimension is needed whole."""
    own = axis_map.of(node.args[0])
    picks = _picks(node)
    if len(picks) != 1:
        return opaque(axis_map, node)
    ((dim, numbers),) = picks.items()
    if numbers.meta["val"].is_floating_point() or numbers.meta["val"].dtype == torch.bool:
        return opaque(axis_map, node)
    ax.block(own[dim], f"{called(node)} picks from it")
    if numbers not in axis_map.batch:
        for axis in axis_map.of(numbers):
            ax.block(axis, f"{called(node)} picks by it")
    return (*own[:dim], *axis_map.of(numbers), *own[dim + 1 :])


def _put_axes(axis_map: AxisMap, node: fx.Node) -> Any:
    """Elements of the last dimensions replaced by numbers: the dimensions before these are the same of both."""
    into, rows = (axis_map.of(node.args[at]) for at in (0, 2))
    lead = _lead(node)
    if not lead:
        return opaque(axis_map, node)
    for axis in chain(into[lead:], rows[lead:], *map(axis_map.of, _picks(node).values())):
        ax.block(axis, f"{called(node)} puts elements into it")
    for pair in zip(into[:lead], rows, strict=False):
        ax.unify(*pair)
    return into


def _lead(node: fx.Node) -> int:
    """Return how many dimensions are before those that an ``index_put`` picks; 0 if others follow, or rows repeat."""
    into, rows, picks = shape_of(node), shape_of(node.args[2]), _picks(node)  # type: ignore[arg-type]
    numbers, lead = [n.meta["val"] for n in picks.values()], len(into) - len(picks)
    last = [*picks] == [*range(lead, len(into))] and all(n.dtype != torch.bool for n in numbers)
    plain = last and rows[:lead] == into[:lead] and len(rows) == lead + max(n.dim() for n in numbers)
    return lead if plain else 0


def _picks(node: fx.Node) -> dict[int, fx.Node]:
    given: Any = node.args[1]
    return {d: numbers for d, numbers in enumerate(given) if numbers is not None}


# One rank's call


def _slice_local(localizer: Localizer, node: fx.Node) -> fx.Node:
    own, cut = localizer.axis_map.of(node.args[0]), read_cut(node)
    axis = own[cut.dim]
    if not localizer.is_divided((axis,)):
        return localizer.copy(node)
    before = ax.segment(axis, [cut.start])
    assert before is not None, "a divided axis has been cut there"
    first = localizer.extent(before[0]) if cut.start else 0
    end = first + localizer.extent(localizer.axis_map.of(node)[cut.dim])
    args = (localizer.whole(node.args[0]), cut.dim, first, end)
    return localizer.copy(node, args=args, target=aten.slice.Tensor)


def _split_local(localizer: Localizer, node: fx.Node) -> fx.Node:
    name, results = operator_name(node.target), localizer.axis_map.all_of(node)
    if not any(map(localizer.is_divided, results)):
        return localizer.copy(node)
    dim = int(argument(node, "dim"))
    sizes = [localizer.extent(axes[dim]) for axes in results]
    one = name == "aten.split" and isinstance(node.args[1], int)
    target = aten.split.Tensor if one else aten.split_with_sizes.default
    args = (localizer.whole(node.args[0]), sizes[0] if one else sizes, dim)
    return localizer.copy(node, args=args, target=target)


# The proof


def _cut_placed(node: fx.Node, placements: proof.Placements) -> proof.Found:
    own: Any = node.args[0]
    placement, cut = proof.read(own, placements), read_cut(node)
    if placement.dim != cut.dim:
        return proof.spread(node, placement)
    if cut.step != 1:
        return proof.UNKNOWN
    starts = accumulate(cut.lengths, initial=cut.start)
    found = (proof.take(own, placement, *rows) for rows in zip(starts, cut.lengths, strict=False))
    return as_results(node, found)  # type: ignore[no-any-return]


def _cat_placed(node: fx.Node, placements: proof.Placements) -> AxisPlacement:
    """Along the divided dimension the parts add up."""
    values: Any = node.args[0]  # not all_input_nodes: a value may be there twice
    sources = [n for n in values if n.meta["val"].numel()]
    dim = read_dim(node, len(shape_of(node)))
    given = [proof.read(n, placements) for n in sources]
    if all(placement.dim != dim for placement in given):
        return proof.merge(list(zip(sources, given, strict=True)), shape_of(node))
    parts: list[Segment] = []
    for source, placement in zip(sources, given, strict=True):
        if placement is not proof.WHOLE and not (placement.dim == dim and placement.segments):
            return proof.UNKNOWN
        parts += placement.segments or (Segment(1, shape_of(source)[dim], 1, False),)
    return Shard(dim, tuple(parts))


def _stack_placed(node: fx.Node, placements: proof.Placements) -> AxisPlacement:
    sources, dim = node.all_input_nodes, read_dim(node, len(shape_of(node)))
    placement = proof.merge([(n, proof.read(n, placements)) for n in sources], shape_of(sources[0]))
    if placement.dim is None:
        return placement
    return replace(placement, dim=placement.dim + (dim <= placement.dim))


def _getitem_placed(node: fx.Node, placements: proof.Placements) -> AxisPlacement:
    own, index = node.args[:2]
    found = placements[own]  # type: ignore[index]
    if isinstance(found, tuple):
        return found[index]  # type: ignore[index]
    return found if found is proof.PARTIAL else proof.UNKNOWN


def _index_placed(node: fx.Node, placements: proof.Placements) -> proof.Found:
    """Rows picked alike on every rank; the dimensions before the first picked one stay where they are."""
    picks, placement = _picks(node), proof.read(node.args[0], placements)
    if any(proof.read(numbers, placements) is not proof.WHOLE for numbers in picks.values()):
        return proof.UNKNOWN
    moved = len(picks) > 1 or len(shape_of(node)) != len(shape_of(node.args[0]))  # type: ignore[arg-type]
    return proof.UNKNOWN if placement.dim is not None and (placement.dim in picks or moved) else placement


def _put_placed(node: fx.Node, placements: proof.Placements) -> proof.Found:
    """Both divided alike, along a dimension before those that numbers pick."""
    given: Any = [(n, proof.read(n, placements)) for n in (node.args[0], node.args[2])]
    picked = (proof.read(numbers, placements) is proof.WHOLE for numbers in _picks(node).values())
    known = all(picked) and {p.dim for _, p in given} <= {*range(_lead(node))}
    return proof.merge(given, shape_of(node)) if known else proof.UNKNOWN


# The sequence-first layout


def resize_order(writer: LayoutWriter, node: fx.Node) -> Written:
    """Write an operator that cuts or stretches its argument along `dim`."""
    order, dim = writer.order(node.args[0]), argument(node, "dim")
    if not writer.carries(node, order) or (order.merged and order.holds(dim)):
        return None
    placed = order.place(dim) if order.transposed else dim
    return writer.write_along(writer.value(node.args[0]), placed), order.transposed


def _join_order(writer: LayoutWriter, node: fx.Node) -> Written:
    sources: Any = node.args[0]
    orders = [writer.order(n) for n in sources]
    transposed = [order for order in orders if order.transposed]
    out = replace(writer.order(node), transposed=bool(transposed))
    known, dim = (transposed or [out])[0], read_dim(node, len(out.shape))
    kept = [d - (d > dim) for d in out.permutation if d != dim]  # by stack, whose dimension may part the two
    moved = any(order.pair != known.pair for order in transposed) or (out.merged and out.holds(dim))
    moved |= len(out.shape) > len(known.shape) and kept != known.permutation
    # cat takes an empty list for a tensor of any rank
    if len({len(order.shape) for order in orders}) > 1 or (transposed and (moved or out.pair is None)):
        return None
    return writer.write_along([writer.fit(n, known) for n in sources], out.place(dim)), out.transposed


def _getitem_order(writer: LayoutWriter, node: fx.Node) -> Written:
    source, index = node.args
    return writer.write((writer.value(source), index)), source in writer.transposed


_SAFE = Trait.PADDING_SAFE
_SLICE = replace(PART, axes=_cut_axes, local=_slice_local, placed=_cut_placed, order=resize_order, traits=_SAFE)
_SPLIT = replace(_SLICE, local=_split_local)
_JOIN = OperatorRules(axes=_join_axes, order=_join_order, keeps="nothing", traits=_SAFE | Trait.LINEAR)

RULES: Mapping[Any, OperatorRules] = {
    **dict.fromkeys((aten.slice, aten.narrow), replace(_SLICE, traits=_SAFE | Trait.TAKES)),
    **dict.fromkeys((aten.split, aten.split_with_sizes, aten.chunk, aten.tensor_split), _SPLIT),
    **dict.fromkeys((aten.cat, aten.concat, aten.concatenate), replace(_JOIN, placed=_cat_placed)),
    aten.stack: replace(_JOIN, placed=_stack_placed),
    aten.repeat_interleave: OperatorRules(keeps="nothing"),
    **dict.fromkeys((aten.slice_scatter, aten.select_scatter), OperatorRules(axes=_scatter_axes)),
    aten.index: OperatorRules(axes=_index_axes, placed=_index_placed, keeps="nothing"),
    aten.index_put: OperatorRules(axes=_put_axes, placed=_put_placed),
    operator.getitem: OperatorRules(
        axes=lambda axis_map, node: axis_map.axes[node.args[0]][node.args[1]],  # type: ignore[index]
        placed=_getitem_placed,
        of_partial=_getitem_placed,
        order=_getitem_order,
        traits=_SAFE | Trait.FREE,
    ),
}
