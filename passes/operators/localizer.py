"""The rewrite of a graph to the computation of one tensor rank: values, local sizes, placements of parameters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from torch import fx

from autoptd.passes.ir import nodes
from autoptd.passes.ir.nodes import Propagation, add_node, as_results, change_info, describe, info, shape_of, where
from autoptd.passes.ir.program import Program
from autoptd.passes.operators import axes as ax
from autoptd.passes.operators.axes import Axes, Axis
from autoptd.passes.operators.axis_map import AxisMap
from autoptd.runtime import aten, collectives, kernels
from autoptd.runtime.program.manifest import Result
from autoptd.runtime.program.placement import PARTIAL_SUM, REPLICATED, Placement, Ragged, Segment, Shard


@dataclass(eq=False)
class Localizer:
    """The rewrite of one graph to the graph of one tensor rank; `values` maps each old node to its new one.

    `divided` are the divided axes with their padding, `filled` the names of the constants of one number, and `named`
    the axes of each new node's results, by its name. `biases` of a partial sum are pairs of an old linear and its bias.
    The padding of `cleared` values is zero, and has no gradient.
    """

    program: Program
    axis_map: AxisMap
    divided: dict[Axis, int]
    batch: set[Axis]
    filled: Collection[str]
    graph: fx.Graph = field(default_factory=fx.Graph)
    values: dict[fx.Node, fx.Node] = field(default_factory=dict)
    named: dict[str, tuple[Axes, ...]] = field(default_factory=dict)
    biases: dict[fx.Node, list[tuple[fx.Node, Any]]] = field(default_factory=dict)
    cleared: set[fx.Node] = field(default_factory=set)

    def __post_init__(self) -> None:
        inputs, mesh, (stage,) = self.program.inputs, self.program.mesh, self.program.stages
        self.single = any(i.batch_dim is not None and i.shape[i.batch_dim] == 1 for i in inputs)
        self.old, self.tensor, self.propagation = stage.graph, mesh.tensor, Propagation(mesh)
        self.parameters = dict(stage.parameters)

    def run(self, localize: Callable[[Localizer, fx.Node], fx.Node]) -> fx.Graph:
        """Return the new graph, with every call as `localize` writes it."""
        loaded: dict[tuple[str, Placement], fx.Node] = {}
        for node in self.old.nodes:
            if node.op == "output":
                output = self.graph.output(fx.map_arg(node.args[0], self.whole))
                describe(output, node.meta["val"], info(node), outputs=tuple(self._place_outputs(node)))
                continue
            if node.op == "get_attr":
                old, placement = self.parameters[name := str(node.target)], self._place(self.axis_map.of(node))
                if (first := loaded.setdefault((old.name, placement), node)) is not node:
                    self.values[node] = self.values[first]
                    del self.parameters[name]
                    continue
                self.parameters[name] = replace(old, name=name, placement=placement)
            if node.op == "call_function":
                self.values[node] = localize(self, node)
            elif any(map(self.is_divided, self.axis_map.all_of(node))) and node.op == "placeholder":
                self.values[node] = self._take_classes(node)
            else:
                self.values[node] = self.copy(node)
        return self.graph

    def _take_classes(self, node: fx.Node) -> fx.Node:
        """Return this rank's classes of an input, which every rank gets whole."""
        axes, val = self.axis_map.of(node), node.meta["val"]
        value = self.graph.node_copy(node)
        self.named[value.name] = (axes,)
        dim: Any = self.divided_dim(axes)
        if padding := self.divided[ax.find(axes[dim])]:
            pads = [0, 0] * (val.dim() - dim - 1) + [0, padding]
            value = self.add(aten.constant_pad_nd.default, (value, pads), value, name=f"{node.name}_padded")
        made = self.add(collectives.take_own, (self.rank, value, dim), value, name=f"{node.name}_own")
        change_info(made, placement=Placement(tensor=Shard(dim)))
        self.cleared.add(made)
        return made

    # Values

    def whole(self, node: Any) -> Any:
        """Return the new value of `node`: a partial sum is all-reduced first, and biases are added once, behind it."""
        if not isinstance(node, fx.Node):
            return node
        value = self.values[node]
        if info(value).is_partial:
            biases = self.biases.get(value, ())
            name = f"{value.name}_g"
            value = self.add(collectives.reduce_from_tensor, (self.rank, value), value, name=name)
            for linear, bias in biases:
                name = f"{linear.name}_biased"
                value = self.add(aten.add.Tensor, (value, self.whole(bias)), linear, name=name)
            self.values[node] = value
        return value

    @property
    def rank(self) -> fx.Node:
        return self.values[next(iter(self.old.nodes))]

    def copy(self, node: fx.Node, args: Any = None, kwargs: Any = None, target: Any = None) -> fx.Node:
        """Copy the node to the new graph, with other arguments or another target."""
        plain = args is None and kwargs is None
        if plain:
            args, kwargs = fx.map_arg((node.args, node.kwargs), self.whole)
        new = add_node(self.graph, node.op, target or node.target, args, kwargs or {}, node.name, node.meta)
        axes = self.named[new.name] = self.axis_map.all_of(node)
        changed = self.tensor > 1 and (not plain or any(ax.is_divided(a, self.divided) for a in axes))
        if not changed:
            change_info(new, placement=REPLICATED)
        else:
            if node.op == "call_function":
                new.meta["val"] = self.propagation.run(new)
            else:
                new.meta["val"] = node.meta["val"].new_empty(self.sizes(*axes))
            change_info(new, placement=as_results(node, [self._place(own, rows=False) for own in axes]))
        return new

    def add(self, target: Any, args: Any, like: fx.Node, *, name: str, partial: bool = False) -> fx.Node:
        """Add a further node, at the place of `like` in the user's model."""
        new = add_node(self.graph, "call_function", target, args, name=name)
        placement = PARTIAL_SUM if partial else REPLICATED
        describe(new, self.propagation.run(new), info(like).place, placement=placement)
        self.named[new.name] = self.axis_map.all_of(like) or self.named[like.name]
        return new

    def clear_padding(self, value: fx.Node, axes: Axes) -> fx.Node:
        """Return the new `value`, without what is past the end of a divided dimension and without its gradient."""
        dim = self.divided_dim(axes)
        if dim is None or not self.divided.get(axis := ax.find(axes[dim])) or value in self.cleared:
            return value
        args, name = (self.rank, value, dim, axis.size), f"{value.name}_own"
        made = self.add(kernels.clear_padding, args, value, name=name)
        change_info(made, placement=info(value).placement)
        self.cleared.add(made)
        return made

    # Sizes

    def extent(self, axis: Axis) -> int:
        """Return the axis's size on one rank."""
        axis = ax.find(axis)
        if axis.kind == "leaf":
            return (axis.size + self.divided[axis]) // self.tensor if axis in self.divided else axis.size
        if axis.kind == "ragged":
            return min(axis.size, axis.each * self.extent(axis.parts[0]))
        return (prod if axis.kind == "product" else sum)(self.extent(part) for part in axis.parts)

    def sizes(self, axes: Sequence[Axis]) -> list[int]:
        return [self.extent(a) for a in axes]

    def is_divided(self, axes: Sequence[Axis]) -> bool:
        return ax.is_divided(axes, self.divided)

    def contracted(self, node: fx.Node) -> Axis | None:
        """Return the divided axis that `node` sums over."""
        axis = self.axis_map.contractions.get(node)
        return ax.find(axis) if axis and self.is_divided((axis,)) else None

    def divided_dim(self, axes: Sequence[Axis]) -> int | None:
        return next((d for d, axis in enumerate(axes) if self.is_divided((axis,))), None)

    # Placements

    def _place_outputs(self, output: fx.Node) -> Iterator[Result]:
        """Yield what a call returns besides the loss, with placement and batch dimension: that of the samples' rows."""
        given, inputs = {str(n.target): n for n in self.axis_map.inputs}, self.program.inputs
        split = [(given[i.name], i.batch_dim) for i in inputs if i.batch_dim is not None and i.name in given]
        samples = {axis for n, dim in split for axis in ax.factors(self.axis_map.of(n)[dim])[:1]}
        _, *values = nodes.nodes_in(output.args[0])
        for result, value in zip(info(output).outputs, values, strict=True):
            axes = self.axis_map.of(value)
            outer = (d for d, axis in enumerate(axes) if not samples.isdisjoint(ax.factors(axis)[:1]))
            dtype = self.values[value].meta["val"].dtype  # autocast may have changed it
            yield replace(result, dtype=dtype, placement=self._place(axes), batch_dim=next(outer, None))

    def _place(self, axes: Axes, *, rows: bool = True) -> Placement:
        """Return the placement of a tensor with these axes, and the `rows` of each rank where they are asked for."""
        dim = self.divided_dim(axes)
        if dim is None:
            return REPLICATED
        axis = ax.find(axes[dim])
        if not rows:
            return Placement(tensor=(Ragged if axis.kind == "ragged" else Shard)(dim))
        segments = tuple(self._segments(axis))
        padded = axis.size < sum(segment.rows for segment in segments)
        return Placement(tensor=Shard(dim, segments, axis.size if padded else None))

    def _segments(self, axis: Axis) -> list[Segment]:
        """The axis as consecutive [outer, size, inner] segments."""
        parts = ax.factors(axis)
        at = self.divided_dim(parts)
        if at is None:
            return [Segment(1, ax.find(axis).size, 1, False)]
        outer, inner = prod(p.size for p in parts[:at]), prod(p.size for p in parts[at + 1 :])
        factor = parts[at]
        if factor.kind == "leaf":
            return [Segment(outer, factor.size + self.divided[factor], inner, True)]
        assert outer == 1, "choose_axes leaves sums inside an outer factor whole"
        below = [s for part in factor.parts for s in self._segments(part)]
        return [replace(s, inner=s.inner * inner) for s in below]


