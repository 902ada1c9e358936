"""Attention: fused, grouped, its softmax alone, and rotary positions."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

from torch import fx

from autoptd.passes.ir.nodes import argument, called, change_info, shape_of
from autoptd.passes.ir.views import float_bytes
from autoptd.passes.operators import axes as ax
from autoptd.passes.operators import proof
from autoptd.passes.operators.axis_map import ATTENTION, AxisMap, broadcast
from autoptd.passes.operators.layout import users_order
from autoptd.passes.operators.localizer import Localizer, key_mask, same_call
from autoptd.passes.operators.quantities import Number, Product, Value, Work, differentiate, tensor_arguments
from autoptd.passes.operators.record import OperatorRules, Trait
from autoptd.runtime import aten, collectives, kernels
from autoptd.runtime.program.placement import AxisPlacement, Placement, Shard

# Axes


def attention_axes(axis_map: AxisMap, node: fx.Node) -> ax.Axes:
    """Attention ties batch and heads of q, k, v and the mask, and blocks sequence and head size."""
    q, k, v = (t for t in node.args[:3] if isinstance(t, fx.Node))
    mask = argument(node, "attn_mask")
    sizes = [axis_map.of(t) for t in (q, k, v)]
    reason = f"{called(node)} {ATTENTION}"
    (length, size), (keys, key_size), (values, value_size) = (s[-2:] for s in sizes)
    ax.unify(keys, values)
    ax.unify(size, key_size)
    for axis in (length, keys, size, value_size):
        ax.block(axis, reason)
    leading = [(t, s[:-2]) for t, s in zip((q, k, v), sizes, strict=True)]
    if mask is not None:
        own = axis_map.of(mask)
        leading.append((mask, own[:-2]))
        for axis, score in zip(own[-2:], (length, keys), strict=True):
            if axis.size != 1:
                ax.unify(axis, score)
    return (*axis_map.align_leading(node, leading), length, value_size)


def _packed_axes(axis_map: AxisMap, node: fx.Node) -> ax.Axes:
    """Attention inside of documents: their numbers lie along the sequence, and the batch unless samples share them."""
    own = attention_axes(axis_map, node)
    documents = axis_map.of(argument(node, "documents"))
    for axis, mine in zip(reversed(documents), (own[-2], own[0]), strict=False):
        if axis.size != 1:
            ax.unify(axis, mine)
    return own


def _softmax_axes(axis_map: AxisMap, node: fx.Node) -> ax.Axes:
    """The mask spreads over the scores; queries and keys stay whole."""
    own = broadcast(axis_map, node)
    for axis in own[-2:]:
        ax.block(axis, f"{called(node)} {ATTENTION}")
    return own


# One rank's call


def attention_local(localizer: Localizer, node: fx.Node) -> fx.Node:
    """Attention over this rank's heads; of replicated keys and values each rank takes those of its heads first."""
    heads = localizer.axis_map.of(node)[-3:-2]
    replicated = {t: dim for (at, t), dim in localizer.axis_map.kv_heads.items() if at is node}
    if not replicated or not localizer.is_divided(heads):
        return same_call(localizer, node)
    own = {tensor: _take_heads(localizer, node, tensor, dim) for tensor, dim in replicated.items()}
    args = fx.map_arg(node.args, lambda n: own.get(n) or localizer.whole(n))
    kwargs = {k: v for k, v in node.kwargs.items() if k != "enable_gqa"}
    return localizer.copy(node, args=args, kwargs=fx.map_arg(kwargs, localizer.whole))


