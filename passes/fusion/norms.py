"""Match normalisations and rotary embeddings that models write out."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoptd.passes.fusion.patterns import (
    Call,
    Match,
    both_orders,
    is_call,
    is_reshape,
    is_single,
    is_vector,
    last_dim,
    plain_add,
    statistics_dtype,
    uncast,
)
from autoptd.passes.ir.nodes import argument, shape_of
from autoptd.runtime import aten, kernels


def match_layer_norm(node: fx.Node) -> Match | None:
    """Match ``torch.layer_norm`` over the last dimension, with a weight."""
    if not is_call(node, aten.layer_norm.default):
        return None
    x: Any = node.args[0]
    size = shape_of(node)[-1]
    weight, bias, eps = argument(node, 2, "weight"), argument(node, 3, "bias"), argument(node, 4, "eps", 1e-5)
    if node.args[1] != [size] or not is_vector(weight, size):
        return None
    if (bias is not None and not is_vector(bias, size)) or x.meta["val"].dtype != node.meta["val"].dtype:
        return None
    return Match(Call(kernels.layer_norm, (x, weight, bias, eps), node), (node,), frozenset())


def match_rms_norm(node: fx.Node) -> Match | None:
    """Match ``weight * (x * rsqrt(mean(x ** 2) + eps))``, the statistics in float32 for half precision."""
    if not is_call(node, aten.mul.Tensor):
        return None
    dtype = node.meta["val"].dtype
    for weight, normed in both_orders(node):
        if not isinstance(weight, fx.Node) or not isinstance(normed, fx.Node):
            continue
        scaled = uncast(normed)
        found = _normed(scaled)
        if found is None or shape_of(weight) != shape_of(node)[-1:] or weight.meta["val"].dtype != dtype:
            continue
        x, eps, members = found
        wide = scaled.meta["val"].dtype
        chain = {*members, scaled, normed}
        if x.meta["val"].dtype == dtype and wide == statistics_dtype(dtype) and _inside(chain, node):
            return Match(Call(kernels.rms_norm, (x, weight, eps), node), (node,), frozenset(chain))
    return None


def match_torch_rms_norm(node: fx.Node) -> Match | None:
    """Match ``torch.rms_norm`` over the last dimension, except in half precision, where it rounds after the weight."""
    exact = (torch.float32, torch.float64)
    if not is_call(node, aten.rms_norm.default) or node.meta["val"].dtype not in exact:
        return None
    x: Any = node.args[0]
    weight = argument(node, 2, "weight")
    fits = node.args[1] == [shape_of(node)[-1]] and is_vector(weight, shape_of(node)[-1])
    if not fits or weight.meta["val"].dtype != x.meta["val"].dtype:
        return None
    call = Call(kernels.rms_norm, (x, weight, argument(node, 3, "eps")), node)
    return Match(call, (node,), frozenset())


def _normed(node: fx.Node) -> tuple[fx.Node, float, list[fx.Node]] | None:
    """Read x, eps and the operators of ``x * rsqrt(mean(x ** 2, -1, keepdim=True) + eps)``, casts of x included."""
    if not is_call(node, aten.mul.Tensor):
        return None
    for x, root in both_orders(node):
        added: Any = root.args[0] if is_call(root, aten.rsqrt.default) else None
        if not is_call(added, aten.add.Tensor, aten.add.Scalar) or not isinstance(added.args[1], float):
            continue
        mean = added.args[0]
        if not is_call(mean, aten.mean.dim) or not argument(mean, 2, "keepdim", False):
            continue
        square = mean.args[0]
        squared = is_call(square, aten.pow.Tensor_Scalar) and square.args == (x, 2)
        squared = squared or (is_call(square, aten.mul.Tensor) and square.args == (x, x))
        if not squared or added.kwargs or mean.kwargs.get("dtype") or not last_dim(square, mean.args[1]):
            continue
        source = uncast(x)
        wide = [x] if source is not x else []
        return source, added.args[1], [root, added, mean, square, *wide]
    return None


def _inside(chain: set[fx.Node], end: fx.Node) -> bool:
    """Return whether only the chain reads its values."""
    return all(user in chain or user is end for node in chain for user in node.users)


# Rotary embeddings


@dataclass(frozen=True)
class Rotated:
    """``rotate(x)``: the halves, or the even and odd elements, of the last dimension as (-second, first)."""

    x: fx.Node
    interleaved: bool
    members: frozenset[fx.Node]


def match_rotary(node: fx.Node) -> Match | None:
    """Match ``x * cos + rotate(x) * sin``, with cos and sin broadcast over x and single-use products."""
    terms = plain_add(node)
    if terms is None or not all(is_call(term, aten.mul.Tensor) and is_single(term) for term in terms):
        return None
    for straight, turned in (terms, (terms[1], terms[0])):
        for rotated_node, sin in both_orders(turned):
            rotated = _rotated_halves(rotated_node) or _rotated_pairs(rotated_node)
            if rotated is None or not _inside({*rotated.members}, turned):
                continue
            x = rotated.x
            if x not in straight.args or not isinstance(sin, fx.Node):
                continue
            cos: Any = straight.args[1] if straight.args[0] is x else straight.args[0]
            tables = isinstance(cos, fx.Node) and _is_table(cos, x) and _is_table(sin, x)
            if tables and shape_of(cos) == shape_of(sin):
                members = frozenset({straight, turned, *rotated.members})
                kwargs = {"interleaved": True} if rotated.interleaved else {}
                call = Call(kernels.rotary_embedding, (x, cos, sin), node, kwargs)
                return Match(call, (node,), members, (cos, sin))
    return None


def _is_table(table: fx.Node, x: fx.Node) -> bool:
    """Return whether a cos or sin broadcasts over x: no more dimensions, x's dtype, and the whole last dimension."""
    own, shape = shape_of(table), shape_of(x)
    fits = (
        0 < len(own) <= len(shape)
        and own[-1] == shape[-1]
        and all(a in (1, b) for a, b in zip(reversed(own), reversed(shape), strict=False))
    )
    return fits and table.meta["val"].dtype == x.meta["val"].dtype