LocalRule = Callable[[Localizer, fx.Node], fx.Node]


def same_call(localizer: Localizer, node: fx.Node) -> fx.Node:
    """Write the same call on local tensors, of an operator that names no size; a contraction gives a partial sum."""
    new = localizer.copy(node)
    if localizer.contracted(node):
        new.meta["val"] = localizer.propagation.run(new)
        change_info(new, placement=PARTIAL_SUM)
    return new


def keep_partial(localizer: Localizer, node: fx.Node, x: Any) -> fx.Node | None:
    """Write a call that is linear in `x` on the terms of this partial sum, where one all-reduce serves it and another.

    So a low-rank update of a row-parallel product (LoRA's) is added to it before both are summed. None where `x` is no
    partial sum, others read it, or it does not end in a sum with another one.
    """
    lone = is_lone_sum(localizer, x) and not localizer.biases.get(localizer.values[x])
    if not lone or not _beside(node, x) or not _joins(localizer, node):
        return None
    args = fx.map_arg(node.args, lambda n: localizer.values[n] if n is x else localizer.whole(n))
    return localizer.add(node.target, args, node, name=node.name, partial=True)


def is_lone_sum(localizer: Localizer, x: Any) -> bool:
    """Return whether `x` is a partial sum that one node alone reads."""
    value = localizer.values.get(x) if isinstance(x, fx.Node) else None
    return value is not None and info(value).is_partial and len(x.users) == 1


