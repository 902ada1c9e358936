"""Matches of normalisations and rotary embeddings that models write out, and of losses."""

import itertools
import operator
from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from autoptd.passes.fusion import patterns
from autoptd.passes.fusion.patterns import Call, Match, both_orders, is_call, is_reshape, is_single, is_vector
from autoptd.passes.ir.nodes import argument, arguments, shape_of
from autoptd.passes.ir.views import read_cut
from autoptd.runtime import aten, kernels
from autoptd.runtime.kernels.operands import HALF


def match_norm(node: fx.Node) -> Match | None:
    """Match torch's norms over the last dimension, with a weight.

    Not ``torch.rms_norm`` in half precision, where it rounds after the weight.
    """
    given = arguments(node)
    x, weight, bias, eps = given["input"], given["weight"], given.get("bias"), given["eps"]
    size, dtype = shape_of(node)[-1], node.meta["val"].dtype
    fits = is_vector(weight, size) and (bias is None or is_vector(bias, size))
    if not fits or given["normalized_shape"] != [size] or x.meta["val"].dtype != dtype:
        return None
    if node.target is aten.layer_norm.default:
        return Match(Call(kernels.layer_norm, (x, weight, bias, eps), node))
    wide = dtype in (torch.float32, torch.float64) and weight.meta["val"].dtype == dtype
    return Match(Call(kernels.rms_norm, (x, weight, eps), node)) if wide else None


def match_rms_norm(node: fx.Node) -> Match | None:
    """Match ``weight * (x * rsqrt(mean(x ** 2) + eps))``, the statistics in float32 for half precision."""
    dtype = node.meta["val"].dtype
    for weight, normed in both_orders(node):
        scaled = uncast(normed)
        found = _normed(scaled) if isinstance(weight, fx.Node) else None
        if found is None or shape_of(weight) != shape_of(node)[-1:] or weight.meta["val"].dtype != dtype:
            continue
        x, eps, members = found
        # Kernels sum half precision in float32.
        wide = scaled.meta["val"].dtype == torch.promote_types(dtype, torch.float32)
        chain = {*members, scaled, normed}
        if x.meta["val"].dtype == dtype and wide and _inside(chain, node):
            return Match(Call(kernels.rms_norm, (x, weight, eps), node), chain)
    return None


def _normed(node: Any) -> tuple[fx.Node, float, list[fx.Node]] | None:
    """Read x, eps and the operators of ``x * rsqrt(mean(x ** 2, -1, keepdim=True) + eps)``, casts of x included."""
    for x, root in both_orders(node) if is_call(node, aten.mul.Tensor) else ():
        added: Any = root.args[0] if is_call(root, aten.rsqrt.default) else None
        if not is_call(added, aten.add.Tensor, aten.add.Scalar) or not isinstance(added.args[1], float):
            continue
        mean = added.args[0]
        if not is_call(mean, aten.mean.dim) or not argument(mean, "keepdim"):
            continue
        square = mean.args[0]
        squared = is_call(square, aten.pow.Tensor_Scalar) and square.args == (x, 2)
        squared = squared or (is_call(square, aten.mul.Tensor) and square.args == (x, x))
        if not squared or added.kwargs or argument(mean, "dtype") or not last_dim(square, mean.args[1]):
            continue
        source = uncast(x)
        return source, added.args[1], [root, added, mean, square, *([x] if source is not x else [])]
    return None


def _inside(chain: Collection[fx.Node], end: fx.Node) -> bool:
    """Return whether only the chain reads its values."""
    return all(user in chain or user is end for node in chain for user in node.users)


def last_dim(node: fx.Node, dims: Any) -> bool:
    """Return whether `dims` is the node's last dimension alone."""
    dims, count = [dims] if isinstance(dims, int) else dims, len(shape_of(node))
    return isinstance(dims, (list, tuple)) and [d % count for d in dims] == [count - 1]


def uncast(node: Any) -> fx.Node:
    """Return the argument of a cast; any other node itself."""
    source: fx.Node = node.args[0] if is_call(node, aten.to.dtype) else node
    return source


# Rotary embeddings


def match_rotary(node: fx.Node) -> Match | None:
    """Match ``x * cos + rotate(x) * sin``, with cos and sin broadcast over x and single-use products."""
    terms = patterns.plain_add(node) or ()
    if not all(is_call(term, aten.mul.Tensor) and is_single(term) for term in terms):
        return None
    for straight, turned in both_orders(node) if terms else ():
        for (x, cos), (rotated, sin) in itertools.product(both_orders(straight), both_orders(turned)):
            members = _rotated(rotated, x)
            tables = members and all(isinstance(t, fx.Node) and _is_table(t, x) for t in (cos, sin))
            if tables and shape_of(cos) == shape_of(sin) and _inside(members, turned):
                kwargs = {"interleaved": True} if is_reshape(rotated) else {}
                call = Call(kernels.rotary_embedding, (x, cos, sin), node, kwargs)
                return Match(call, (straight, turned, *members), constants=(cos, sin))
    return None


def _is_table(table: fx.Node, x: fx.Node) -> bool:
    """Return whether a cos or sin broadcasts over x: no more dimensions, x's dtype, and the whole last dimension."""
    own, shape = shape_of(table), shape_of(x)
    fits = 0 < len(own) <= len(shape) and own[-1] == shape[-1]
    spreads = all(a in (1, b) for a, b in zip(reversed(own), reversed(shape), strict=False))
    return fits and spreads and table.meta["val"].dtype == x.meta["val"].dtype