def _rotated_halves(node: Any) -> Rotated | None:
    """Read ``cat([-x[..., n:], x[..., :n]], -1)``, the halves by slices or from one ``chunk``."""
    if not is_call(node, aten.cat.default) or not last_dim(node, argument(node, 1, "dim", 0)):
        return None
    parts: Any = node.args[0]
    if len(parts) != 2 or not is_call(parts[0], aten.neg.default):
        return None
    second, first = parts[0].args[0], parts[1]
    half = shape_of(node)[-1] // 2
    if 2 * half != shape_of(node)[-1]:
        return None
    members = {node, parts[0], first, second}
    split = _split_in_halves(first, second)
    if split is not None:
        return Rotated(split.args[0], False, frozenset({*members, split}))  # type: ignore[arg-type]
    x = _sliced(first, 0, half)
    if x is None or x is not _sliced(second, half, 2 * half) or shape_of(x)[-1] != 2 * half:
        return None
    return Rotated(x, False, frozenset(members))


def _split_in_halves(first: Any, second: Any) -> fx.Node | None:
    """Return the operator whose two results, halves of the last dimension, these are."""
    if not (is_call(first, operator.getitem) and is_call(second, operator.getitem)):
        return None
    split: fx.Node = first.args[0]
    if second.args[0] is not split or (first.args[1], second.args[1]) != (0, 1):
        return None
    fits = is_call(split, aten.split.Tensor) and last_dim(first, argument(split, 2, "dim", 0))
    return split if fits and len(split.meta["val"]) == 2 and shape_of(first) == shape_of(second) else None


def _sliced(node: Any, start: int, end: int, step: int = 1) -> fx.Node | None:
    """Return the x of ``x[..., start:end:step]``."""
    if not is_call(node, aten.slice.Tensor):
        return None
    x: fx.Node = node.args[0]
    dim, *given = (argument(node, i, name, default) for i, name, default in _SLICE)
    size = shape_of(x)[-1]
    fits = slice(*given).indices(size) == (start, min(end, size), step)
    return x if fits and dim % len(shape_of(x)) == len(shape_of(x)) - 1 else None


_SLICE = ((1, "dim", 0), (2, "start", None), (3, "end", None), (4, "step", 1))


def _rotated_pairs(node: Any) -> Rotated | None:
    """Read ``stack([-x[..., 1::2], x[..., ::2]], -1)`` flattened into the last dimension."""
    stack: Any = node.args[0] if is_reshape(node) else None
    if not is_call(stack, aten.stack.default):
        return None
    parts: Any = stack.args[0]
    if (
        len(parts) != 2
        or not is_call(parts[0], aten.neg.default)
        or not last_dim(stack, argument(stack, 1, "dim", 0))
    ):
        return None
    odd, even = parts[0].args[0], parts[1]
    size = shape_of(node)[-1]
    x = _sliced(even, 0, size, 2)
    if x is None or x is not _sliced(odd, 1, size, 2) or shape_of(x) != shape_of(node):
        return None
    return Rotated(x, True, frozenset({node, stack, parts[0], even, odd}))


def match_partial_rotary(node: fx.Node) -> Match | None:
    """Match ``cat([rotary(x[..., :n]), x[..., n:]], -1)``: the kernel leaves the rest as it is."""
    if not is_call(node, aten.cat.default) or not last_dim(node, argument(node, 1, "dim", 0)):
        return None
    parts: Any = node.args[0]
    if len(parts) != 2 or not is_call(parts[0], kernels.rotary_embedding) or not is_single(parts[0]):
        return None
    turned, rest = parts
    size, rotated = shape_of(node)[-1], shape_of(turned)[-1]
    taken: Any = turned.args[0]
    x: fx.Node | None = taken if rotated == size else _sliced(taken, 0, rotated)  # Phi-3 joins an empty rest
    if x is None or x is not _sliced(rest, rotated, size) or shape_of(x)[-1] != size:
        return None
    members = {turned, *(n for n in (taken, rest) if n is not x and is_single(n))}
    call = Call(kernels.rotary_embedding, (x, *turned.args[1:]), node, dict(turned.kwargs))
    return Match(call, (node,), frozenset(members))
