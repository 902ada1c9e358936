"""Find the share of each operator's result from its arguments' shares: one rule per operator, as a table.

A rule is asked only where an argument is not whole: whole arguments give a whole result. It raises
`ShareError` where the ranks would compute something else than the undivided program. Operators without a rule
give an unknown share.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import cache
from typing import Any

from torch import fx
from torch._ops import OpOverload

from autoptd.check import share_products as products
from autoptd.check import share_views as movement
from autoptd.check.share_views import describe, read, spread
from autoptd.check.shares import PARTIAL, UNKNOWN, WHOLE, Found, Rule, Share, ShareError, Shares
from autoptd.passes.ir.nodes import argument, aten_name, shape_of
from autoptd.passes.tensor_parallel.axis_rules import ELEMENTWISE, REDUCTIONS
from autoptd.runtime import collectives, kernels
from autoptd.runtime.program.placement import Segment

# Operators that keep a partial sum one.
LINEAR = frozenset(
    [
        "view",
        "reshape",
        "_unsafe_view",
        "flatten",
        "unflatten",
        "transpose",
        "swapaxes",
        "permute",
        "t",
        "numpy_T",
        "unsqueeze",
        "squeeze",
        "expand",
        "contiguous",
        "clone",
        "alias",
        "detach",
        "neg",
        "to",
        "_to_copy",
        "slice",
        "narrow",
        "select",
        "split",
        "split_with_sizes",
        "chunk",
        "unbind",
        "getitem",
    ]
)
# Functions that an edit may call instead of an operator: x / y, x.view(...)
PYTHON_NAMES = {"truediv": "div"}
PYTHON_KNOWN = frozenset([*ELEMENTWISE, "view", "reshape", "getitem"])


def share_after(node: fx.Node, shares: Shares) -> Found:
    """Return the share of a ``call_function`` node's result. A ShareError says what is wrong, not where."""
    if node.target in SOURCES:
        return SOURCES[node.target](node, shares)
    found = [shares[n] for n in node.all_input_nodes]
    if all(share is WHOLE for share in found):
        return WHOLE
    name = operator_name(node.target)
    if any(
        share == PARTIAL
        for several in found
        for share in (several if isinstance(several, tuple) else (several,))
    ):
        return _of_partial(node, shares, name)
    rule = RULES.get(name)
    return rule(node, shares) if rule is not None else UNKNOWN


@cache
def operator_name(target: Any) -> str:
    """Return "linear" of ``aten.linear.default``; "" for a target without rules."""
    if isinstance(target, OpOverload):
        return aten_name(target)
    name = str(getattr(target, "__name__", ""))
    if getattr(kernels, name, None) is target:
        return f"kernels.{name}"
    return PYTHON_NAMES.get(name, name) if PYTHON_NAMES.get(name, name) in PYTHON_KNOWN else ""


def _of_partial(node: fx.Node, shares: Shares, name: str) -> Found:
    """Only what is linear may touch a partial sum before it is summed."""
    if name in LINEAR:
        return spread(node, PARTIAL)
    first, second = (*node.args, None, None)[:2]
    one, other = read(first, shares), read(second, shares)
    if name in ("mul", "div") and one is PARTIAL and isinstance(second, (int, float)):
        return PARTIAL
    if name in ("add", "sub"):
        if one is other is PARTIAL:
            return PARTIAL
        if UNKNOWN in (one, other):
            return UNKNOWN
        raise ShareError(
            f"adds {describe(second if one is PARTIAL else first, shares)}, to the partial sum "
            f"{first if one is PARTIAL else second}, so that it would be counted on every tensor rank: add "
            "it after collectives.reduce_from_tensor(rank, ...)"
        )
    term = next(n for n in node.all_input_nodes if shares[n] is PARTIAL)
    raise ShareError(
        f"uses the partial sum {term.name} before its all-reduce: expected "
        f"collectives.reduce_from_tensor(rank, {term.name})"
    )


# Collectives


