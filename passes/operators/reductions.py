"""Reductions and norms: operators over some dimensions of one tensor."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from math import prod
from typing import Any

from torch import fx

from autoptd.passes.ir.nodes import argument, called, operator_name, shape_of
from autoptd.passes.ir.views import contiguous_copies, dim_map, reduced_dims
from autoptd.passes.operators import axes as ax
from autoptd.passes.operators import proof
from autoptd.passes.operators.axis_map import RUNS, AxisMap
from autoptd.passes.operators.localizer import Localizer, if_divided, same_call
from autoptd.passes.operators.pieces import resize_order
from autoptd.passes.operators.products import rows_order
from autoptd.passes.operators.record import OperatorRules, Trait
from autoptd.passes.operators.views import drop_order, mapped_axes, move_placed
from autoptd.runtime import aten

Dims = Callable[[fx.Node, int], Iterable[int]]  # of a call with an argument of so many dimensions

# Axes


def _contract_sum(axis_map: AxisMap, node: fx.Node, summed: list[ax.Axis]) -> ax.Axis | None:
    """A sum over one divided axis is partial, and over several if these are classes; a mean over classes only."""
    plain = len(summed) == 1 and operator_name(node.target) == "aten.sum"
    over = summed if plain else [axis for axis in summed if axis_map.is_of_classes(axis)]
    if len(over) != 1:
        return None
    axis_map.sum_over(node, over[0])
    return over[0]


def _topk_axes(axis_map: AxisMap, node: fx.Node) -> tuple[ax.Axes, ax.Axes]:
    own, dim = list(axis_map.of(node.args[0])), int(argument(node, "dim"))
    reason = f"{called(node)} picks from it"
    ax.block(own[dim], reason)
    own[dim] = ax.Axis(int(node.args[1]), blocked=reason)  # type: ignore[arg-type]
    return tuple(own), tuple(own)


# One rank's call


def _sum_local(localizer: Localizer, node: fx.Node, axis: ax.Axis) -> fx.Node:
    """Sum what is no padding; a mean divides the partial sum by the number of all."""
    source: Any = node.args[0]
    own = localizer.axis_map.of(source)
    x = localizer.values[source] = localizer.clear_padding(localizer.whole(source), own)
    if "mean" not in str(node.target):
        return same_call(localizer, node)
    dims, dtype = reduced_dims(node, len(own)), node.meta["val"].dtype
    x = x if x.meta["val"].dtype == dtype else localizer.copy(source, args=(x, dtype), target=aten.to.dtype)
    args = (x, dims, argument(node, "keepdim"))
    total = localizer.add(aten.sum.dim_IntList, args, node, name=f"{node.name}_sum", partial=True)
    count = prod(own[d].size for d in dims)
    return localizer.add(aten.div.Tensor, (total, count), node, name=node.name, partial=True)


# The proof


def over_placed(dims: Dims, *, partial: bool = False) -> proof.Rule:
    """Return the rule of an operator that needs ``dims(node, rank)`` whole, or else gives a `partial` sum."""

    def rule(node: fx.Node, placements: proof.Placements) -> proof.Found:
        own: Any = node.args[0]
        placement, rank = proof.read(own, placements), len(shape_of(own))
        over = [d % rank for d in dims(node, rank)]
        if partial and placement.dim in over and not proof.is_mixed(placement):
            return proof.PARTIAL
        proof.check_whole(own, placement, over)
        lost = placement is not proof.WHOLE and placement.dim is None and dim_map(node) != tuple(range(rank))
        return proof.spread(node, proof.UNKNOWN) if lost else move_placed(node, placements)

    return rule


def _over(dims: Dims, reason: str, **fields: Any) -> OperatorRules:
    """Return the record of an operator that keeps the shape and needs ``dims(node, rank)`` whole, for the `reason`.

    Further arguments, such as the weight of a norm, have just these dimensions.
    """

    def axes(axis_map: AxisMap, node: fx.Node) -> ax.Axes:
        own = axis_map.of(node.args[0])
        whole = [own[d] for d in dims(node, len(own))]
        for axis in whole:
            ax.block(axis, f"{called(node)} {reason}")
        for extra in node.all_input_nodes[1:]:
            for mine, axis in zip(axis_map.of(extra), whole, strict=True):
                ax.unify(mine, axis)
        return own

    return OperatorRules(axes=axes, placed=over_placed(dims), **fields)


def _normalized_dims(node: fx.Node, rank: int) -> range:
    return range(rank - len(node.args[1]), rank)  # type: ignore[arg-type]


_REDUCTION = OperatorRules(axes=mapped_axes("reduces over it"), placed=over_placed(reduced_dims), order=drop_order)
_SUM = replace(
    _REDUCTION,
    axes=mapped_axes("sums over it", _contract_sum),
    local=if_divided(_sum_local),
    placed=over_placed(reduced_dims, partial=True),
    keeps="nothing",
    traits=Trait.LINEAR | Trait.PADDING_SAFE | Trait.KNOWS_SIZE,
)
_CUMSUM = _over(lambda node, rank: [int(argument(node, "dim"))], RUNS, order=resize_order)
_NORM = _over(_normalized_dims, "normalises over it", order=rows_order, copies=contiguous_copies)
_MOVED = _over(lambda node, rank: argument(node, "dims") or range(rank), "moves along it")


RULES: Mapping[Any, OperatorRules] = {
    aten.sum: _SUM,
    aten.mean: replace(_SUM, axes=mapped_axes("reduces over it", _contract_sum), placed=over_placed(reduced_dims)),
    **dict.fromkeys((aten.amax, aten.amin, aten.any, aten.all), _REDUCTION),
    **dict.fromkeys((aten.var, aten.std, aten.norm, aten.linalg_vector_norm), _REDUCTION),
    aten.min: replace(_REDUCTION, order=None),
    aten.topk: OperatorRules(axes=_topk_axes, order=resize_order, keeps="nothing"),
    aten.cumsum: _CUMSUM,
    # No weights, instead of nan, for a query that sees no key.
    aten._safe_softmax: replace(_CUMSUM, keeps="result", traits=Trait.SOFTMAX),
    **dict.fromkeys((aten.layer_norm, aten.rms_norm), _NORM),
    **dict.fromkeys((aten.roll, aten.flip), _MOVED),
}
