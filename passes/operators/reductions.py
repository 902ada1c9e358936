"""Reductions, softmaxes and norms: operators over some dimensions of one tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import fx

from autoptd.passes.ir.nodes import argument, called, shape_of
from autoptd.passes.ir.views import contiguous_copies, dim_map, reduced_dims
from autoptd.passes.operators import axes as ax
from autoptd.passes.operators import proof
from autoptd.passes.operators.axis_map import RUNS, AxisMap
from autoptd.passes.operators.pieces import resize_order
from autoptd.passes.operators.products import rows_order
from autoptd.passes.operators.record import OperatorRules, Trait
from autoptd.passes.operators.views import drop_order, mapped_axes, move_placed
from autoptd.runtime import aten

Dims = Callable[[fx.Node, int], Iterable[int]]  # of a call with an argument of so many dimensions

# Axes


def _sum_axes(axis_map: AxisMap, node: fx.Node) -> Any:
    """Make the sum over one divided axis a partial sum; other reductions block their dimensions."""
    own, dims = axis_map.of(node.args[0]), dim_map(node)
    summed = [axis for d, axis in enumerate(own) if d not in dims]
    if len(summed) != 1:
        return mapped_axes("sums over it")(axis_map, node)
    axis_map.sum_over(node, *summed)
    return tuple(ax.Axis(1) if d is None else own[d] for d in dims)


# The proof


def over_placed(dims: Dims, *, partial: bool = False) -> Callable[[fx.Node, proof.Placements], proof.Found]:
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


def _moved_dims(node: fx.Node, rank: int) -> Iterable[int]:
    """Return the dimensions along which ``roll``, behind its shifts, or ``flip`` moves elements."""
    return argument(node, 1 + ("roll" in str(node.target)), "dims") or range(rank)


_REDUCTION = OperatorRules(
    axes=mapped_axes("reduces over it"), placed=over_placed(reduced_dims), order=drop_order
)
_MEAN = replace(_REDUCTION, keeps="nothing", traits=Trait.LINEAR)
_CUMSUM = _over(lambda node, rank: [int(argument(node, 1, "dim", -1))], RUNS, order=resize_order(1))
_SOFTMAX = replace(_CUMSUM, keeps="result", traits=Trait.SOFTMAX)
_NORM = _over(_normalized_dims, "normalises over it", order=rows_order, copies=contiguous_copies)

RULES: Mapping[Any, OperatorRules] = {
    aten.sum: replace(_MEAN, axes=_sum_axes, placed=over_placed(reduced_dims, partial=True)),
    aten.mean: _MEAN,
    **dict.fromkeys((aten.amax, aten.amin, aten.any, aten.all, aten.logsumexp), _REDUCTION),
    **dict.fromkeys((aten.var, aten.std, aten.norm, aten.linalg_vector_norm), _REDUCTION),
    **dict.fromkeys((aten.max, aten.min), replace(_REDUCTION, order=None)),
    aten.cumsum: _CUMSUM,
    aten.softmax: replace(_SOFTMAX, copies=contiguous_copies),
    aten.log_softmax: replace(_SOFTMAX, copies=contiguous_copies, traits=Trait.LOG_SOFTMAX),
    aten._softmax: _SOFTMAX,
    aten._log_softmax: replace(_SOFTMAX, traits=Trait.LOG_SOFTMAX),
    **dict.fromkeys((aten.layer_norm, aten.rms_norm), _NORM),
    **dict.fromkeys((aten.roll, aten.flip), _over(_moved_dims, "moves along it")),
}
