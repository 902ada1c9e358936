"""Shares through products and reductions: what is contracted over a divided dimension is a partial sum."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from autoptd.check.share_views import aligned, describe, merge, read, spread, take
from autoptd.check.shares import PARTIAL, UNKNOWN, WHOLE, Found, Rule, Share, ShareError, Shares
from autoptd.passes.ir.nodes import argument, reduced_dims, shape_of
from autoptd.runtime import collectives


def linear(node: fx.Node, shares: Shares) -> Share:
    """Prove [.., in] x [out, in]: the weight's dimension 1 is contracted."""
    x, weight = node.args[0], node.args[1]
    return _linear(shape_of(node), shares, x, weight, argument(node, 2, "bias"), False)


def linear_gelu(node: fx.Node, shares: Shares) -> Share:
    """Prove [.., in] x [out, in] with its bias."""
    x, weight, bias = node.args[:3]
    return _linear(shape_of(node), shares, x, weight, bias, argument(node, 4, "transposed", False))


def split_linear(node: fx.Node, shares: Shares) -> Share:
    """Prove [.., in] x [n * out, in] -> [n, .., out]: the outputs may be divided within each of the n sections."""
    x, weight, bias = node.args[:3]
    return _split_linear(shape_of(node), shares, x, weight, bias, argument(node, 4, "transposed", False))


def copied(node: fx.Node, shares: Shares) -> Found:
    """Return the share of a linear, or of each of several, of a whole x."""
    target, (x, weight, *given) = node.target, node.args[1:]
    transposed = argument(node, 5 if target in _COUNTED else 4, "transposed", False)
    if target is collectives.copied_split_linear:
        return _split_linear(shape_of(node), shares, x, weight, given[0], transposed)
    if target is not collectives.copied_linears:
        return _linear(shape_of(node), shares, x, weight, argument(node, 3, "bias"), transposed)
    weights: Any = weight
    biases = argument(node, 3, "biases") or [None] * len(weights)
    found = tuple(
        _linear(tuple(value.shape), shares, x, weight, bias, transposed)
        for value, weight, bias in zip(node.meta["val"], weights, biases, strict=True)
    )
    return WHOLE if all(share is WHOLE for share in found) else found


# What has one more argument before `transposed`.
_COUNTED = (collectives.copied_linear_gelu, collectives.copied_split_linear)


def _linear(result: Sequence[int], shares: Shares, x: Any, weight: Any, bias: Any, transposed: Any) -> Share:
    """[.., in] x [out, in], or x [in, out] where `transposed`, to a `result` of that shape."""
    contracted = 0 if transposed else 1
    return _product(result, shares, x, weight, contracted, {1 - contracted: len(result) - 1}, bias)


def _split_linear(
    result: Sequence[int], shares: Shares, x: Any, weight: Any, bias: Any, transposed: Any
) -> Share:
    count, size, last = result[0], result[-1], len(result) - 1
    share = _linear(result, shares, x, weight, bias, transposed)
    if share.dim != last:
        return share
    own = replace(share, dim=0 if not transposed else 1)
    first, *rest = (take(weight, own, section * size, size) for section in range(count))
    if any(other != first for other in rest):
        return UNKNOWN
    return first if first.dim is None else replace(first, dim=last)


def addmm(node: fx.Node, shares: Shares) -> Share:
    return _matmul(node, shares, node.args[1], node.args[2], node.args[0])


def matmul(node: fx.Node, shares: Shares) -> Share:
    return _matmul(node, shares, node.args[0], node.args[1], None)


def _matmul(node: fx.Node, shares: Shares, x: Any, y: Any, bias: Any) -> Share:
    rank, own = len(shape_of(node)), len(shape_of(y))
    if own < 2 or len(shape_of(x)) < 2:
        return UNKNOWN
    outer = {d: d + rank - own for d in range(own) if d != own - 2}
    return _product(shape_of(node), shares, x, y, own - 2, outer, bias)


def _product(
    result: Sequence[int],
    shares: Shares,
    x: Any,
    y: Any,
    contracted: int,
    outer: Mapping[int, int],
    bias: Any,
) -> Share:
    """x's last dimension with y's `contracted` one; `outer` says where y's others are in the result."""
    left, right = read(x, shares), read(y, shares)
    over_left, over_right = left.dim == len(shape_of(x)) - 1, right.dim == contracted
    if over_left or over_right:
        _check_contraction((x, left, over_left), (y, right, over_right))
        if bias is not None:
            raise ShareError(
                f"adds the bias {bias} to a partial sum, so that it would be counted on every tensor rank: "
                "add it after collectives.reduce_from_tensor(rank, ...)"
            )
        if left.mixed or right.mixed:
            raise ShareError(
                f"sums over a dimension of which every tensor rank holds some rows whole, in {x if left.mixed else y}: "
                "the all-reduce would count these t times; multiply the whole rows apart, after it"
            )
        return PARTIAL
    if right.dim is not None:
        right = replace(right, dim=outer[right.dim])
    if left.dim is not None:
        left = replace(left, dim=left.dim + len(result) - len(shape_of(x)))
    factors = [(factor, share) for factor, share in ((x, left), (y, right)) if share is not WHOLE]
    terms = [(bias, aligned(bias, result, shares))] if isinstance(bias, fx.Node) else []
    return merge([*factors, *terms], result)


