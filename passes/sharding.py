"""Megatron's tensor parallelism, found in the graph (SC21 §2.3): divide axes, sum partial results, place f and g.

The axis analysis says which dimensions are the same axis; `choose_axes` picks which to divide; this pass rewrites the
graph to what ONE tensor rank computes: local sizes in the operators that name sizes, vocabulary-parallel kernels for
embedding and loss, an all-reduce (g) behind each contraction of a divided axis, its bias added once behind that, and
finally (see `gradients`) the conjugate f where a replicated value enters a divided region.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import fx

from autoptd.passes import axes as ax
from autoptd.passes.analysis import Analysis, operator_name, user_rules
from autoptd.passes.axes import Axes, Axis
from autoptd.passes.axis_rules import argument, shape_of, where
from autoptd.passes.choice import choose_axes, divided_leaf, replicated_heads
from autoptd.passes.gradients import place_copies
from autoptd.passes.program import Program, Stage
from autoptd.passes.propagation import Propagation
from autoptd.runtime import collectives, kernels
from autoptd.runtime.manifest import Input
from autoptd.runtime.placement import Parameter, Placement, Segment

aten = torch.ops.aten


def shard_tensors(program: Program, *, rules: Mapping[Any, str] | None = None) -> Program:
    """Divide the one-stage program over the tensor ranks of its mesh; every value's ``meta`` becomes one rank's.

    Also finds which dimension of each batch input is the batch, and gives dropout the axes its mask is keyed by.
    Raises ValueError for an operator without a rule, or heads that t does not divide.
    """
    (stage,) = program.stages
    tensor = program.mesh.tensor
    table = user_rules(rules)
    analysis = Analysis(stage.graph, stage.parameters, tensor=tensor, rules=table)
    severed = replicated_heads(analysis) if tensor > 1 else frozenset[fx.Node]()
    if severed:
        analysis = Analysis(stage.graph, stage.parameters, tensor=tensor, rules=table, sever=severed)
    inputs, batch = find_batch(program.inputs, analysis)
    divided, notes = choose_axes(stage.graph, analysis)
    lowering = _Lowering(stage, program, analysis, divided, batch)
    graph = lowering.run()
    parameters, copies = place_copies(graph, lowering.parameters)
    reductions = sum(n.target is collectives.reduce_from_tensor for n in graph.nodes)
    entry = (
        f"shard_tensors tensor={tensor}: {len(divided)} axes divided, {reductions} all-reduces forward, {copies} backward"
    )
    whole = replace(stage, graph=graph, parameters=parameters)
    return replace(program, stages=(whole,), inputs=inputs, log=(*program.log, entry, *notes))


def find_batch(inputs: tuple[Input, ...], analysis: Analysis) -> tuple[tuple[Input, ...], set[Axis]]:
    """The batch dimension of each input: the first axis of the inputs that no operator needs whole.

    For a batch of one, axes say nothing (size 1 has none) and the captured guess stands.
    """
    nodes = {str(n.target): n for n in analysis.inputs}
    wanted = {i.shape[i.batch_dim] for i in inputs if i.batch_dim is not None and i.name in nodes}
    candidates = [
        leaf
        for node in nodes.values()
        for axis in analysis.of(node)
        for leaf in ax.factors(axis)
        if leaf.size in wanted and leaf.size > 1
    ]
    free = [leaf for leaf in candidates if not leaf.blocked]
    batch = {(free or candidates)[0]} if candidates else set()
    if not batch:
        return inputs, batch
    found = []
    for entry in inputs:
        dims = analysis.of(nodes[entry.name]) if entry.name in nodes else ()
        at = [d for d, axis in enumerate(dims) if ax.find(axis) in batch]
        found.append(replace(entry, batch_dim=at[0] if at else None) if dims else entry)
    return tuple(found), batch


class _Lowering:
    """The rewrite of one graph to one tensor rank's; `value` maps an old node to what now stands for it."""

    def __init__(
        self, stage: Stage, program: Program, analysis: Analysis, divided: dict[Axis, int], batch: set[Axis]
    ) -> None:
        self.old = stage.graph
        self.analysis = analysis
        self.divided = divided
        self.batch = batch
        self.single = any(i.batch_dim is not None and i.shape[i.batch_dim] == 1 for i in program.inputs)
        self.tensor = program.mesh.tensor
        self.graph = fx.Graph()
        self.values: dict[fx.Node, fx.Node] = {}
        self.parameters: dict[str, Parameter] = dict(stage.parameters)
        self.propagation = Propagation(program.mesh)
        self.extents: dict[Axis, int] = {}
        self.biases: dict[fx.Node, list[tuple[fx.Node, Any]]] = {}  # of a partial sum: (old linear, its bias)

    def run(self) -> fx.Graph:
        for node in self.old.nodes:
            if node.op == "output":
                self.graph.output(self.whole(node.args[0]))
                continue
            if node.op == "get_attr":
                self._place_parameter(node)
            if node.op == "call_function":
                self.values[node] = LOWERINGS.get(operator_name(node.target), lower_same)(self, node)
            else:
                self.values[node] = self.copy(node)
        return self.graph

    # Values

    def whole(self, node: Any) -> Any:
        """What stands for `node`; a partial sum is all-reduced first, and its biases are added once, behind that."""
        if not isinstance(node, fx.Node):
            return node
        value = self.values[node]
        if value.meta.get("partial"):
            biases = self.biases.get(value, ())
            name = f"{value.name}_g"
            value = self.add(collectives.reduce_from_tensor, (self.rank, value), value, name=name)
            for linear, bias in biases:
                args = (value, self.whole(bias))
                value = self.add(aten.add.Tensor, args, linear, name=f"{linear.name}_biased")
            self.values[node] = value
        return value

    @property
    def rank(self) -> fx.Node:
        assert self.analysis.rank is not None
        return self.values[self.analysis.rank]

    def copy(self, node: fx.Node, args: Any = None, kwargs: Any = None, target: Any = None) -> fx.Node:
        """The node in the new graph, with other arguments or another target."""
        plain = args is None and kwargs is None
        if plain:
            args = fx.node.map_arg(node.args, self.whole)
            kwargs = fx.node.map_arg(node.kwargs, self.whole)
        new = self.graph.create_node(node.op, target or node.target, args, kwargs or {}, name=node.name)
        new.meta = dict(node.meta)
        axes = self.analysis.all_of(node)
        changed = self.tensor > 1 and (not plain or any(divided_leaf(a, self.divided) for a in axes))
        if not changed:
            new.meta.update(divided=None, partial=False)
        elif node.op == "call_function":
            new.meta["val"] = self.propagation.run(new)
            self._mark(new, node, axes)
        else:
            new.meta["val"] = self._empty(node)
            self._mark(new, node, axes)
        return new

    def add(self, target: Any, args: tuple[Any, ...], like: fx.Node, *, name: str, partial: bool = False) -> fx.Node:
        """A further node, placed in the user's model where `like` is."""
        new = self.graph.create_node("call_function", target, args, {}, name=name)
        new.meta = {"path": like.meta.get("path", ""), "line": like.meta.get("line", "")}
        new.meta.update(divided=None, partial=partial, val=self.propagation.run(new))
        return new

    def _mark(self, new: fx.Node, node: fx.Node, axes: tuple[Axes, ...]) -> None:
        """Say which dimension is divided: an int or None, a tuple of those for several results."""
        dims = tuple(next((d for d, a in enumerate(own) if divided_leaf([a], self.divided)), None) for own in axes)
        several = isinstance(node.meta.get("val"), (tuple, list))
        new.meta.update(divided=dims if several else dims[0], partial=False)

    def _empty(self, node: fx.Node) -> torch.Tensor:
        value: torch.Tensor = node.meta["val"]
        return value.new_empty([self.extent(a) for a in self.analysis.of(node)])

    # Sizes

    def extent(self, axis: Axis) -> int:
        """The axis's size on one rank."""
        axis = ax.find(axis)
        if axis not in self.extents:
            if axis.kind == "leaf":
                size = (axis.size + self.divided[axis]) // self.tensor if axis in self.divided else axis.size
            else:
                size = (prod if axis.kind == "product" else sum)(self.extent(p) for p in axis.parts)
            self.extents[axis] = size
        return self.extents[axis]

    def offset(self, axis: Axis, position: int) -> int:
        """Where global `position` of the axis, a boundary of its segments, lies on one rank."""
        axis = ax.find(axis)
        if position in (0, axis.size):
            return self.extent(axis) if position else 0
        if axis.kind == "sum":
            total = 0
            for part in axis.parts:
                size = ax.find(part).size
                if position <= size:
                    return total + self.offset(part, position)
                total, position = total + self.extent(part), position - size
        if axis.kind == "product":
            first, *rest = ax.factors(axis)
            inner = ax.product(rest)
            steps, over = divmod(position, inner.size)
            assert over == 0, "a slice of a product falls on whole steps of its first factor"
            return self.offset(first, steps) * self.extent(inner)
        assert axis not in self.divided, "a divided leaf is not cut"
        return position

    def sizes(self, axes: Axes) -> list[int]:
        return [self.extent(a) for a in axes]

    def is_divided(self, axes: Axes) -> bool:
        return divided_leaf(axes, self.divided)

    # Parameters

    def _place_parameter(self, node: fx.Node) -> None:
        name = str(node.target)
        axes = self.analysis.of(node)
        dims = [d for d, a in enumerate(axes) if self.is_divided((a,))]
        if dims:
            segments = tuple(self._segments(axes[dims[0]]))
            padding = sum(s.rows for s in segments) - ax.find(axes[dims[0]]).size
            placement = Placement(dims[0], segments, padding)
            self.parameters[name] = replace(self.parameters[name], placement=placement)

    def _segments(self, axis: Axis) -> list[Segment]:
        """The axis as consecutive [outer, size, inner] segments."""
        parts = ax.factors(axis)
        at = next((i for i, f in enumerate(parts) if self.is_divided((f,))), None)
        if at is None:
            return [Segment(1, ax.find(axis).size, 1, False)]
        outer, inner = prod(p.size for p in parts[:at]), prod(p.size for p in parts[at + 1 :])
        factor = parts[at]
        if factor.kind == "leaf":
            return [Segment(outer, factor.size + self.divided[factor], inner, True)]
        assert outer == 1, "choose_axes leaves sums inside an outer factor whole"
        below = [s for part in factor.parts for s in self._segments(part)]
        return [replace(s, inner=s.inner * inner) for s in below]


