"""Views that regroup, move, add or drop whole dimensions."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

from torch import fx

from autoptd.passes.ir.nodes import argument, as_results, called, results_of, shape_of
from autoptd.passes.ir.views import dim_map, float_bytes, is_view, read_padding
from autoptd.passes.operators import axes as ax
from autoptd.passes.operators import proof
from autoptd.passes.operators.axis_map import AxisMap, regroup
from autoptd.passes.operators.layout import LayoutWriter, Written
from autoptd.passes.operators.localizer import Localizer, LocalRule, is_lone_sum
from autoptd.passes.operators.quantities import Value, Work
from autoptd.passes.operators.record import OperatorRules, Trait
from autoptd.runtime import aten
from autoptd.runtime.program.placement import AxisPlacement

# Axes


def _reshape_axes(axis_map: AxisMap, node: fx.Node) -> ax.Axes:
    shape = shape_of(node)
    return regroup(node, axis_map.of(node.args[0]), shape, f"regroups it as {list(shape)}")


def mapped_axes(
    reason: str = "", contract: Callable[[AxisMap, fx.Node, list[ax.Axis]], ax.Axis | None] | None = None
) -> Callable[[AxisMap, fx.Node], Any]:
    """Return the rule of an operator that needs the dimensions whole that it drops or resizes, for the `reason`.

    Without one, a new dimension has the same value at each of its indices. Of those dropped it may `contract` one.
    """

    def rule(axis_map: AxisMap, node: fx.Node) -> Any:
        own, made, dims = axis_map.of(node.args[0]), results_of(node), dim_map(node)
        dropped = [axis for d, axis in enumerate(own) if d not in dims]
        kept = contract(axis_map, node, dropped) if contract else None
        for axis in (axis for axis in dropped if reason and axis is not kept):
            ax.block(axis, f"{called(node)} {reason}")
        new: dict[str, Any] = {"blocked": f"{called(node)} makes it"} if reason else {"copied": True}
        axes = tuple(
            ax.Axis(size, **new if size > 1 else {}) if d is None else own[d]
            for d, size in zip(dims, made[0].shape, strict=True)
        )
        return as_results(node, [axes] * len(made))

    return rule


# One rank's call


def _reshape_local(localizer: Localizer, node: fx.Node) -> fx.Node:
    """A view with the result's local sizes; of a partial sum that nobody else reads, a partial sum."""
    source = localizer.values[node.args[0]]  # type: ignore[index]
    if not is_lone_sum(localizer, node.args[0]) or localizer.biases.get(source):
        return sized_local(1)(localizer, node)
    sizes = localizer.sizes(localizer.axis_map.of(node))
    return localizer.add(node.target, (source, sizes), node, name=node.name, partial=True)


def sized_local(position: int) -> LocalRule:
    """Return the rule of an operator whose argument `position` is the shape of the result: ``expand``, ``full``."""

    def rule(localizer: Localizer, node: fx.Node) -> fx.Node:
        axes = localizer.axis_map.of(node)
        if not localizer.is_divided(axes):
            return localizer.copy(node)
        args = list(fx.map_arg(node.args, localizer.whole))
        args[position] = localizer.sizes(axes)
        return localizer.copy(node, args=tuple(args), kwargs=dict(node.kwargs))

    return rule


# The proof


def reshape_placed(node: fx.Node, placements: proof.Placements) -> AxisPlacement:
    own: Any = node.args[0]
    return proof.regroup(proof.read(own, placements), shape_of(own), shape_of(node))


def move_placed(node: fx.Node, placements: proof.Placements) -> proof.Found:
    """Move the divided dimension as the operator moves it."""
    placement = proof.read(node.args[0], placements)
    if placement.dim is None:
        return proof.spread(node, placement)
    dims = dim_map(node)
    moved = replace(placement, dim=dims.index(placement.dim)) if placement.dim in dims else proof.UNKNOWN
    return proof.spread(node, moved)


# The sequence-first layout


def _reshape_order(writer: LayoutWriter, node: fx.Node) -> Written:
    """Where batch and sequence stay neighbours, the same reshape of the transposed value."""
    source = node.args[0]
    order, out = writer.order(source), writer.order(node)
    if order.transposed and order.pair is not None and out.pair is not None:
        before = prod(order.shape[: order.pair[0]]), order.rows
        if before == (prod(out.shape[: out.pair[0]]), out.rows):
            arranged = replace(out, transposed=True).arranged
            return writer.write((writer.value(source), arranged)), True
    return writer.undo(node, (source, list(out.shape))), False


def _permute_order(writer: LayoutWriter, node: fx.Node) -> Written:
    order, dims = writer.order(node.args[0]), [d for d in dim_map(node) if d is not None]
    out = writer.order(node)
    out = replace(out, transposed=out.pair is not None and (order.transposed or not out.pair[1]))
    permutation = [order.place(dims[d]) for d in out.permutation]
    return writer.permute(writer.value(node.args[0]), permutation, node.name), out.transposed


