"""Write each operator for one tensor rank: local sizes, partial sums, kernels for the vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from autoptd.passes.ir.node_info import change_info, info
from autoptd.passes.ir.nodes import argument, arguments_of, operator_name, shape_of, where
from autoptd.passes.tensor_parallel import axes as ax
from autoptd.passes.tensor_parallel.axes import Axes, Axis
from autoptd.passes.tensor_parallel.localize import Lowering
from autoptd.runtime import collectives, kernels

aten = torch.ops.aten

Lower = Callable[[Lowering, fx.Node], fx.Node]


def lower_operator(low: Lowering, node: fx.Node) -> fx.Node:
    """Write the call on one rank, by the operator's row in `LOWERINGS`."""
    return LOWERINGS.get(operator_name(node.target), lower_same)(low, node)


def lower_same(low: Lowering, node: fx.Node) -> fx.Node:
    """Operators that name no size: the same call on local tensors; a contraction gives a partial sum."""
    axis = low.axis_map.contractions.get(node)
    new = low.copy(node)
    if axis is not None and low.is_divided((axis,)):
        new.meta["val"] = low.propagation.run(new)
        change_info(new, divided=None, partial=True)
    return new


def lower_linear(low: Lowering, node: fx.Node) -> fx.Node:
    """Row-parallel: the bias leaves the linear, to be added once, behind the all-reduce."""
    bias = argument(node, 2, "bias")
    if not low.is_divided((low.axis_map.contractions[node],)):
        return low.copy(node)
    return _contract_with_bias(
        low, node, aten.linear.default, (low.whole(node.args[0]), low.whole(node.args[1])), bias
    )


def lower_addmm(low: Lowering, node: fx.Node) -> fx.Node:
    """Write the same for a weight stored in x out."""
    if not low.is_divided((low.axis_map.contractions[node],)):
        return low.copy(node)
    return _contract_with_bias(
        low, node, aten.mm.default, (low.whole(node.args[1]), low.whole(node.args[2])), node.args[0]
    )


def _contract_with_bias(
    low: Lowering, node: fx.Node, target: Any, args: tuple[Any, ...], bias: Any
) -> fx.Node:
    if node.kwargs.keys() & {"alpha", "beta"}:
        raise ValueError(f"addmm with alpha or beta at {where(node)} cannot be row-parallel; use tensor=1")
    product = low.add(target, args, node, name=node.name, partial=True)
    if bias is not None:
        low.biases[product] = [(node, bias)]
    return product


def lower_add(low: Lowering, node: fx.Node) -> fx.Node:
    """Two partial sums add up to one: reduce them together, once."""
    first, second = node.args[0], node.args[1]
    both = [low.values[a] for a in (first, second) if isinstance(a, fx.Node) and len(a.users) == 1]
    plain = len(node.args) == 2 and not node.kwargs
    if len(both) == 2 and plain and all(info(v).partial for v in both):
        total = low.add(node.target, (both[0], both[1]), node, name=node.name, partial=True)
        low.biases[total] = [bias for part in both for bias in low.biases.get(part, ())]
        return total
    return lower_same(low, node)


def lower_view(low: Lowering, node: fx.Node) -> fx.Node:
    """Views, with the result's local sizes; of a partial sum that nobody else reads, a partial sum."""
    source = low.values[node.args[0]]  # type: ignore[index]
    sizes = low.sizes(low.axis_map.of(node))
    target = node.target
    if operator_name(node.target) in ("aten.flatten", "aten.unflatten"):
        target = aten.reshape.default
    alone = len(node.args[0].users) == 1  # type: ignore[union-attr]
    if info(source).partial and alone and not low.biases.get(source):
        return low.add(target, (source, sizes), node, name=node.name, partial=True)
    if target is node.target and sizes == list(shape_of(node)):
        return low.copy(node)
    return low.copy(node, args=(low.whole(node.args[0]), sizes), target=target)


def lower_sized(low: Lowering, node: fx.Node) -> fx.Node:
    """Operators whose second argument is the shape of the result: ``expand``, ``new_zeros``."""
    axes = low.axis_map.of(node)
    if not low.is_divided(axes):
        return low.copy(node)
    args = fx.node.map_arg(node.args, low.whole)
    return low.copy(node, args=(args[0], low.sizes(axes), *args[2:]), kwargs=dict(node.kwargs))


