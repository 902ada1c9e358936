"""The work of operators that do not multiply: lookups, collectives, losses, and all that memory bounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from autoptd.passes.cost.product_work import statistics
from autoptd.passes.cost.quantities import Value, Work, tensor_arguments
from autoptd.passes.ir.nodes import argument, has_gradients, shape_of
from autoptd.runtime import aten, collectives, kernels


def largest(node: fx.Node, operands: Sequence[fx.Node]) -> fx.Node:
    """Return the node, or an operand with more elements than its results: a reduction reads them all."""

    def count(node: fx.Node) -> int:
        value = node.meta["val"]
        return sum(v.numel() for v in (value if isinstance(value, (tuple, list)) else [value]))

    return max((node, *operands), key=count)


# Lookups, collectives, losses


def _forward_embedding(node: fx.Node, value: Value) -> Work:
    """Of the table only the rows looked up; a divided table's are masked once more."""
    ids = tensor_arguments(node)[1]
    passes = 2 if node.target is kernels.embedding else 1
    size = passes * value.bytes(node)
    return Work(read=size + value.bytes(ids), written=size, launches=passes)


def _differentiate_embedding(node: fx.Node, value: Value, wanted: Sequence[fx.Node]) -> Work:
    """A whole table of zeros, to whose rows gradients are added."""
    table, ids = tensor_arguments(node)[:2]
    passes = 2 if node.target is kernels.embedding else 1
    size = value.bytes(node)
    return Work(
        elementwise=value.count(node),
        read=(passes + 1) * size + value.bytes(ids),
        written=value.bytes(table) + passes * size,
        launches=passes + 1,
    )


def _all_reduce(node: fx.Node, value: Value, *_: Any) -> Work:
    """An all-reduce of the value, in a copy of it."""
    size = value.bytes(node)
    return Work(read=size, written=size, reduced=size, launches=2)


def no_work(node: fx.Node, value: Value, *_: Any) -> Work:
    return Work()


def _forward_loss(node: fx.Node, value: Value) -> Work:
    """The vocabulary-parallel loss reads the logits once, and reduces three wide numbers per row."""
    logits, target = tensor_arguments(node)[:2]
    size = statistics(logits, value)
    return Work(
        elementwise=value.count(logits),
        read=value.bytes(logits) + value.bytes(target),
        written=2 * size,
        reduced=3 * size,
        launches=1,
    )


def _forward_whole_loss(node: fx.Node, value: Value) -> Work:
    """log_softmax, whose result is kept, and the loss of it."""
    logits, target = tensor_arguments(node)[:2]
    size = value.bytes(logits)
    return Work(elementwise=value.count(logits), read=size + value.bytes(target), written=size, launches=2)


def _differentiate_whole_loss(node: fx.Node, value: Value, wanted: Sequence[fx.Node]) -> Work:
    """The loss's gradient, zero but for the targets, and log_softmax's from it and its result."""
    logits = tensor_arguments(node)[0]
    size = value.bytes(logits)
    return Work(elementwise=value.count(logits), read=2 * size, written=2 * size, launches=2)


# All other operators


def compute(node: fx.Node, value: Value) -> Work:
    """Read the arguments, write the results."""
    operands = tensor_arguments(node)
    return Work(
        elementwise=value.count(largest(node, operands)),
        read=sum(map(value.bytes, operands)),
        written=value.bytes(node),
        launches=1,
    )


def differentiate(node: fx.Node, value: Value, wanted: Sequence[fx.Node]) -> Work:
    """Read the results' gradients and what was kept, write the arguments' gradients."""
    kept = _kept(node)
    handed = [source for source in wanted if _is_handed_on(node, source)]
    made = [source for source in wanted if source not in handed]
    if not made:
        return Work()
    return Work(
        elementwise=value.count(largest(node, made)),
        read=value.bytes(node) + sum(map(value.bytes, kept)),
        written=sum(map(value.bytes, made)),
        launches=1,
    )


def _differentiate_view(node: fx.Node, value: Value, wanted: Sequence[fx.Node]) -> Work:
    """The gradient of a part, or of parts: its argument's, whole, is made of them."""
    (source,) = wanted
    return Work(read=value.bytes(node), written=value.bytes(source), launches=1)