def _squeeze_order(writer: LayoutWriter, node: fx.Node) -> Written:
    """Add or drop a dimension of size 1, unless that comes between batch and sequence."""
    source, order = node.args[0], writer.order(node.args[0])
    if not writer.carries(node, order):
        return None
    if not order.transposed:
        return writer.write((writer.value(source), *node.args[1:]), node.kwargs), False
    shape = replace(writer.order(node), transposed=True).arranged
    return writer.write((writer.value(source), shape), target=aten.reshape.default), True


def _expand_order(writer: LayoutWriter, node: fx.Node) -> Written:
    out = writer.spread(node)
    return writer.write((writer.fit(node.args[0], out), out.arranged)), out.transposed


def drop_order(writer: LayoutWriter, node: fx.Node, *, picks: bool = False) -> Written:
    """Write an operator that drops dimensions; it cannot, if it `picks` from batch and sequence where they are merged.

    If it drops one of these two, the other is in the user's order.
    """
    order, kept = writer.order(node.args[0]), dim_map(node)
    dims = [d for d in range(len(order.shape)) if d not in kept]
    if picks and order.merged and any(map(order.holds, dims)):
        return None
    named = dims[0] if picks else argument(node, "dim")
    if order.transposed and named is not None:
        named = order.place(named) if isinstance(named, int) else [order.place(d) for d in dims]
    new = writer.write_along(writer.value(node.args[0]), named)
    if None in kept and sum(map(order.holds, dims)) == 1:
        new = writer.permute(new, order.permutation, f"{node.name}_bs")
    return new, order.transposed and not any(map(order.holds, dims)) and writer.carries(node, order)


def _pad_order(writer: LayoutWriter, node: fx.Node) -> Written:
    """Padding is given from the last dimension backwards, a pair of numbers each."""
    source, order, pairs = node.args[0], writer.order(node.args[0]), read_padding(node)
    if argument(node, "mode", "constant") != "constant" or not writer.carries(node, order):
        return None
    flat = [n for d in reversed(order.permutation) for n in pairs[d]] if order.transposed else node.args[1]
    return writer.write((writer.value(source), flat, *node.args[2:]), node.kwargs), order.transposed


# Costs


def view_backward(node: fx.Node, value: Value, wanted: Sequence[fx.Node]) -> Work:
    """Return the work of the gradient of a part, or of parts, from which the argument's gradient is made."""
    (source,) = wanted
    return Work(read=value.bytes(node), written=value.bytes(source), launches=1)


_SAFE = Trait.PADDING_SAFE
_MOVE = OperatorRules(axes=mapped_axes(), placed=move_placed, of_partial=proof.keep_partial)
_RESHAPE = OperatorRules(
    axes=_reshape_axes,
    local=_reshape_local,
    placed=reshape_placed,
    of_partial=proof.keep_partial,
    order=_reshape_order,
    copies=lambda given, value: 0 if is_view(given[0], value.shape) else float_bytes(given[0]),
    traits=_SAFE | Trait.RESHAPES,
)
_SQUEEZE = replace(_MOVE, order=_squeeze_order, traits=_SAFE | Trait.SQUEEZES)
_PERMUTE = replace(_MOVE, order=_permute_order, traits=_SAFE | Trait.PERMUTES)
PART = replace(_MOVE, order=partial(drop_order, picks=True), backward=view_backward)
_EXPAND = replace(PART, local=sized_local(1), order=_expand_order, traits=_SAFE | Trait.REPEATS)
_PAD = OperatorRules(axes=mapped_axes("pads it"), placed=move_placed, order=_pad_order, traits=Trait.PADS)
_PAIR = OperatorRules(axes=mapped_axes("makes numbers of it"), placed=move_placed)

RULES: Mapping[Any, OperatorRules] = {
    **dict.fromkeys((aten.view, aten.reshape, aten._unsafe_view, aten.flatten, aten.unflatten), _RESHAPE),
    **dict.fromkeys((aten.transpose, aten.swapaxes, aten.swapdims, aten.permute, aten.t, aten.numpy_T), _PERMUTE),
    **dict.fromkeys((aten.unsqueeze, aten.squeeze), _SQUEEZE),
    **dict.fromkeys((aten.expand, aten.broadcast_to), _EXPAND),
    aten.select: replace(PART, axes=mapped_axes("selects from it"), traits=_SAFE | Trait.TAKES),
    aten.unbind: replace(PART, axes=mapped_axes("takes it apart")),
    **dict.fromkeys((aten.pad, aten.constant_pad_nd), _PAD),
    **dict.fromkeys((aten.view_as_complex, aten.view_as_real), _PAIR),
}
