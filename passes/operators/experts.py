"""Mixtures of experts (`kernels.experts`): experts are divided over the tensor ranks, else the width of each is.

Tensor ranks have all tokens. Each computes the rows of its own experts, and the all-reduce behind ``combine`` adds up
what its ranks have of a token: as much as behind any row-parallel linear. Rows of experts are a ragged axis.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import fx

from autoptd.passes.ir.nodes import called, results_of, shape_of
from autoptd.passes.ir.products import find_products
from autoptd.passes.operators import axes as ax
from autoptd.passes.operators import products, proof
from autoptd.passes.operators.axis_map import AxisMap
from autoptd.passes.operators.layout import DimOrder, LayoutWriter, Written
from autoptd.passes.operators.localizer import Localizer, is_lone_sum, same_call
from autoptd.passes.operators.quantities import Value, Work
from autoptd.passes.operators.record import OperatorRules, Trait
from autoptd.runtime import collectives, kernels
from autoptd.runtime.program.placement import AxisPlacement, Ragged, Segment, Shard

# Axes


def _route_axes(axis_map: AxisMap, node: fx.Node) -> tuple[ax.Axes, ax.Axes]:
    """The experts are an axis of the counts, met by the weights, and the rows follow it."""
    tokens, slots = shape_of(node.args[1])  # type: ignore[arg-type]
    experts = ax.Axis(int(node.args[2]))  # type: ignore[arg-type]
    return (ax.Axis(tokens * min(slots, experts.size), "ragged", (experts,), each=tokens),), (experts,)


def _dispatch_axes(axis_map: AxisMap, node: fx.Node) -> ax.Axes:
    tokens, inner = axis_map.of(node.args[0])
    ax.block(tokens, f"{called(node)} picks from it")
    return (*axis_map.of(node.args[1]), inner)


def _linear_axes(axis_map: AxisMap, node: fx.Node) -> ax.Axes:
    """Relate [rows, in] x [experts, out, in] -> [rows, out]; `in` is contracted, or whole where a bias is added."""
    (product,) = find_products(node)
    rows, weight = axis_map.of(product.x), axis_map.of(product.weight)
    inner, outer = weight[product.contracted], weight[3 - product.contracted]
    (experts,) = axis_map.of(node.args[2])
    ax.unify(experts, weight[0])
    if ax.find(rows[0]).kind != "ragged":
        ax.block(experts, f"{called(node)} takes rows that the model has sorted")
    ax.unify(rows[1], inner)
    if product.bias is None:
        axis_map.sum_over(node, inner)
    else:
        ax.block(inner, f"{called(node)} contracts it and adds a bias")
        for pair in zip(axis_map.of(product.bias), (weight[0], outer), strict=True):
            ax.unify(*pair)
    return (rows[0], outer)


def _combine_axes(axis_map: AxisMap, node: fx.Node) -> ax.Axes:
    """Contract the experts, whose rows are those of a token."""
    rows, (tokens, slots), (order,) = map(axis_map.of, node.args)
    ax.unify(rows[0], order)
    ax.block(slots, f"{called(node)} sums over it")
    if ax.find(order).parts:
        axis_map.sum_over(node, *ax.find(order).parts)
    return (tokens, rows[1])


# One rank's call


def _route_local(localizer: Localizer, node: fx.Node) -> fx.Node:
    _, (experts,) = localizer.axis_map.all_of(node)
    rank, chosen, number, _ = map(localizer.whole, node.args)
    return localizer.copy(node, args=(rank, chosen, number, localizer.extent(experts)))


def _combine_local(localizer: Localizer, node: fx.Node) -> fx.Node:
    """Partial rows, of which each rank has a term, are combined as they are: a token then has one sum, and not k."""
    rows, *others = node.args
    if not is_lone_sum(localizer, rows):
        return same_call(localizer, node)
    args = (localizer.values[rows], *map(localizer.whole, others))  # type: ignore[index]
    return localizer.add(node.target, args, node, name=node.name, partial=True)


# The proof


def _route_placed(node: fx.Node, placements: proof.Placements) -> proof.Found:
    proof.refuse_partial(node, placements)
    _, chosen, number, own = node.args
    if proof.read(chosen, placements) is not proof.WHOLE:
        raise proof.misplaced("sorts", chosen, placements, "the experts of all tokens")
    parts = Segment(1, int(own), 1, True)  # type: ignore[arg-type]
    return (proof.WHOLE, proof.WHOLE) if own == number else (Ragged(0), Shard(0, (parts,)))


def _follow_rows(node: fx.Node, placements: proof.Placements, *others: Any) -> bool:
    """Return whether the rows of own experts are read; PlacementError unless all `others` are of these experts too."""
    along = [(each, proof.read(each, placements)) for each in others]
    divided = [placement for _, placement in along if placement.dim == 0]
    runs = {proof.describe_runs(placement) for placement in divided if placement.segments}
    if divided and (len(divided) < len(along) or len(runs) > 1):
        words = "; ".join(proof.describe(each, placements) for each in others)
        raise proof.PlacementError(f"reads {words}: expected all of the same experts, divided along dimension 0")
    return bool(divided)


def _dispatch_placed(node: fx.Node, placements: proof.Placements) -> AxisPlacement:
    x, order = (proof.read(given, placements) for given in node.args[:2])
    if x.dim == 0 or proof.UNKNOWN in (x, order) or (x.dim is not None and order.dim is not None):
        return proof.UNKNOWN
    return x if order is proof.WHOLE else order


def _linear_placed(node: fx.Node, placements: proof.Placements) -> AxisPlacement:
    (product,) = find_products(node)
    of_experts = [node.args[2], product.weight, *([] if product.bias is None else [product.bias])]
    if _follow_rows(node, placements, product.x, *of_experts):
        return proof.read(product.x, placements)
    return products.place_product(product, placements)


def _combine_placed(node: fx.Node, placements: proof.Placements) -> AxisPlacement:
    rows, gates, order = node.args
    if proof.read(gates, placements) is not proof.WHOLE:
        raise proof.misplaced("reads", gates, placements, "the gates of all tokens")
    return proof.PARTIAL if _follow_rows(node, placements, rows, order) else proof.read(rows, placements)


def _combine_partial(node: fx.Node, placements: proof.Placements) -> proof.Found:
    rows, *others = (proof.read(given, placements) for given in node.args)
    kept = rows is proof.PARTIAL and all(other is proof.WHOLE for other in others)
    return proof.PARTIAL if kept else proof.refuse_partial(node, placements)


def _sent_placed(node: fx.Node, placements: proof.Placements) -> proof.Found:
    """Rows that were routed to a tensor rank's experts, of which a rank then has a part; `given` are all counts."""
    rows, counts = (proof.read(argument, placements) for argument in node.args[1:3])
    if not (rows is counts is proof.WHOLE or (isinstance(rows, Ragged) and counts.dim == 0)):
        expected = "rows of tokens, and the counts of their route"
        raise proof.misplaced("sends to experts", node.args[1], placements, expected)
    _, own, given = results_of(node)
    whole = proof.WHOLE if counts is proof.WHOLE else Shard(1, (Segment(1, given.shape[1], 1, True),))
    return Ragged(0), Shard(0, (Segment(1, len(own), 1, True),)), whole