def _rotated(node: Any, x: Any) -> tuple[fx.Node, ...]:
    """Return the operators of ``rotate(x)``: the halves of the last dimension as (-second, first).

    ``cat([-x[..., n:], x[..., :n]], -1)``, the halves by slices or from one ``chunk``, or of the even and odd elements
    ``stack([-x[..., 1::2], x[..., ::2]], -1)`` flattened into the last dimension. Nothing if `node` is another value.
    """
    pairs = is_reshape(node)
    joined = node.args[0] if pairs else node
    found = is_call(joined, aten.stack.default if pairs else aten.cat.default) and isinstance(x, fx.Node)
    if not found or not last_dim(joined, argument(joined, "dim")):
        return ()
    negative, *others = joined.args[0]
    if len(others) != 1 or not is_call(negative, aten.neg.default):
        return ()
    parts, half = (negative.args[0], others[0]), shape_of(x)[-1] // 2
    expected = [(1, half, 2), (0, half, 2)] if pairs else [(half, half, 1), (0, half, 1)]
    if [_part(part, x) for part in parts] != expected or shape_of(node) != shape_of(x):
        return ()
    splits = [part.args[0] for part in parts if part.target is operator.getitem]
    return (node, joined, negative, *parts, *splits)


def _part(node: Any, x: fx.Node) -> tuple[int, int, int] | None:
    """Return start, length and step of a slice of the last dimension of x, or of one piece of a split."""
    cutter, index = node.args if is_call(node, operator.getitem) else (node, 0)
    if not is_call(cutter, aten.slice.Tensor, aten.split.Tensor) or cutter.args[0] is not x:
        return None
    cut = read_cut(cutter)
    last = cut.dim == len(shape_of(x)) - 1
    return (cut.start + sum(cut.lengths[:index]), cut.lengths[index], cut.step) if last else None


def match_partial_rotary(node: fx.Node) -> Match | None:
    """Match ``cat([rotary(x[..., :n]), x[..., n:]], -1)``: the kernel leaves the rest as it is."""
    parts: Any = node.args[0]
    if len(parts) != 2 or not last_dim(node, argument(node, "dim")):
        return None
    turned, rest = parts
    if not is_call(turned, kernels.rotary_embedding) or not is_single(turned):
        return None
    size, rotated = shape_of(node)[-1], shape_of(turned)[-1]
    taken = turned.args[0]
    x = taken if rotated == size else next(iter(taken.all_input_nodes), taken)  # Phi-3 joins an empty rest
    begins = x is taken or _part(taken, x) == (0, rotated, 1)
    if not begins or _part(rest, x) != (rotated, size - rotated, 1) or shape_of(x)[-1] != size:
        return None
    members = (turned, *(n for n in (taken, rest) if n is not x and is_single(n)))
    return Match(Call(kernels.rotary_embedding, (x, *turned.args[1:]), node, turned.kwargs), members)


# Losses: the kernel keeps the logits alone. It sums half-precision ones in float32 without the model's copy in float32;
# of whole logits torch keeps a softmax beside them and makes two gradients as wide.

REDUCTIONS = {1: "mean", 2: "sum"}


def match_half_loss(node: fx.Node) -> Match | None:
    """Match kernels.cross_entropy(logits.float(), target), of logits divided over the tensor ranks."""
    rank, logits, *rest = node.args
    narrow, cast = _narrow(logits)
    options = {**node.kwargs, "dtype": torch.float32}
    return Match(Call(kernels.cross_entropy, (rank, narrow, *rest), node, options), cast) if cast else None


def match_whole_loss(node: fx.Node) -> Match | None:
    """Match cross_entropy(logits, target) on one tensor rank, which the kernel takes for the only one."""
    given = arguments(node)
    logits, target, reduction, ignored = (given[n] for n in ("self", "target", "reduction", "ignore_index"))
    plain = given["weight"] is None and given["label_smoothing"] == 0 and reduction in REDUCTIONS
    if not plain or len(shape_of(logits)) != 2 or len(shape_of(target)) != 1:
        return None
    narrow, cast = _narrow(logits)
    options = {"ignore_index": ignored, "reduction": REDUCTIONS[reduction]}
    options |= {"dtype": torch.float32} if cast else {}
    args = (next(iter(node.graph.nodes)), narrow, target, shape_of(logits)[1])
    return Match(Call(kernels.cross_entropy, args, node, options), cast)


def _narrow(logits: Any) -> tuple[Any, list[fx.Node]]:
    """Return the half-precision logits behind a cast to float32 and single-use reshapes, and those nodes.

    Other logits as they are, and no nodes.
    """
    if not isinstance(logits, fx.Node) or not is_single(logits):
        return logits, []
    if is_reshape(logits):
        inner, cast = _narrow(logits.args[0])
        shaped = Call(logits.target, (inner, *logits.args[1:]), logits)
        return (shaped, [*cast, logits]) if cast else (logits, [])
    source: Any = logits.args[0] if is_call(logits, aten.to.dtype) else None
    half = source is not None and source.meta["val"].dtype in HALF
    return (source, [logits]) if half and logits.meta["val"].dtype == torch.float32 else (logits, [])