Lower = Callable[[_Lowering, fx.Node], fx.Node]


def lower_same(low: _Lowering, node: fx.Node) -> fx.Node:
    """Operators that name no size: the same call on local tensors; a contraction gives a partial sum."""
    axis = low.analysis.contractions.get(node)
    new = low.copy(node)
    if axis is not None and low.is_divided((axis,)):
        new.meta["val"] = low.propagation.run(new)
        new.meta.update(divided=None, partial=True)
    return new


def lower_linear(low: _Lowering, node: fx.Node) -> fx.Node:
    """Row-parallel: the bias leaves the linear, to be added once, behind the all-reduce."""
    bias = argument(node, 2, "bias")
    if not low.is_divided((low.analysis.contractions[node],)):
        return low.copy(node)
    return _contract_with_bias(low, node, aten.linear.default, (low.whole(node.args[0]), low.whole(node.args[1])), bias)


def lower_addmm(low: _Lowering, node: fx.Node) -> fx.Node:
    """The same for a weight stored in x out."""
    if not low.is_divided((low.analysis.contractions[node],)):
        return low.copy(node)
    return _contract_with_bias(
        low, node, aten.mm.default, (low.whole(node.args[1]), low.whole(node.args[2])), node.args[0]
    )


def _contract_with_bias(low: _Lowering, node: fx.Node, target: Any, args: tuple[Any, ...], bias: Any) -> fx.Node:
    if node.kwargs.keys() & {"alpha", "beta"}:
        raise ValueError(f"addmm with alpha or beta at {where(node)} cannot be row-parallel; use tensor=1")
    product = low.add(target, args, node, name=node.name, partial=True)
    if bias is not None:
        low.biases[product] = [(node, bias)]
    return product


