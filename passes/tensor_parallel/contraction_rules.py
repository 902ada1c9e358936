"""Relate the axes of products, lookups, losses and reductions (see `axis_rules`)."""

from __future__ import annotations

from typing import Any

from torch import fx

from autoptd.passes.ir.nodes import argument, called, reduced_dims, shape_of
from autoptd.passes.tensor_parallel import axes as ax
from autoptd.passes.tensor_parallel.axes import Axes, Axis
from autoptd.passes.tensor_parallel.axis_map import AxisMap
from autoptd.passes.tensor_parallel.shape_rules import broadcast, opaque_tensor

# Reasons that tell a sequence from a batch (see `sharding.find_batch`).
ATTENTION = "is attention over it"
OF_ACTIVATIONS = "multiplies two activations over it"
RUNS = "runs over it"


def linear(axis_map: AxisMap, node: fx.Node) -> Axes:
    """Relate [.., in] x [out, in] -> [.., out]; `in` is contracted (SC21 §2.3: row-parallel if it is divided)."""
    x, weight = axis_map.of(node.args[0]), axis_map.of(node.args[1])
    axis_map.contract(node, x[-1], weight[1])
    bias = argument(node, 2, "bias")
    if bias is not None:
        ax.unify(axis_map.of(bias)[0], weight[0])
    return (*x[:-1], weight[0])


def split_linear(axis_map: AxisMap, node: fx.Node) -> Axes:
    """Relate [.., in] x [n * out, in] -> [n, .., out]: the inputs are needed whole, as the bias is added here."""
    x, weight, bias, _, transposed = *node.args[:4], argument(node, 4, "transposed", False)
    own, (rows, columns) = axis_map.of(x), axis_map.of(weight)
    inner, outer = (rows, columns) if transposed else (columns, rows)
    ax.unify(own[-1], inner)
    ax.block(inner, f"{called(node)} contracts it and adds a bias")
    if bias is not None:
        ax.unify(axis_map.of(bias)[0], outer)
    count, *_, size = shape_of(node)
    pair = ax.split_product(outer, [count, size])
    if pair is None:
        ax.block(outer, f"{called(node)} takes it apart")
        pair = [Axis(count), Axis(size, blocked=f"{called(node)} makes it")]
    ax.block(pair[0], f"{called(node)} takes it apart")
    return (pair[0], *own[:-1], pair[1])


def addmm(axis_map: AxisMap, node: fx.Node) -> Axes:
    """Relate bias + [n, in] x [in, out], which a weight stored in x out becomes."""
    bias, x, weight = (axis_map.of(a) for a in node.args[:3])
    axis_map.contract(node, x[1], weight[0])
    out = (x[0], weight[1])
    for own, axis in zip(reversed(bias), reversed(out), strict=False):
        if ax.find(own).size != 1:
            ax.unify(own, axis)
    return out


def matmul(axis_map: AxisMap, node: fx.Node) -> Axes:
    """Relate a product with a weight as a ``linear``, and one of two activations as attention: heads outside."""
    first, second = node.args[0], node.args[1]
    x, y = axis_map.of(first), axis_map.of(second)
    if len(y) == 1 or len(x) == 1:
        return opaque_tensor(axis_map, node)
    if len(y) == 2 and len(x) >= 2:
        axis_map.contract(node, x[-1], y[0])
        if not (axis_map.is_weight(second) or axis_map.is_weight(first)):
            ax.block(x[-1], f"{called(node)} {OF_ACTIVATIONS}")
        return (*x[:-1], y[1])
    return _batched_product(axis_map, node, first, second)


def baddbmm(axis_map: AxisMap, node: fx.Node) -> Axes:
    out = _batched_product(axis_map, node, node.args[1], node.args[2])
    for own, axis in zip(reversed(axis_map.of(node.args[0])), reversed(out), strict=False):
        if ax.find(own).size != 1:
            ax.unify(own, axis)
    return out


def _batched_product(axis_map: AxisMap, node: fx.Node, first: Any, second: Any) -> Axes:
    x, y = axis_map.of(first), axis_map.of(second)
    ax.unify(x[-1], y[-2])
    weighted = axis_map.is_weight(first) or axis_map.is_weight(second)
    ax.block(x[-1], f"{called(node)} {'contracts it with many matrices' if weighted else OF_ACTIVATIONS}")
    lead = axis_map.align_leading(node, [(first, x[:-2]), (second, y[:-2])])
    return (*lead, x[-2], y[-1])


def attention(axis_map: AxisMap, node: fx.Node) -> Axes:
    """Attention ties batch and heads of q, k, v and the mask, and blocks sequence and head size."""
    q, k, v = (t for t in node.args[:3] if isinstance(t, fx.Node))
    mask = argument(node, 3, "attn_mask")
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
            if ax.find(axis).size != 1:
                ax.unify(axis, score)
    lead = axis_map.align_leading(node, leading)
    return (*lead, length, value_size)


def scaled_softmax(axis_map: AxisMap, node: fx.Node) -> Axes:
    """Relate the softmax of an attention: the mask spreads over the scores, queries and keys stay whole."""
    own = broadcast(axis_map, node)
    for axis in own[-2:]:
        ax.block(axis, f"{called(node)} {ATTENTION}")
    return own


def embedding(axis_map: AxisMap, node: fx.Node) -> Axes:
    """Contract the vocabulary in a lookup: one-hot(ids) x weight."""
    weight, ids = axis_map.of(node.args[0]), axis_map.of(node.args[1])
    axis_map.contractions[node] = weight[0]
    if not axis_map.reads_batch(node.args[1]):
        ax.block(weight[0], f"{called(node)} looks up the same rows in every step")
    return (*ids, weight[1])