def _returned_placed(node: fx.Node, placements: proof.Placements) -> AxisPlacement:
    """Rows of experts, which are in the order of the tokens again; where all were sent, a rank has those of all."""
    rows, given = (proof.read(argument, placements) for argument in node.args[1:3])
    if isinstance(rows, Ragged) and (given is proof.WHOLE or given.dim == 1):
        return proof.WHOLE if given is proof.WHOLE else rows
    raise proof.misplaced("returns", node.args[1], placements, "rows of experts")


# The sequence-first layout: tokens are numbered as they lie in what is routed


def _route_order(writer: LayoutWriter, node: fx.Node) -> Written:
    rank, chosen, *numbers = node.args
    return writer.write((writer.value(rank), writer.value(chosen), *numbers)), False


def _find_tokens(writer: LayoutWriter, order: Any) -> DimOrder:
    """Return the order of the tokens that were routed."""
    return writer.order(order.args[0].args[1])


def _dispatch_order(writer: LayoutWriter, node: fx.Node) -> Written:
    x, order, slots = node.args
    return writer.write((writer.fit(x, _find_tokens(writer, order)), writer.value(order), slots)), False


def _combine_order(writer: LayoutWriter, node: fx.Node) -> Written:
    rows, gates, order = node.args
    tokens = _find_tokens(writer, order)
    return writer.write((writer.value(rows), writer.fit(gates, tokens), writer.value(order))), tokens.transposed


# Costs


def _exchange(node: fx.Node, value: Value, *_: Any) -> Work:
    """An all-to-all of as many rows as a rank sends if all experts have as many, and their sort by expert."""
    rows: Any = node.args[1]
    size = products.expect_rows(node.args[2], rows, value) * value.shape(rows)[1] * rows.meta["val"].itemsize
    return Work(read=2 * size, written=2 * size, dispatched=size, launches=4)


EXCHANGES = (collectives.send_to_experts, collectives.return_from_experts)
_ANY = Trait.ANY_PLACEMENT
_EXCHANGE = OperatorRules(work=_exchange, backward=_exchange, traits=_ANY)

RULES: Mapping[Any, OperatorRules] = {
    collectives.send_to_experts: replace(_EXCHANGE, placed=_sent_placed),
    collectives.return_from_experts: replace(_EXCHANGE, placed=_returned_placed, traits=_ANY | Trait.SUMS_RANKS),
    kernels.route: OperatorRules(
        axes=_route_axes, local=_route_local, placed=_route_placed, order=_route_order, traits=_ANY
    ),
    kernels.dispatch: OperatorRules(
        axes=_dispatch_axes, placed=_dispatch_placed, order=_dispatch_order, keeps="nothing"
    ),
    kernels.grouped_linear: replace(products.PRODUCT, axes=_linear_axes, placed=_linear_placed),
    kernels.combine: OperatorRules(
        axes=_combine_axes,
        local=_combine_local,
        placed=_combine_placed,
        of_partial=_combine_partial,
        order=_combine_order,
    ),
}