def _all_reduce(node: fx.Node, shares: Shares) -> Share:
    share = read(node.args[1], shares)
    if share.kind == "whole":
        raise ShareError(
            f"all-reduces {node.args[1]}, which is whole on every tensor rank already, and so multiplies it "
            "by their number: leave this reduce_from_tensor out"
        )
    if share.kind == "divided":
        raise ShareError(
            f"all-reduces {node.args[1]}, of which each tensor rank holds another part: expected a partial "
            "sum, such as a product over a divided dimension"
        )
    return WHOLE


def _copy(node: fx.Node, shares: Shares) -> Share:
    return _check_copied(node, shares, "leave this copy_to_tensor out")


def _copied(node: fx.Node, shares: Shares) -> Found:
    """f, and the linears that read it."""
    without = node.target.__name__.removeprefix("copied_")  # type: ignore[union-attr]
    _check_copied(node, shares, f"compute the {without} without an all-reduce")
    if any(read(n, shares) is PARTIAL for n in node.all_input_nodes):
        return _of_partial(node, shares, "")
    return products.copied(node, shares)


def _check_copied(node: fx.Node, shares: Shares, way: str) -> Share:
    share = read(node.args[1], shares)
    if share.kind in ("divided", "partial"):
        raise ShareError(
            f"hands {describe(node.args[1], shares)}, to a divided region: expected a whole value; {way}, or "
            "all-reduce its argument first"
        )
    return share


def _own(node: fx.Node, shares: Shares) -> Share:
    share, shape = read(node.args[1], shares), shape_of(node)
    if share.kind in ("divided", "partial"):
        raise ShareError(
            f"takes this rank's part of {describe(node.args[1], shares)}: expected a whole value"
        )
    dim = int(argument(node, 2, "dim")) % len(shape)
    return Share("divided", dim, (Segment(1, shape[dim], 1, True),))


# Kernels


def _lookup(node: fx.Node, shares: Shares) -> Share:
    share = read(node.args[1], shares)
    if share.kind == "unknown" or (share.kind == "divided" and share.dim in (0, None)):
        _check_vocabulary(node, share)
        return PARTIAL  # zeros for the rows of other ranks
    raise ShareError(
        f"looks up rows of {describe(node.args[1], shares)}: expected a table divided along dimension 0; use "
        "aten.embedding for a whole one"
    )


def _loss(node: fx.Node, shares: Shares) -> Share:
    share = read(node.args[1], shares)
    if share.kind == "unknown" or (share.kind == "divided" and share.dim in (1, None)):
        _check_vocabulary(node, share)
        return WHOLE
    raise ShareError(
        f"takes as logits {describe(node.args[1], shares)}: expected them divided along dimension 1, the "
        "vocabulary; use aten.cross_entropy_loss for whole ones"
    )


def _check_vocabulary(node: fx.Node, share: Share) -> None:
    """The rows that a kernel takes for no padding must be those of the parameter."""
    vocabulary = argument(node, 3, "vocabulary")
    if share.extent is not None and vocabulary != share.extent:
        raise ShareError(
            f"has vocabulary={vocabulary}, where {node.args[1]} has {share.extent} rows without padding in the "
            f"manifest: expected vocabulary={share.extent}"
        )


def _dropout(node: fx.Node, shares: Shares) -> Found:
    share = read(node.args[1], shares)
    if share is PARTIAL:
        return _of_partial(node, shares, "dropout")
    _check_key(share, argument(node, 5, "divided"))
    return share


def _softmax(node: fx.Node, shares: Shares) -> Found:
    tensors = [n for n in node.all_input_nodes if n is not node.args[0]]
    if any(read(tensor, shares) is PARTIAL for tensor in tensors):
        return _of_partial(node, shares, "scaled_softmax")
    share = products.attend(node, shares, tensors)
    if argument(node, 5, "p", 0.0):
        _check_key(share, argument(node, 8, "divided"))
    return share