def lower_add(low: _Lowering, node: fx.Node) -> fx.Node:
    """Two partial sums add up to one: reduce them together, once."""
    first, second = node.args[0], node.args[1]
    both = [low.values[a] for a in (first, second) if isinstance(a, fx.Node) and len(a.users) == 1]
    plain = len(node.args) == 2 and not node.kwargs
    if len(both) == 2 and plain and all(v.meta.get("partial") for v in both):
        total = low.add(node.target, (both[0], both[1]), node, name=node.name, partial=True)
        low.biases[total] = [bias for part in both for bias in low.biases.get(part, ())]
        return total
    return lower_same(low, node)


def lower_view(low: _Lowering, node: fx.Node) -> fx.Node:
    """Views, with the result's local sizes; of a partial sum that nobody else reads, a partial sum."""
    source = low.values[node.args[0]]  # type: ignore[index]
    sizes = low.sizes(low.analysis.of(node))
    target = node.target
    if operator_name(node.target) in ("aten.flatten", "aten.unflatten"):
        target = aten.reshape.default
    if source.meta.get("partial") and len(node.args[0].users) == 1:  # type: ignore[union-attr]
        if not low.biases.get(source):
            return low.add(target, (source, sizes), node, name=node.name, partial=True)
    if target is node.target and sizes == list(shape_of(node)):
        return low.copy(node)
    return low.copy(node, args=(low.whole(node.args[0]), sizes), target=target)