def _take_heads(localizer: Localizer, node: fx.Node, tensor: fx.Node, dim: int) -> fx.Node:
    """Repeat grouped keys or values to the number of query heads, then take this rank's."""
    axes = localizer.axis_map.of(tensor)
    whole = (*axes[:dim], localizer.axis_map.of(node)[-3], *axes[dim + 1 :])
    value, found, heads = localizer.whole(tensor), shape_of(tensor)[dim], whole[dim].size
    if found != heads:
        repeat = (value, heads // found, dim)
        value = localizer.add(aten.repeat_interleave.self_int, repeat, node, name=f"{tensor.name}_repeated")
        localizer.named[value.name] = (whole,)
    own = localizer.add(collectives.take_own, (localizer.rank, value, dim), node, name=f"{tensor.name}_own")
    change_info(own, placement=Placement(tensor=Shard(dim)))
    localizer.named[own.name] = (whole,)
    return own


def keyed_local(localizer: Localizer, node: fx.Node) -> fx.Node:
    """Say along which axes numbers, or the mask of a dropout, or of a softmax with one, are keyed."""
    new = same_call(localizer, node)
    if node.target is not kernels.scaled_softmax or argument(node, "p"):
        new.kwargs = {**new.kwargs, **key_mask(localizer, node)}
    return new


# The proof


def _placed(node: fx.Node, placements: proof.Placements) -> AxisPlacement:
    """Attention is done head by head: heads may be divided, positions and head size not."""
    tensors = tensor_arguments(node)
    for tensor in tensors:
        placement = proof.read(tensor, placements)
        if placement.dim is not None and placement.dim >= len(shape_of(tensor)) - 2:
            raise proof.misplaced("attends over", tensor, placements, "positions and head size whole on every rank")
    spread = [(tensor, _spread_heads(tensor, node, placements)) for tensor in tensors]
    return proof.merge(spread, shape_of(node))


def _spread_heads(tensor: fx.Node, node: fx.Node, placements: proof.Placements) -> AxisPlacement:
    """The placement of queries, keys, values or a mask, where each of their heads serves several of the result's."""
    placement, own, result = proof.read(tensor, placements), shape_of(tensor), shape_of(node)
    if placement.dim is None:
        return placement
    dim = placement.dim + len(result) - len(own)
    times = result[dim] // own[placement.dim]
    segments = tuple(replace(part, inner=part.inner * times) for part in placement.segments)
    return replace(placement, dim=dim, segments=segments, extent=placement.extent if times == 1 else None)


def _softmax_placed(node: fx.Node, placements: proof.Placements) -> AxisPlacement:
    proof.refuse_partial(node, placements)
    placement = _placed(node, placements)
    if argument(node, "p"):
        proof.check_key(placement, argument(node, "divided"), argument(node, "shape"))
    return placement


def _rotary_placed(node: fx.Node, placements: proof.Placements) -> AxisPlacement:
    """The last dimension is turned, by tables of it: nothing is proved of one that is divided."""
    placement = proof.read(node.args[0], placements)
    return proof.UNKNOWN if placement.dim == len(shape_of(node)) - 1 else placement


# Costs


def _products(node: fx.Node, value: Value) -> Iterable[Product]:
    """Queries by keys, and the weights by the values."""
    q, k, v = (value.shape(factor) for factor in node.args[:3])  # type: ignore[arg-type]
    batch, queries, keys = prod(q[:-2]), q[-2], k[-2]
    share = 0.5 if argument(node, "is_causal", node.target is kernels.packed_attention) else 1.0
    yield Product(batch, queries, keys, q[-1], share=share)
    yield Product(batch, queries, v[-1], keys, share=share)


def _attend(node: fx.Node, value: Value) -> Work:
    """Return the work of attention whose scores stay on the chip, with a statistic per row (FlashAttention, 2022)."""
    read = sum(map(value.bytes, tensor_arguments(node)))
    written = value.bytes(node) + value.statistics(node)
    products = tuple(_products(node, value))
    return Work(products, _exponentials(products[0]), read, written, launches=1)


def _attend_backward(node: fx.Node, value: Value, wanted: Sequence[fx.Node]) -> Work:
    """Return the work of the scores again and four products, after each row's sum of gradient times result."""
    scores, context = _products(node, value)
    batch, queries, keys, size = scores.batch, scores.rows, scores.columns, scores.inner
    make = partial(Product, batch, share=scores.share)
    products = (
        make(queries, keys, size, repeated=True),
        make(queries, keys, context.columns),  # of the weights
        make(keys, context.columns, queries),  # of the values
        make(queries, size, keys),  # of the queries
        make(keys, size, queries),  # of the keys
    )
    kept = value.statistics(node)
    read = sum(map(value.bytes, tensor_arguments(node))) + 3 * value.bytes(node) + 2 * kept
    written = sum(map(value.bytes, wanted)) + kept
    elementwise = 2 * _exponentials(scores) + value.count(node)  # and their gradients
    return Work(products, elementwise, read, written, launches=2)


def _exponentials(scores: Product) -> Number:
    return scores.share * scores.batch * scores.rows * scores.columns


def _rotary_backward(node: fx.Node, value: Value, wanted: Sequence[fx.Node]) -> Work:
    """Only the tables are kept."""
    return differentiate(node, value, wanted, node.all_input_nodes[1:])


def _copies(given: Sequence[Any], value: Any) -> int:
    return sum(float_bytes(x) for x in given[:3] if x.stride(-1) != 1)


_FUSED = OperatorRules(
    placed=_placed, work=_attend, backward=_attend_backward, copies=_copies, traits=Trait.FUSED_ATTENTION
)
_ATTENTION = replace(_FUSED, local=attention_local, order=users_order)
_SOFTMAX = OperatorRules(axes=_softmax_axes, local=keyed_local, placed=_softmax_placed, order=users_order)
RULES: Mapping[Any, OperatorRules] = {
    aten.scaled_dot_product_attention: replace(_ATTENTION, axes=attention_axes),
    kernels.grouped_attention: _FUSED,
    kernels.packed_attention: replace(_ATTENTION, axes=_packed_axes),
    kernels.scaled_softmax: replace(_SOFTMAX, keeps="result", traits=Trait.SOFTMAX | Trait.ANY_PLACEMENT),
    kernels.rotary_embedding: OperatorRules(placed=_rotary_placed, backward=_rotary_backward),
}