def _fused_dropout(node: fx.Node, shares: Shares) -> Found:
    """dropout(x + bias) + residual, and perhaps the norm of it, which runs over the last dimension."""
    if any(read(n, shares) is PARTIAL for n in node.all_input_nodes):
        return _of_partial(node, shares, node.target.__name__)  # type: ignore[union-attr]
    given = inspect.signature(node.target).bind(*node.args, **node.kwargs).arguments  # type: ignore[arg-type]
    terms = [given[name] for name in ("x", "bias", "residual") if isinstance(given.get(name), fx.Node)]
    shape = shape_of(given["x"])
    share = movement.merge([(term, movement.aligned(term, shape, shares)) for term in terms], shape)
    if given.get("p", 0):
        _check_key(share, given.get("divided"))
    if "weight" in given:
        products.check_whole(given["x"], share, [len(shape_of(given["x"])) - 1])
    return share if share is WHOLE else spread(node, share)


def _check_key(share: Share, key: int | None) -> None:
    """A mask that is keyed as if the tensor were whole would be the same on every rank."""
    if share.kind != "unknown" and (share.kind == "divided") != (key is not None):
        raise ShareError(
            f"drops elements of a value that is {share.kind}, with divided={key}: expected divided="
            + (
                "None"
                if share.kind == "whole"
                else "its divided dimension, so that each rank draws its own part"
            )
        )


SOURCES: Mapping[Any, Rule] = {
    collectives.reduce_from_tensor: _all_reduce,
    collectives.copy_to_tensor: _copy,
    **dict.fromkeys(collectives.COPIED, _copied),
    collectives.take_own: _own,
    kernels.embedding: _lookup,
    kernels.cross_entropy: _loss,
    kernels.dropout: _dropout,
    kernels.bias_dropout_add: _fused_dropout,
    kernels.add_layer_norm: _fused_dropout,
    kernels.add_rms_norm: _fused_dropout,
    kernels.scaled_softmax: _softmax,
}

RULES: Mapping[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, movement.elementwise),
    **dict.fromkeys(["view", "reshape", "_unsafe_view", "flatten", "unflatten"], movement.view),
    **dict.fromkeys(["transpose", "swapaxes", "t", "numpy_T"], movement.moving(movement.transposed)),
    "permute": movement.moving(movement.permuted),
    "unsqueeze": movement.moving(movement.unsqueezed),
    "squeeze": movement.moving(movement.squeezed),
    **dict.fromkeys(["select", "unbind"], movement.moving(movement.selected)),
    **dict.fromkeys(["expand", "expand_as", "broadcast_to"], movement.moving(movement.expanded)),
    **dict.fromkeys(["pad", "constant_pad_nd", "index"], movement.moving(movement.kept)),
    **dict.fromkeys(["slice", "narrow"], movement.sliced),
    **dict.fromkeys(["split", "split_with_sizes", "chunk", "tensor_split"], movement.split),
    **dict.fromkeys(["cat", "concat", "concatenate"], movement.joined),
    "stack": movement.stacked,
    **dict.fromkeys(["view_as_complex", "view_as_real"], movement.moving(movement.paired)),
    "repeat_interleave": movement.repeated,
    "getitem": movement.getitem,
    "linear": products.linear,
    "addmm": products.addmm,
    "baddbmm": products.addmm,
    **dict.fromkeys(["matmul", "mm", "bmm"], products.matmul),
    "scaled_dot_product_attention": products.attention,
    "embedding": products.embedding,
    "cross_entropy_loss": products.whole_loss,
    "sum": products.total,
    **dict.fromkeys(REDUCTIONS.split(), products.extreme),
    **dict.fromkeys(
        ["softmax", "log_softmax", "_softmax", "_log_softmax", "cumsum"], products.over(products.softmax_dims)
    ),
    **dict.fromkeys(["layer_norm", "rms_norm"], products.over(products.normalized_dims)),
    **dict.fromkeys(["new_zeros", "new_ones", "new_full", "new_empty"], lambda node, shares: WHOLE),
    **dict.fromkeys(["kernels.bias_gelu", "kernels.gated_product"], movement.elementwise),
    "kernels.linear_gelu": products.linear_gelu,
    "kernels.split_linear": products.split_linear,
    "kernels.grouped_attention": products.attention,
    **dict.fromkeys(["kernels.layer_norm", "kernels.rms_norm"], products.over(products.last_dim)),
    "kernels.rotary_embedding": products.rotary,
}
