"""Reductions, softmaxes and norms: operators over some dimensions of one tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import fx

from autoptd.passes.ir.nodes import argument, called, dim_place, named_dims, reduced_dims, shape_of
from autoptd.passes.ir.strides import contiguous_copies
from autoptd.passes.operators import axes as ax
from autoptd.passes.operators.axes import Axes, Axis
from autoptd.passes.operators.axis_map import RUNS, AxisMap
from autoptd.passes.operators.layout_writer import LayoutWriter, Written
from autoptd.passes.operators.pieces import replace_dim, resize_order
from autoptd.passes.operators.products import over_last_order
from autoptd.passes.operators.record import OperatorRules, Trait
from autoptd.passes.operators.shares import (
    PARTIAL,
    UNKNOWN,
    Found,
    Shares,
    check_whole,
    is_mixed,
    read,
    spread,
)
from autoptd.passes.operators.views import settled
from autoptd.runtime import aten

Dims = Callable[[fx.Node, int], Iterable[int]]  # of a call with an argument of so many dimensions

# Axes


def _sum_axes(axis_map: AxisMap, node: fx.Node) -> Axes:
    """Make the sum over one divided axis a partial sum; other reductions block their dimensions."""
    own = axis_map.of(node.args[0])
    dims = reduced_dims(node, len(own))
    if len(dims) == 1:
        axis_map.sum_over(node, own[dims[0]])
    else:
        for d in dims:
            ax.block(own[d], f"{called(node)} sums over it")
    return _reduced(node, own, dims)


def _reduce_axes(axis_map: AxisMap, node: fx.Node) -> Any:
    """Mean, maximum and the like need the whole dimension; some say where it is too."""
    own = axis_map.of(node.args[0])
    dims = reduced_dims(node, len(own))
    for d in dims:
        ax.block(own[d], f"{called(node)} reduces over it")
    reduced = _reduced(node, own, dims)
    value = node.meta["val"]
    return (reduced,) * len(value) if isinstance(value, (tuple, list)) else reduced


def _reduced(node: fx.Node, own: Axes, dims: list[int]) -> Axes:
    if _keeps_rank(node):
        return tuple(Axis(1) if d in dims else a for d, a in enumerate(own))
    return tuple(a for d, a in enumerate(own) if d not in dims)


def _keeps_rank(node: fx.Node) -> bool:
    """Whether the result, or each of several, has as many dimensions as the argument."""
    value = node.meta["val"]
    first = value[0] if isinstance(value, (tuple, list)) else value
    return bool(first.dim() == len(shape_of(node.args[0])))  # type: ignore[arg-type]


def _softmax_axes(axis_map: AxisMap, node: fx.Node) -> Axes:
    """Softmax, cumulative sums: the shape stays, the dimension is needed whole."""
    own = axis_map.of(node.args[0])
    ax.block(own[int(argument(node, 1, "dim", -1))], f"{called(node)} {RUNS}")
    return own


def _norm_axes(axis_map: AxisMap, node: fx.Node) -> Axes:
    own = axis_map.of(node.args[0])
    normalized = own[-len(node.args[1]) :]  # type: ignore[arg-type]
    for axis in normalized:
        ax.block(axis, f"{called(node)} normalises over it")
    for extra in node.all_input_nodes:
        if extra is not node.args[0]:
            for mine, axis in zip(axis_map.of(extra), normalized, strict=True):
                ax.unify(mine, axis)
    return own


# The proof


def over_placed(dims: Dims) -> Callable[[fx.Node, Shares], Found]:
    """Return the rule of an operator that keeps the shape and needs ``dims(node, rank)`` whole."""

    def rule(node: fx.Node, shares: Shares) -> Found:
        own: Any = node.args[0]
        share, rank = read(own, shares), len(shape_of(own))
        check_whole(own, share, [d % rank for d in dims(node, rank)])
        return share

    return rule


def _reduce_placed(partial: bool) -> Callable[[fx.Node, Shares], Found]:
    """Return the rule of a reduction; over a divided dimension a sum is `partial`, others are refused."""

    def rule(node: fx.Node, shares: Shares) -> Found:
        own: Any = node.args[0]
        share, rank = read(own, shares), len(shape_of(own))
        dims = reduced_dims(node, rank)
        if share.dim is None:
            return spread(node, UNKNOWN)
        if share.dim in dims:
            if not partial or is_mixed(share):
                check_whole(own, share, dims)
            return spread(node, PARTIAL)
        gone = 0 if _keeps_rank(node) else sum(d < share.dim for d in dims)
        return spread(node, replace(share, dim=share.dim - gone))

    return rule


# The sequence-first layout


def _reduce_order(writer: LayoutWriter, node: fx.Node) -> Written:
    """Sums and the like over named dimensions, or all."""
    order = writer.order(node.args[0])
    rank = len(order.dims)
    given, dims = named_dims(node), reduced_dims(node, rank)
    kept = bool(rank) and len(shape_of(node)) == rank
    halved = not order.merged and sum(map(order.holds, dims)) == 1
    placed: Any = [order.place(d) for d in dims]
    args, kwargs = node.args, dict(node.kwargs)
    if given is not None and order.transposed:
        args, kwargs = replace_dim(node, dim_place(node), placed[0] if isinstance(given, int) else placed)
    new = writer.write((writer.value(node.args[0]), *args[1:]), kwargs)
    out = order if kept else order.without(dims)
    for d in dims if kept else ():
        out = out.replaced(d, ())
    if kept and halved and order.pair is not None:
        new = writer.permute(new, order.permutation, f"{node.name}_bs")
    return new, settled(replace(out, transposed=order.transposed and not halved))


def _softmax_dims(node: fx.Node, rank: int) -> list[int]:
    return [int(argument(node, 1, "dim", -1))]


def _normalized_dims(node: fx.Node, rank: int) -> range:
    return range(rank - len(node.args[1]), rank)  # type: ignore[arg-type]


_REDUCTION = OperatorRules(axes=_reduce_axes, placed=_reduce_placed(False), order=_reduce_order)
_MEAN = replace(_REDUCTION, keeps="nothing", traits=Trait.LINEAR)
_CUMSUM = OperatorRules(axes=_softmax_axes, placed=over_placed(_softmax_dims), order=resize_order(1))
_SOFTMAX = replace(_CUMSUM, keeps="result", traits=Trait.SOFTMAX)
_NORM = OperatorRules(
    axes=_norm_axes, placed=over_placed(_normalized_dims), order=over_last_order, copies=contiguous_copies
)

RULES: Mapping[Any, OperatorRules] = {
    aten.sum: replace(_MEAN, axes=_sum_axes, placed=_reduce_placed(True)),
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
}