def lower_factory(low: Lowering, node: fx.Node) -> fx.Node:
    """Operators whose first argument is the shape of the result: ``full``."""
    axes = low.axis_map.of(node)
    if not low.is_divided(axes):
        return low.copy(node)
    args = fx.node.map_arg(node.args, low.whole)
    return low.copy(node, args=(low.sizes(axes), *args[1:]), kwargs=dict(node.kwargs))


def lower_repeat(low: Lowering, node: fx.Node) -> fx.Node:
    """``repeat_interleave`` by the local size of the group it makes."""
    axes = low.axis_map.of(node)
    dim = argument(node, 2, "dim")
    if dim is None or not low.is_divided(axes):
        return low.copy(node)
    times = low.extent(axes[dim]) // low.extent(low.axis_map.of(node.args[0])[dim])
    return low.copy(node, args=(low.whole(node.args[0]), times, dim))


def lower_split(low: Lowering, node: fx.Node) -> fx.Node:
    """Pieces of local size."""
    dim = int(argument(node, 2, "dim", 0))
    sizes = [low.extent(axes[dim]) for axes in low.axis_map.all_of(node)]
    name = operator_name(node.target)
    if name == "aten.chunk" or not any(low.is_divided(axes) for axes in low.axis_map.all_of(node)):
        return low.copy(node)
    size = sizes[0] if name == "aten.split" and isinstance(node.args[1], int) else sizes
    return low.copy(node, args=(low.whole(node.args[0]), size, dim), target=_split_target(node, size))


def _split_target(node: fx.Node, size: int | list[int]) -> Any:
    return aten.split.Tensor if isinstance(size, int) else aten.split_with_sizes.default


def lower_slice(low: Lowering, node: fx.Node) -> fx.Node:
    """Write a run of rows that lies on this rank."""
    own = low.axis_map.of(node.args[0])
    dim = int(argument(node, 1, "dim", 0)) % len(own)
    if not low.is_divided((own[dim],)):
        return low.copy(node)
    size, length = ax.find(own[dim]).size, shape_of(node)[dim]
    start = int(argument(node, 2, "start") or 0)
    first = low.offset(own[dim], start + size if start < 0 else start)
    end = first + low.extent(low.axis_map.of(node)[dim])
    if length == size:
        return low.copy(
            node, args=(low.whole(node.args[0]), dim, 0, low.extent(own[dim])), target=aten.slice.Tensor
        )
    return low.copy(node, args=(low.whole(node.args[0]), dim, first, end), target=aten.slice.Tensor)


def lower_embedding(low: Lowering, node: fx.Node) -> fx.Node:
    """Vocabulary-parallel lookup: each rank looks up what its rows hold, the sum is the embedding."""
    axis = low.axis_map.contractions[node]
    if not low.is_divided((axis,)):
        return low.copy(node)
    padding = argument(node, 2, "padding_idx", -1)
    known = (ax.find(axis).size, padding) if padding >= 0 else (ax.find(axis).size,)
    args = (low.rank, low.whole(node.args[0]), low.whole(node.args[1]), *known)
    return low.add(kernels.embedding, args, node, name=node.name, partial=True)


def lower_cross_entropy(low: Lowering, node: fx.Node) -> fx.Node:
    """Vocabulary-parallel loss: the logits stay divided."""
    axis = low.axis_map.contractions.get(node)
    if axis is None or not low.is_divided((axis,)):
        return low.copy(node)
    reduction = {1: "mean", 2: "sum"}[argument(node, 3, "reduction", 1)]
    logits, target = low.whole(node.args[0]), low.whole(node.args[1])
    ignore = argument(node, 4, "ignore_index", -100)
    args = (low.rank, logits, target, ax.find(axis).size, ignore, reduction)
    return low.add(kernels.cross_entropy, args, node, name=node.name)


def lower_attention(low: Lowering, node: fx.Node) -> fx.Node:
    """Attention over this rank's heads; replicated keys and values are cut down to them first."""
    return _lower_severed(low, node) if _severed(low, node) else lower_same(low, node)


def _severed(low: Lowering, node: fx.Node) -> bool:
    heads = low.axis_map.of(node)[-3:-2]
    return low.is_divided(heads) and any(at is node for at, _ in low.axis_map.severed)