def _beside(call: fx.Node, x: fx.Node) -> list[Any]:
    """Return the only argument of `call` besides `x`; nothing where there are more, or `x` is taken twice."""
    others = [given for given in call.args if given is not x]
    return others if len(others) == 1 and len(call.args) == 2 and not call.kwargs else []


def _joins(localizer: Localizer, node: fx.Node) -> bool:
    """Return whether `node`, scaled or not, is alone combined, or added to another partial sum of both's dtype."""
    while len(node.users) == 1:
        (user,) = node.users
        others = _beside(user, node)
        if user.target is kernels.combine:
            return node is user.args[0]
        if user.target is aten.add.Tensor:
            dtype = user.meta["val"].dtype
            return any(is_lone_sum(localizer, x) and x.meta["val"].dtype == dtype for x in others)
        if user.target is not aten.mul.Tensor or not others:
            return False
        node = user
    return False


def if_divided(rule: Callable[[Localizer, fx.Node, Axis], fx.Node]) -> LocalRule:
    """Return the `rule` of a call that contracts a divided axis; any other is the same on local tensors."""

    def write(localizer: Localizer, node: fx.Node) -> fx.Node:
        axis = localizer.contracted(node)
        return rule(localizer, node, axis) if axis else localizer.copy(node)

    return write


def key_mask(localizer: Localizer, node: fx.Node) -> dict[str, Any]:
    """Return the axes that a mask or a draw is keyed by: the element's place in one sample's undivided tensor.

    They are `sample`, `divided` and, where they are inside a merged dimension, the unmerged `shape`.
    """
    axes = localizer.axis_map.of(node)
    flat: list[Axis] = []
    for axis in axes:
        parts = ax.factors(axis)
        inside = any(f in localizer.batch for f in parts) or localizer.is_divided(parts[1:])
        flat.extend(parts if inside else [ax.find(axis)])
    if any(f.kind == "ragged" for f in flat):
        raise ValueError(
            f"the draw at {where(node)} is over {list(shape_of(node))}, rows in the order of their experts, of which "
            "each rank has others: draw for tokens, in front of the experts or behind them"
        )
    reads_batch = node in localizer.axis_map.batch
    ones = str(node.all_input_nodes[-1].target) in localizer.filled
    default = 0 if ones and any(f.size == 1 for f in flat) else None
    sampled = reads_batch or node.kwargs.get("sample", default) is not None
    if localizer.single and sampled:
        # There is no axis to find: any dimension of size 1 stands for the batch, in a mask of ones for samples too.
        if all(f.size != 1 for f in flat):
            flat = [Axis(1), *flat]
        sample: int | None = [f.size for f in flat].index(1)
    else:
        sample = next((i for i, f in enumerate(flat) if f in localizer.batch), None)
    counted = node not in localizer.axis_map.learned and any(f.size == b.size for f in flat for b in localizer.batch)
    if sample is None and (reads_batch or counted):
        raise ValueError(
            f"the draw at {where(node)} is over {list(shape_of(node))}, in which the batch is no dimension of its own: "
            "it would depend on the microbatch; use microbatch_size=1, or draw before the batch is merged"
        )
    divided = localizer.divided_dim(flat)
    if divided is not None and flat[divided].kind == "sum":
        raise ValueError(f"the draw over packed segments at {where(node)} cannot be divided; unpack them")
    found: dict[str, Any] = {"sample": sample}
    if divided is not None:
        found["divided"] = divided
    if len(flat) != len(axes):
        found["shape"] = localizer.sizes(flat)
    return found