def cross_entropy(axis_map: AxisMap, node: fx.Node) -> Axes:
    """Contract the vocabulary in the loss (SC21 §2.3: computed without gathering the logits)."""
    logits, target = axis_map.of(node.args[0]), axis_map.of(node.args[1])
    weighted = argument(node, 2, "weight") is not None or argument(node, 5, "label_smoothing", 0.0) != 0.0
    plain = len(logits) == 2 and len(target) == 1 and argument(node, 3, "reduction", 1) in (1, 2)
    if not plain or weighted:
        return class_loss(axis_map, node)
    ax.unify(logits[0], target[0])
    axis_map.contractions[node] = logits[1]
    return ()


def class_loss(axis_map: AxisMap, node: fx.Node) -> Axes:
    """Keep the classes whole in a loss of [N, classes, ..] against [N, ..]."""
    logits, target = axis_map.of(node.args[0]), axis_map.of(node.args[1])
    classes = min(1, len(logits) - 1)
    rest = (*logits[:classes], *logits[classes + 1 :])
    for own, axis in zip(target, logits if len(target) == len(logits) else rest, strict=True):
        ax.unify(own, axis)
    weight = argument(node, 2, "weight")
    for axis in (logits[classes], *(axis_map.of(weight) if isinstance(weight, fx.Node) else ())):
        ax.block(axis, f"{called(node)} is a loss that is not divided")
    return target if shape_of(node) else ()


def gather(axis_map: AxisMap, node: fx.Node) -> Axes:
    """One element of a dimension for each element of an index: that dimension is needed whole."""
    own, index = axis_map.of(node.args[0]), axis_map.of(node.args[2])
    dim: Any = node.args[1]
    for d, (axis, picked) in enumerate(zip(own, index, strict=True)):
        if d != dim % len(own) and ax.find(axis).size == ax.find(picked).size:
            ax.unify(axis, picked)
        else:
            ax.block(axis, f"{called(node)} picks from it")
            ax.block(picked, f"{called(node)} picks by it")
    return index


def einsum(axis_map: AxisMap, node: fx.Node) -> Axes:
    """Relate a product by its equation: equal letters are one axis; with a weight, a summed letter is a contraction."""
    equation = str(node.args[0]).replace(" ", "")
    operands: Any = node.args[1]
    sides = equation.split("->")
    groups = sides[0].split(",")
    if len(sides) != 2 or "." in equation or any(len(set(g)) != len(g) for g in groups):
        return opaque_tensor(axis_map, node)
    named: dict[str, Axis] = {}
    for operand, letters in zip(operands, groups, strict=True):
        for letter, axis in zip(letters, axis_map.of(operand), strict=True):
            known = named.setdefault(letter, axis)
            if ax.find(known).size == ax.find(axis).size:
                ax.unify(known, axis)
            else:
                return opaque_tensor(axis_map, node)
    summed = [axis for letter, axis in named.items() if letter not in sides[1]]
    if len(summed) == 1 and len(operands) == 2 and any(map(axis_map.is_weight, operands)):
        axis_map.sum_over(node, summed[0])
    else:
        weighted = any(map(axis_map.is_weight, operands))
        reason = f"sums over it and {len(summed) - 1} more at once" if weighted else OF_ACTIVATIONS
        for axis in summed:
            ax.block(axis, f"{called(node)} {reason}")
        shared = [letter for letter in sides[1] if all(letter in group for group in groups)]
        if len(shared) > 1:
            axis_map.heads.append((node, named[shared[-1]]))
    return tuple(named[letter] for letter in sides[1])


def reduce_sum(axis_map: AxisMap, node: fx.Node) -> Axes:
    """Make the sum over one divided axis a partial sum; other reductions block their dimensions."""
    own = axis_map.of(node.args[0])
    dims = reduced_dims(node, len(own))
    if len(dims) == 1:
        axis_map.sum_over(node, own[dims[0]])
    else:
        for d in dims:
            ax.block(own[d], f"{called(node)} sums over it")
    return _reduced(node, own, dims)


def reduce_whole(axis_map: AxisMap, node: fx.Node) -> Any:
    """Mean, maximum and the like need the whole dimension; some say where it is too."""
    own = axis_map.of(node.args[0])
    dims = reduced_dims(node, len(own))
    for d in dims:
        ax.block(own[d], f"{called(node)} reduces over it")
    reduced = _reduced(node, own, dims)
    value = node.meta["val"]
    return (reduced,) * len(value) if isinstance(value, (tuple, list)) else reduced


def _reduced(node: fx.Node, own: Axes, dims: list[int]) -> Axes:
    value = node.meta["val"]
    if (value[0] if isinstance(value, (tuple, list)) else value).dim() == len(own):
        return tuple(Axis(1) if d in dims else a for d, a in enumerate(own))
    return tuple(a for d, a in enumerate(own) if d not in dims)


def over_dim(axis_map: AxisMap, node: fx.Node) -> Axes:
    """Softmax, cumulative sums: the shape stays, the dimension is needed whole."""
    own = axis_map.of(node.args[0])
    ax.block(own[int(argument(node, 1, "dim", -1))], f"{called(node)} {RUNS}")
    return own


def layer_norm(axis_map: AxisMap, node: fx.Node) -> Axes:
    own = axis_map.of(node.args[0])
    width = len(node.args[1])  # type: ignore[arg-type]
    for axis in own[-width:]:
        ax.block(axis, f"{called(node)} normalises over it")
    for extra in node.all_input_nodes:
        if extra is not node.args[0]:
            for mine, axis in zip(axis_map.of(extra), own[-width:], strict=True):
                ax.unify(mine, axis)
    return own
