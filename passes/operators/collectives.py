"""Communication over the tensor ranks: f, g, and the linears that stand for f and its readers (SC21 §2.3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from autoptd.passes.ir.nodes import argument, shape_of
from autoptd.passes.ir.products import read_products
from autoptd.passes.operators.kernels import gelu_work
from autoptd.passes.operators.products import gelu_gradients, multiply, product_gradients, product_placed
from autoptd.passes.operators.quantities import Value, Work, no_work
from autoptd.passes.operators.record import OperatorRules, Trait
from autoptd.passes.operators.shares import (
    WHOLE,
    Found,
    Share,
    ShareError,
    Shares,
    describe,
    read,
    refuse_partial,
)
from autoptd.passes.operators.views import view_backward
from autoptd.runtime import collectives
from autoptd.runtime.program.placement import Partial, Replicate, Segment, Shard

# The proof


def _reduce_placed(node: fx.Node, shares: Shares) -> Share:
    share = read(node.args[1], shares)
    if isinstance(share, Replicate):
        raise ShareError(
            f"all-reduces {node.args[1]}, which is whole on every tensor rank already, and so multiplies it "
            "by their number: leave this reduce_from_tensor out"
        )
    if isinstance(share, Shard):
        raise ShareError(
            f"all-reduces {node.args[1]}, of which each tensor rank holds another part: expected a partial "
            "sum, such as a product over a divided dimension"
        )
    return WHOLE


def _copy_placed(node: fx.Node, shares: Shares) -> Share:
    return _check_copied(node, shares, "leave this copy_to_tensor out")


def _copied_placed(node: fx.Node, shares: Shares) -> Found:
    """f, and the linears that read it."""
    without = node.target.__name__.removeprefix("copied_")  # type: ignore[union-attr]
    _check_copied(node, shares, f"compute the {without} without an all-reduce")
    refuse_partial(node, shares)
    return product_placed(node, shares)


def _check_copied(node: fx.Node, shares: Shares, way: str) -> Share:
    share = read(node.args[1], shares)
    if isinstance(share, Shard | Partial):
        raise ShareError(
            f"hands {describe(node.args[1], shares)}, to a divided region: expected a whole value; {way}, or "
            "all-reduce its argument first"
        )
    return share


def _own_placed(node: fx.Node, shares: Shares) -> Share:
    share, shape = read(node.args[1], shares), shape_of(node)
    if isinstance(share, Shard | Partial):
        raise ShareError(
            f"takes this rank's part of {describe(node.args[1], shares)}: expected a whole value"
        )
    dim = int(argument(node, 2, "dim")) % len(shape)
    return Shard(dim, (Segment(1, shape[dim], 1, True),))


# Costs


def _all_reduce(node: fx.Node, value: Value, *_: Any) -> Work:
    """An all-reduce of the value, in a copy of it."""
    size = value.bytes(node)
    return Work(read=size, written=size, reduced=size, launches=2)


def _copied_backward(node: fx.Node, value: Value, wanted: Sequence[fx.Node]) -> Work:
    """The gradients of x, added up by the products that make them; their all-reduce, and beside it the others."""
    x: Any = node.args[1]
    work, overlapped = Work(), Work()
    if node.target is collectives.copied_linear_gelu:
        activation, *gradients = gelu_gradients(node, value, wanted)
        work += activation
        pairs = [tuple(gradients)]
    else:
        pairs = [product_gradients(product, value, wanted) for product in read_products(node)]
    for index, (of_x, others) in enumerate(pairs):
        work += of_x + Work(read=value.bytes(x) if index and x in wanted else 0)
        overlapped += others
    if x not in wanted:
        return work + overlapped
    return replace(work + overlapped + Work(reduced=value.bytes(x), launches=1), overlapped=overlapped)


_F = Trait.ANY_SHARE | Trait.SUMS_GRADIENTS
_COPIED = OperatorRules(placed=_copied_placed, work=multiply, backward=_copied_backward, traits=_F)

RULES: Mapping[Any, OperatorRules] = {
    **dict.fromkeys(collectives.COPIED, _COPIED),
    collectives.copied_linear_gelu: replace(_COPIED, work=gelu_work),
    collectives.copy_to_tensor: OperatorRules(
        placed=_copy_placed, backward=_all_reduce, traits=_F | Trait.FREE
    ),
    collectives.reduce_from_tensor: OperatorRules(
        placed=_reduce_placed,
        work=_all_reduce,
        backward=no_work,
        traits=Trait.ANY_SHARE | Trait.SUMS_RANKS,
    ),
    collectives.take_own: OperatorRules(
        placed=_own_placed, backward=view_backward, traits=Trait.ANY_SHARE | Trait.FREE
    ),
}