def lower_sized(low: _Lowering, node: fx.Node) -> fx.Node:
    """Operators whose second argument is the shape of the result: ``expand``, ``new_zeros``."""
    axes = low.analysis.of(node)
    if not low.is_divided(axes):
        return low.copy(node)
    args = fx.node.map_arg(node.args, low.whole)
    return low.copy(node, args=(args[0], low.sizes(axes), *args[2:]), kwargs=dict(node.kwargs))


def lower_factory(low: _Lowering, node: fx.Node) -> fx.Node:
    """Operators whose first argument is the shape of the result: ``full``."""
    axes = low.analysis.of(node)
    if not low.is_divided(axes):
        return low.copy(node)
    args = fx.node.map_arg(node.args, low.whole)
    return low.copy(node, args=(low.sizes(axes), *args[1:]), kwargs=dict(node.kwargs))


def lower_repeat(low: _Lowering, node: fx.Node) -> fx.Node:
    """``repeat_interleave`` by the local size of the group it makes."""
    axes = low.analysis.of(node)
    dim = argument(node, 2, "dim")
    if dim is None or not low.is_divided(axes):
        return low.copy(node)
    times = low.extent(axes[dim]) // low.extent(low.analysis.of(node.args[0])[dim])
    return low.copy(node, args=(low.whole(node.args[0]), times, dim))


def lower_split(low: _Lowering, node: fx.Node) -> fx.Node:
    """Pieces of local size."""
    dim = int(argument(node, 2, "dim", 0))
    sizes = [low.extent(axes[dim]) for axes in low.analysis.all_of(node)]
    name = operator_name(node.target)
    if name == "aten.chunk" or not any(low.is_divided(axes) for axes in low.analysis.all_of(node)):
        return low.copy(node)
    size = sizes[0] if name == "aten.split" and isinstance(node.args[1], int) else sizes
    return low.copy(node, args=(low.whole(node.args[0]), size, dim), target=_split_target(node, size))


def _split_target(node: fx.Node, size: int | list[int]) -> Any:
    return aten.split.Tensor if isinstance(size, int) else aten.split_with_sizes.default


def lower_slice(low: _Lowering, node: fx.Node) -> fx.Node:
    """A run of rows, where it lies on this rank."""
    own = low.analysis.of(node.args[0])
    dim = int(argument(node, 1, "dim", 0)) % len(own)
    if not low.is_divided((own[dim],)):
        return low.copy(node)
    size, length = ax.find(own[dim]).size, shape_of(node)[dim]
    start = int(argument(node, 2, "start") or 0)
    first = low.offset(own[dim], start + size if start < 0 else start)
    end = first + low.extent(low.analysis.of(node)[dim])
    if length == size:
        return low.copy(node, args=(low.whole(node.args[0]), dim, 0, low.extent(own[dim])), target=aten.slice.Tensor)
    return low.copy(node, args=(low.whole(node.args[0]), dim, first, end), target=aten.slice.Tensor)


def lower_embedding(low: _Lowering, node: fx.Node) -> fx.Node:
    """Vocabulary-parallel lookup: each rank looks up what its rows hold, the sum is the embedding."""
    axis = low.analysis.contractions[node]
    if not low.is_divided((axis,)):
        return low.copy(node)
    padding = argument(node, 2, "padding_idx", -1)
    args = (low.rank, low.whole(node.args[0]), low.whole(node.args[1]), ax.find(axis).size)
    args = (*args, padding) if padding >= 0 else args
    return low.add(kernels.embedding, args, node, name=node.name, partial=True)


def lower_cross_entropy(low: _Lowering, node: fx.Node) -> fx.Node:
    """Vocabulary-parallel loss: the logits stay divided."""
    axis = low.analysis.contractions.get(node)
    if axis is None or not low.is_divided((axis,)):
        return low.copy(node)
    reduction = {1: "mean", 2: "sum"}[argument(node, 3, "reduction", 1)]
    logits, target = low.whole(node.args[0]), low.whole(node.args[1])
    ignore = argument(node, 4, "ignore_index", -100)
    args = (low.rank, logits, target, ax.find(axis).size, ignore, reduction)
    return low.add(kernels.cross_entropy, args, node, name=node.name)