def _kept(node: fx.Node) -> list[fx.Node]:
    """Return the values that the backward reads besides the gradient."""
    differentiable = [source for source in tensor_arguments(node) if has_gradients(source.meta["val"])]
    if node.target in _KEEPS_RESULT:
        return [node]
    if node.target is kernels.rotary_embedding:
        return differentiable[1:]
    scaled = len(differentiable) == 1 and node.target in (aten.mul.Tensor, aten.div.Tensor)
    return [] if scaled or node.target in _KEEPS_NOTHING else differentiable


def _differentiate_norm(node: fx.Node, value: Value, wanted: Sequence[fx.Node]) -> Work:
    """Of a sum and its norm: reads both gradients and the sum; x and the residual share theirs but for a dropout."""
    x: Any = node.args[1]
    large = [source for source in wanted if shape_of(source) == shape_of(x)]
    dropped = bool(argument(node, _NORM_P[node.target], "p", 0.0))
    made = large if dropped else large[:1]
    made += [source for source in wanted if source not in large]
    return Work(
        elementwise=value.count(node),
        read=value.bytes(node) + value.bytes(x),
        written=sum(map(value.bytes, made)),
        launches=1,
    )


def _is_handed_on(node: fx.Node, source: fx.Node) -> bool:
    """Whether the gradient of an argument is the result's own: a sum's, where nothing was broadcast."""
    own, made = source.meta["val"], node.meta["val"]
    if node.target in _SUMS:
        return bool(own.shape == made.shape and own.dtype == made.dtype)
    if node.target is kernels.bias_dropout_add:
        dropped = bool(argument(node, 4, "p", 0.0))
        return own.shape == made.shape and (source is argument(node, 3, "residual") or not dropped)
    return False


_NORM_P: Mapping[Any, int] = {kernels.add_layer_norm: 7, kernels.add_rms_norm: 6}
_SUMS = (aten.add.Tensor, aten.sub.Tensor)
_KEEPS_NOTHING = {
    *_SUMS, aten.rsub.Scalar, aten.add.Scalar, aten.sub.Scalar, aten.mul.Scalar, aten.div.Scalar, aten.neg.default,
    aten.to.dtype, aten.to.dtype_layout, aten._to_copy.default, aten.clone.default, aten.contiguous.default,
    aten.masked_fill.Scalar, aten.masked_fill.Tensor, aten.where.self, aten.cat.default, aten.stack.default,
    aten.sum.dim_IntList, aten.mean.dim, aten.repeat_interleave.self_int, aten.index.Tensor,
    kernels.dropout, kernels.bias_dropout_add,
}  # fmt: skip
_KEEPS_RESULT = {
    aten.softmax.int, aten._softmax.default, aten.log_softmax.int, aten._log_softmax.default, aten.tanh.default,
    aten.exp.default, aten.sigmoid.default, aten.relu.default, aten.sqrt.default, aten.rsqrt.default,
    kernels.scaled_softmax,
}  # fmt: skip

FORWARDS: Mapping[Any, Callable[[fx.Node, Value], Work]] = {
    aten.embedding.default: _forward_embedding,
    kernels.embedding: _forward_embedding,
    collectives.reduce_from_tensor: _all_reduce,
    kernels.cross_entropy: _forward_loss,
    aten.cross_entropy_loss.default: _forward_whole_loss,
}
BACKWARDS: Mapping[Any, Callable[[fx.Node, Value, Sequence[fx.Node]], Work]] = {
    aten.embedding.default: _differentiate_embedding,
    kernels.embedding: _differentiate_embedding,
    collectives.reduce_from_tensor: no_work,
    collectives.copy_to_tensor: _all_reduce,
    aten.cross_entropy_loss.default: _differentiate_whole_loss,
    **dict.fromkeys(_NORM_P, _differentiate_norm),
    **dict.fromkeys(
        [
            aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default, aten.unbind.int,
            aten.slice.Tensor, aten.narrow.default, aten.select.int, aten.expand.default, collectives.take_own,
        ],
        _differentiate_view,
    ),
}  # fmt: skip
