"""Our kernels: packed and activated linears, dropout, and norms of sums (attention and vocabulary have families)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from autoptd.passes.ir.nodes import argument, called, shape_of
from autoptd.passes.ir.products import bound_arguments
from autoptd.passes.operators import axes as ax
from autoptd.passes.operators import products
from autoptd.passes.operators.attention import keyed_local
from autoptd.passes.operators.axis_map import AxisMap, broadcast
from autoptd.passes.operators.layout import LayoutWriter, Written, plain_dim
from autoptd.passes.operators.pointwise import elementwise_order
from autoptd.passes.operators.quantities import Value, Work, differentiate
from autoptd.passes.operators.record import OperatorRules, Trait
from autoptd.passes.operators.reductions import over_placed
from autoptd.passes.operators.shares import (
    WHOLE,
    Found,
    Shares,
    aligned,
    check_key,
    check_whole,
    elementwise,
    merge,
    read,
    refuse_partial,
    spread,
)
from autoptd.runtime import kernels

# Linears


def _split_axes(axis_map: AxisMap, node: fx.Node) -> ax.Axes:
    """Relate [.., in] x [n * out, in] -> [n, .., out]: the inputs are needed whole, as the bias is added here."""
    *rows, outer = products.linear_axes(axis_map, node)
    ax.block(axis_map.contractions.pop(node), f"{called(node)} contracts it and adds a bias")
    count, *_, size = shape_of(node)
    pair = ax.regroup([outer], [count, size])
    if pair is None:
        ax.block(outer, f"{called(node)} takes it apart")
        pair = [ax.Axis(count), ax.Axis(size, blocked=f"{called(node)} makes it")]
    ax.block(pair[0], f"{called(node)} takes it apart")
    return (pair[0], *rows, pair[1])


def _split_order(writer: LayoutWriter, node: fx.Node) -> Written:
    order = writer.order(node.args[0])
    if order.holds(-1):
        return None
    count, *_, size = shape_of(node)
    new = writer.write((writer.value(node.args[0]), *fx.map_arg(node.args[1:], writer.restore)))
    return new, replace(order, dims=(plain_dim(count), *order.dims[:-1], plain_dim(size)))


def gelu_work(node: fx.Node, value: Value) -> Work:
    """Return the work of a product, and of a kernel that adds the bias and activates."""
    size = value.bytes(node)
    return products.multiply(node, value) + Work(
        elementwise=value.count(node), read=size, written=size, launches=1
    )


def _gelu_backward(node: fx.Node, value: Value, wanted: Sequence[fx.Node]) -> Work:
    return sum(products.gelu_gradients(node, value, wanted), Work())


# Dropout


def _dropout_placed(node: fx.Node, shares: Shares) -> Found:
    refuse_partial(node, shares)
    share = read(node.args[1], shares)
    check_key(share, argument(node, 5, "divided"))
    return share


def _sum_placed(node: fx.Node, shares: Shares) -> Found:
    """dropout(x + bias) + residual, and perhaps the norm of it, which runs over the last dimension."""
    refuse_partial(node, shares)
    given = bound_arguments(node)
    terms = [given[name] for name in ("x", "bias", "residual") if isinstance(given.get(name), fx.Node)]
    shape = shape_of(given["x"])
    share = merge([(term, aligned(term, shape, shares)) for term in terms], shape)
    if given.get("p", 0):
        check_key(share, given.get("divided"))
    if "weight" in given:
        check_whole(given["x"], share, [len(shape) - 1])
    return share if share is WHOLE else spread(node, share)


def _sum_backward(node: fx.Node, value: Value, wanted: Sequence[fx.Node]) -> Work:
    """The gradients of the residual, and of x without a dropout, are the result's own."""
    given = bound_arguments(node)
    dropped, shape = bool(given.get("p", 0.0)), shape_of(node)
    made = [
        source
        for source in wanted
        if shape_of(source) != shape or (source is not given.get("residual") and dropped)
    ]
    return differentiate(node, value, made, ())


def _norm_backward(node: fx.Node, value: Value, wanted: Sequence[fx.Node]) -> Work:
    """Of a sum and its norm: reads both gradients and the sum; x and the residual share theirs but for a dropout."""
    given = bound_arguments(node)
    x = given["x"]
    large = [source for source in wanted if shape_of(source) == shape_of(x)]
    made = large if given.get("p", 0.0) else large[:1]
    return differentiate(node, value, made + [source for source in wanted if source not in large], [x])


_LINEAR = OperatorRules(
    placed=products.product_placed,
    work=products.multiply,
    backward=products.multiply_backward,
    copies=products.row_copies,
)
_ELEMENTWISE = OperatorRules(placed=elementwise)
_NORM = OperatorRules(placed=over_placed(lambda node, rank: [rank - 1]))
_SUM = OperatorRules(placed=_sum_placed, backward=_norm_backward, traits=Trait.ANY_SHARE)

RULES: Mapping[Any, OperatorRules] = {
    kernels.split_linear: replace(_LINEAR, axes=_split_axes, order=_split_order),
    kernels.linear_gelu: replace(_LINEAR, work=gelu_work, backward=_gelu_backward),
    **dict.fromkeys((kernels.bias_gelu, kernels.gated_product), _ELEMENTWISE),
    kernels.dropout: OperatorRules(
        axes=broadcast,
        local=keyed_local,
        placed=_dropout_placed,
        order=elementwise_order,
        keeps="nothing",
        traits=Trait.ANY_SHARE,
    ),
    kernels.bias_dropout_add: replace(_SUM, backward=_sum_backward),
    **dict.fromkeys((kernels.add_layer_norm, kernels.add_rms_norm), _SUM),
    **dict.fromkeys((kernels.layer_norm, kernels.rms_norm), _NORM),
}