def lower_attention(low: _Lowering, node: fx.Node) -> fx.Node:
    """Attention over this rank's heads; replicated keys and values are cut down to them first."""
    new = _lower_severed(low, node) if _severed(low, node) else lower_same(low, node)
    if operator_name(node.target) == "kernels.attention":
        lead = low.analysis.of(node)[:-2]
        new.kwargs = {**new.kwargs, **_keyed_by(low, node, lead)}
    return new


def _severed(low: _Lowering, node: fx.Node) -> bool:
    heads = low.analysis.of(node)[-3:-2]
    return low.is_divided(heads) and any(at is node for at, _ in low.analysis.severed)


def _lower_severed(low: _Lowering, node: fx.Node) -> fx.Node:
    """Repeat grouped keys and values to the number of query heads, then take this rank's."""
    heads = ax.find(low.analysis.of(node)[-3]).size
    own: dict[fx.Node, fx.Node] = {}
    for (at, tensor), dim in low.analysis.severed.items():
        if at is not node:
            continue
        value, found = low.whole(tensor), shape_of(tensor)[dim]
        if found != heads:
            value = low.add(
                aten.repeat_interleave.self_int, (value, heads // found, dim), node, name=f"{tensor.name}_repeated"
            )
        own[tensor] = low.add(collectives.take_own, (low.rank, value, dim), node, name=f"{tensor.name}_own")
        own[tensor].meta["divided"] = dim
    args = fx.node.map_arg(node.args, lambda n: own.get(n) or low.whole(n))
    kwargs = {k: v for k, v in node.kwargs.items() if k != "enable_gqa"}
    return low.copy(node, args=args, kwargs=fx.node.map_arg(kwargs, low.whole))


def lower_dropout(low: _Lowering, node: fx.Node) -> fx.Node:
    """Say along which axes the mask is keyed: the element's place in one sample's undivided tensor."""
    new = lower_same(low, node)
    new.kwargs = _keyed_by(low, node, low.analysis.of(node))
    return new


def _keyed_by(low: _Lowering, node: fx.Node, axes: Axes) -> dict[str, Any]:
    """`sample`, `divided` and, where they are inside a merged dimension, the unmerged `shape`."""
    flat: list[Axis] = []
    for axis in axes:
        parts = ax.factors(axis)
        inside = any(f in low.batch for f in parts) or any(low.is_divided((f,)) for f in parts[1:])
        flat.extend(parts if inside else [ax.find(axis)])
    shape = [low.extent(f) for f in flat]
    if low.single:  # a batch of one has no axis to find: any dimension of size 1 stands for it
        if all(f.size != 1 for f in flat):
            flat, shape = [Axis(1), *flat], [1, *shape]
        sample: int | None = [f.size for f in flat].index(1)
    else:
        sample = next((i for i, f in enumerate(flat) if f in low.batch), None)
    divided = next((i for i, f in enumerate(flat) if low.is_divided((f,))), None)
    if divided is not None and flat[divided].kind == "sum":
        raise ValueError(f"dropout over packed segments at {where(node)} cannot be divided; unpack them first")
    found: dict[str, Any] = {"sample": sample}
    if divided is not None:
        found["divided"] = divided
    if len(flat) != len(axes):
        found["shape"] = shape
    return found


LOWERINGS: Mapping[str, Lower] = {
    "aten.linear": lower_linear,
    "aten.addmm": lower_addmm,
    "aten.add": lower_add,
    **dict.fromkeys(["aten.view", "aten.reshape", "aten._unsafe_view", "aten.flatten", "aten.unflatten"], lower_view),
    **dict.fromkeys(["aten.expand", "aten.new_zeros", "aten.new_ones", "aten.new_full", "aten.new_empty"], lower_sized),
    **dict.fromkeys(["aten.zeros", "aten.ones", "aten.full"], lower_factory),
    "aten.repeat_interleave": lower_repeat,
    **dict.fromkeys(["aten.split", "aten.split_with_sizes", "aten.chunk"], lower_split),
    **dict.fromkeys(["aten.slice", "aten.narrow"], lower_slice),
    "aten.embedding": lower_embedding,
    "aten.cross_entropy_loss": lower_cross_entropy,
    **dict.fromkeys(["aten.scaled_dot_product_attention", "kernels.attention"], lower_attention),
    **dict.fromkeys(["aten.matmul", "aten.bmm"], lower_attention),
    "kernels.dropout": lower_dropout,
    f"{operator.getitem.__module__}.getitem": lower_same,
}