def _check_contraction(left: tuple[Any, Share, bool], right: tuple[Any, Share, bool]) -> None:
    """Both sides of a product over a divided dimension must be divided alike there."""
    (x, first, over_first), (y, second, over_second) = left, right
    if over_first and over_second:
        if first.parts and second.parts and first.runs != second.runs:
            raise ShareError(
                f"multiplies {x} and {y} over a dimension that they divide differently, into {first.runs} "
                f"and {second.runs} (runs, rows of a run, divided): expected the same placement"
            )
        return
    name, share, other = (y, second, x) if over_first else (x, first, y)
    if share.kind == "whole" or share.dim is not None:
        raise ShareError(
            f"sums over a dimension that is divided in {other} and not in {name}, which is {share.kind}: "
            f"expected both divided; collectives.take_own(rank, {name}, dim) takes this rank's part"
        )


def attend(node: fx.Node, shares: Shares, tensors: Sequence[fx.Node]) -> Share:
    """Attention is done head by head: heads may be divided, positions and head size not."""
    for tensor in tensors:
        share = read(tensor, shares)
        if share.dim is not None and share.dim >= len(shape_of(tensor)) - 2:
            raise ShareError(
                f"attends over {describe(tensor, shares)}: expected positions and head size whole on every "
                "rank"
            )
    return merge([(tensor, _spread(tensor, node, shares)) for tensor in tensors], shape_of(node))


def _spread(tensor: fx.Node, node: fx.Node, shares: Shares) -> Share:
    """The share of queries, keys, values or a mask, where each of their heads serves several of the result's."""
    share = aligned(tensor, shape_of(node), shares)
    if share.dim is None:
        return share
    own = shape_of(tensor)[share.dim - len(shape_of(node)) + len(shape_of(tensor))]
    times = shape_of(node)[share.dim] // own
    if times == 1:
        return share
    return replace(
        share, parts=tuple(replace(part, inner=part.inner * times) for part in share.parts), extent=None
    )


def attention(node: fx.Node, shares: Shares) -> Share:
    return attend(node, shares, node.all_input_nodes)


def embedding(node: fx.Node, shares: Shares) -> Share:
    """Prove a plain lookup: columns of the table may be divided, rows not."""
    share = read(node.args[0], shares)
    if share.dim == 0:
        raise ShareError(
            f"looks up rows of {node.args[0]}, whose rows are divided over the tensor ranks: expected "
            "kernels.embedding"
        )
    return UNKNOWN if share.dim is None else replace(share, dim=len(shape_of(node)) - 1)


def whole_loss(node: fx.Node, shares: Shares) -> Share:
    if read(node.args[0], shares) is UNKNOWN:
        return UNKNOWN
    raise ShareError(
        f"takes as logits {describe(node.args[0], shares)}: expected whole logits, or kernels.cross_entropy"
    )


def over(dims: Callable[[fx.Node, int], Sequence[int]]) -> Rule:
    """Return the rule of an operator that keeps the shape and needs ``dims(node, rank)`` whole."""

    def rule(node: fx.Node, shares: Shares) -> Found:
        own: Any = node.args[0]
        share, rank = read(own, shares), len(shape_of(own))
        check_whole(own, share, [d % rank for d in dims(node, rank)])
        return share

    return rule


def rotary(node: fx.Node, shares: Shares) -> Share:
    """Prove a rotation: a rank needs the same rows of both halves, and those of the tables."""
    own, cos, sin = node.all_input_nodes
    share, shape, turned = read(own, shares), shape_of(own), shape_of(cos)[-1]
    if share.dim != len(shape) - 1:
        return share
    rows = ((0, turned // 2), (turned // 2, turned // 2), (0, turned))
    first, second, both = (take(own, share, *part) for part in rows)
    if argument(node, 3, "interleaved", False) or first.runs != second.runs:
        check_whole(own, share, [share.dim])
    merge([(own, both), *((n, aligned(n, shape, shares)) for n in (cos, sin))], [*shape[:-1], turned])
    return share


def softmax_dims(node: fx.Node, rank: int) -> list[int]:
    return [int(argument(node, 1, "dim", -1))]


def last_dim(node: fx.Node, rank: int) -> list[int]:
    return [rank - 1]


def normalized_dims(node: fx.Node, rank: int) -> range:
    return range(rank - len(node.args[1]), rank)  # type: ignore[arg-type]


def total(node: fx.Node, shares: Shares) -> Share:
    """Make a sum over a divided dimension partial."""
    return _reduce(node, shares, partial=True)


def extreme(node: fx.Node, shares: Shares) -> Found:
    """Means and maxima need the dimension whole; some say where it is too."""
    return spread(node, _reduce(node, shares, partial=False))


def _reduce(node: fx.Node, shares: Shares, partial: bool) -> Share:
    own: Any = node.args[0]
    share, rank = read(own, shares), len(shape_of(own))
    dims = reduced_dims(node, rank)
    if share.dim is None:
        return UNKNOWN
    if share.dim in dims:
        if not partial or share.mixed:
            check_whole(own, share, dims)
        return PARTIAL
    value = node.meta["val"]
    return (
        share
        if (value[0] if isinstance(value, (tuple, list)) else value).dim() == rank
        else replace(share, dim=share.dim - sum(d < share.dim for d in dims))
    )


def check_whole(own: fx.Node, share: Share, dims: Sequence[int]) -> None:
    """Refuse to run over a dimension that is divided."""
    if share.dim in dims:
        raise ShareError(
            f"runs over dimension {share.dim} of {own}, of which each tensor rank holds another part: "
            "expected it whole"
        )