def _lower_severed(low: Lowering, node: fx.Node) -> fx.Node:
    """Repeat grouped keys and values to the number of query heads, then take this rank's."""
    heads = ax.find(low.axis_map.of(node)[-3]).size
    own: dict[fx.Node, fx.Node] = {}
    for (at, tensor), dim in low.axis_map.severed.items():
        if at is not node:
            continue
        value, found = low.whole(tensor), shape_of(tensor)[dim]
        if found != heads:
            value = low.add(
                aten.repeat_interleave.self_int,
                (value, heads // found, dim),
                node,
                name=f"{tensor.name}_repeated",
            )
            low.named[value.name] = (_with_heads(low, node, tensor, dim),)
        own[tensor] = low.add(collectives.take_own, (low.rank, value, dim), node, name=f"{tensor.name}_own")
        change_info(own[tensor], divided=dim)
        low.named[own[tensor].name] = (_with_heads(low, node, tensor, dim),)
    args = fx.node.map_arg(node.args, lambda n: own.get(n) or low.whole(n))
    kwargs = {k: v for k, v in node.kwargs.items() if k != "enable_gqa"}
    return low.copy(node, args=args, kwargs=fx.node.map_arg(kwargs, low.whole))


def _with_heads(low: Lowering, node: fx.Node, tensor: fx.Node, dim: int) -> Axes:
    """The axes of keys or values that have the attention's heads."""
    own = low.axis_map.of(tensor)
    return (*own[:dim], low.axis_map.of(node)[-3], *own[dim + 1 :])


def lower_dropout(low: Lowering, node: fx.Node) -> fx.Node:
    """Say along which axes the mask is keyed: the element's place in one sample's undivided tensor."""
    new = lower_same(low, node)
    new.kwargs = _keyed_by(low, node, low.axis_map.of(node))
    return new


def lower_softmax(low: Lowering, node: fx.Node) -> fx.Node:
    """Write an attention's softmax, its dropout keyed like any other."""
    new = lower_same(low, node)
    if argument(node, 5, "p", 0.0):
        new.kwargs = {**new.kwargs, **_keyed_by(low, node, low.axis_map.of(node))}
    return new


def _keyed_by(low: Lowering, node: fx.Node, axes: Axes) -> dict[str, Any]:
    """`sample`, `divided` and, where they are inside a merged dimension, the unmerged `shape`."""
    flat: list[Axis] = []
    for axis in axes:
        parts = ax.factors(axis)
        inside = any(f in low.batch for f in parts) or any(low.is_divided((f,)) for f in parts[1:])
        flat.extend(parts if inside else [ax.find(axis)])
    shape = [low.extent(f) for f in flat]
    reads_batch = low.axis_map.reads_batch(node)
    ones = str(arguments_of(node)[-1].target) in low.filled
    if low.single and (reads_batch or "sample" in node.kwargs or (ones and any(f.size == 1 for f in flat))):
        # There is no axis to find: any dimension of size 1 stands for the batch, in a mask of ones for samples too.
        if all(f.size != 1 for f in flat):
            flat, shape = [Axis(1), *flat], [1, *shape]
        sample: int | None = [f.size for f in flat].index(1)
    else:
        sample = next((i for i, f in enumerate(flat) if f in low.batch), None)
    if sample is None and reads_batch:
        raise ValueError(
            f"dropout at {where(node)} is over {list(shape_of(node))}, in which the batch is no dimension of its own: "
            "its mask would depend on the microbatch; use microbatch_size=1, or drop before the batch is merged"
        )
    divided = next((i for i, f in enumerate(flat) if low.is_divided((f,))), None)
    if divided is not None and flat[divided].kind == "sum":
        raise ValueError(
            f"dropout over packed segments at {where(node)} cannot be divided; unpack them first"
        )
    found: dict[str, Any] = {"sample": sample}
    if divided is not None:
        found["divided"] = divided
    if len(flat) != len(axes):
        found["shape"] = shape
    return found


_ATEN: Mapping[Lower, str] = {
    lower_linear: "linear",
    lower_addmm: "addmm",
    lower_add: "add",
    lower_view: "view reshape _unsafe_view flatten unflatten",
    lower_sized: "expand broadcast_to new_zeros new_ones new_full new_empty",
    lower_factory: "zeros ones full",
    lower_repeat: "repeat_interleave",
    lower_split: "split split_with_sizes chunk tensor_split",
    lower_slice: "slice narrow",
    lower_embedding: "embedding",
    lower_cross_entropy: "cross_entropy_loss",
    lower_attention: "scaled_dot_product_attention matmul bmm",
}
LOWERINGS: Mapping[str, Lower] = {
    **{f"aten.{name}": lower for lower, names in _ATEN.items() for name in names.split()},
    "kernels.dropout": lower_dropout,
    "kernels.scaled_softmax": lower_softmax,
}
