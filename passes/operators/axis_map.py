"""The axes of every value in a one-stage graph, and the verbs with which axis rules relate them (see `axes`)."""

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from autoptd.passes.ir.nodes import as_results, called, results_of, shape_of
from autoptd.passes.operators import axes as ax

# Reasons that tell a sequence from a batch (see `sharding.find_batch`).
ATTENTION = "is attention over it"
OF_ACTIVATIONS = "multiplies two activations over it"
RUNS = "runs over it"


@dataclass(eq=False)
class AxisMap:
    """The axes of every value in a one-stage graph.

    `axes[node]` has one `Axis` per dimension of each result; `contractions[node]` is the axis that a node sums over;
    `classes` are those that a lookup, a softmax or a loss contracts. `heads` pairs each attention with its heads
    dimension. The attentions in `replicated_kv` have keys and values with too few heads to divide: every tensor rank
    computes all of these and takes its own. `kv_heads` has their heads dimension, by attention and argument. `weights`
    are parameters, perhaps transposed or viewed, or picked for each row; `learned` values depend on parameters, and
    those in `batch` on the batch.
    """

    tensor: int
    replicated_kv: Container[fx.Node] = ()
    axes: dict[fx.Node, tuple[ax.Axes, ...]] = field(default_factory=dict)
    contractions: dict[fx.Node, ax.Axis] = field(default_factory=dict)
    classes: list[ax.Axis] = field(default_factory=list)
    heads: list[tuple[fx.Node, ax.Axis]] = field(default_factory=list)
    kv_heads: dict[tuple[fx.Node, fx.Node], int] = field(default_factory=dict)
    inputs: list[fx.Node] = field(default_factory=list)
    operators: set[str] = field(default_factory=set)
    repeated: set[str] = field(default_factory=set)  # that every tensor rank does whole, for want of a rule
    weights: set[fx.Node] = field(default_factory=set)
    batch: set[fx.Node] = field(default_factory=set)
    learned: set[fx.Node] = field(default_factory=set)

    def of(self, node: Any) -> ax.Axes:
        (own,) = self.axes[node]
        return own

    def all_of(self, node: fx.Node) -> tuple[ax.Axes, ...]:
        """All results' axes of a node (none for the rank)."""
        return self.axes.get(node, ())

    def leaves_of(self, node: fx.Node) -> set[ax.Axis]:
        return {leaf for axes in self.all_of(node) for axis in axes for leaf in ax.leaves(axis)}

    def sum_over(self, node: fx.Node, *axes: ax.Axis) -> None:
        """Record that `node` sums over `axes`, which are or become one.

        Copies of a value are summed whole: every rank has it, and nobody a part.
        """
        for leaf in [leaf for axis in axes for leaf in ax.leaves(axis) if leaf.copied]:
            ax.block(leaf, f"{called(node)} sums over copies of a value")
        self.contractions[node] = axes[0]

    def contract_classes(self, node: fx.Node, axis: ax.Axis, reason: str = "") -> None:
        """Record that `node` reduces an axis of classes, which may be divided; block one that an input has first."""
        own, inputs = set(ax.leaves(axis)), (self.leaves_of(source) for source in self.inputs)
        if reason and not self.is_of_classes(axis) and any(not own.isdisjoint(leaves) for leaves in inputs):
            ax.block(axis, f"{called(node)} {reason}")
        else:
            self.sum_over(node, axis)
            self.classes.append(axis)

    def is_of_classes(self, axis: ax.Axis) -> bool:
        own = set(ax.leaves(axis))
        return any(not own.isdisjoint(ax.leaves(each)) for each in self.classes)

    def is_soft_label(self, source: fx.Node, axis: ax.Axis) -> bool:
        """Return whether an axis of an input has a number for each class that weights give scores to."""
        if not (source.meta["val"].is_floating_point() and self.is_of_classes(axis)):
            return False
        return any(not self.leaves_of(weight).isdisjoint(ax.leaves(axis)) for weight in self.weights)

    def align_leading(self, node: fx.Node, leading: Sequence[tuple[fx.Node, ax.Axes]]) -> ax.Axes:
        """Tie the leading (batch and heads) dimensions of an attention's tensors; the last of them is the heads.

        Grouped queries: where a later tensor has fewer heads, the heads are [its heads, group].
        """
        first, *others = leading
        missing = max(len(own) for _, own in leading) - len(first[1])
        result = [*(ax.Axis(1) for _ in range(missing)), *first[1]]
        for position, (tensor, own) in enumerate(others, 1):
            for back, axis in enumerate(reversed(own), 1):
                is_heads = back == 1 and len(own) >= 2 and axis.size > 1
                if is_heads and node in self.replicated_kv and position <= 2 and tensor in self.learned:
                    ax.block(axis, "the key and value heads are replicated")
                    self.kv_heads[node, tensor] = len(own) - 1
                else:
                    self.tie(node, result, -back, axis)
        if result and node in self.batch:  # else it is a product of parameters
            self.heads.append((node, result[-1]))
        return tuple(result)

    def tie(self, node: fx.Node, result: list[ax.Axis], at: int, axis: ax.Axis) -> None:
        """Make `axis` and that of the `result` one, or spread one of size 1; a smaller axis is the outer factor."""
        mine, axis = ax.find(result[at]), ax.find(axis)
        if not ax.vanishes(axis) and (ax.vanishes(mine) or mine.size == 1 != axis.size):
            result[at] = axis
        elif mine.size != axis.size != 1:
            outer, _ = regroup(node, [mine], (axis.size, mine.size // axis.size), "groups it")
            ax.unify(outer, axis)
        elif axis.size != 1:
            ax.unify(mine, axis)


def broadcast(axis_map: AxisMap, node: fx.Node) -> ax.Axes:
    """Unify the tensor arguments dimension by dimension; a dimension of size 1 spreads over the others."""
    result = [ax.Axis(1)] * len(shape_of(node))
    for source in (source for source in node.all_input_nodes if source in axis_map.axes):
        for back, axis in enumerate(reversed(axis_map.of(source)), 1):
            axis_map.tie(node, result, -back, axis)
    return tuple(result)


def opaque(axis_map: AxisMap, node: fx.Node) -> Any:
    """Block all dimensions that come in or go out: nothing is known, and every rank computes them whole."""
    reason = f"no rule divides {called(node)}"
    for axis in (axis for source in node.all_input_nodes for own in axis_map.all_of(source) for axis in own):
        ax.block(axis, reason)
    axes = (tuple(ax.Axis(size, blocked=reason) for size in value.shape) for value in results_of(node))
    return as_results(node, axes)


def regroup(node: fx.Node, source: Sequence[ax.Axis], sizes: Sequence[int], does: str) -> ax.Axes:
    """Regroup factors; an axis that cannot be regrouped is blocked, for what the call `does`."""
    grouped = ax.regroup(source, sizes)
    if grouped is not None:
        return tuple(grouped)
    for axis in source:
        ax.block(axis, f"{called(node)} {does}")
    return tuple(ax.Axis(size, blocked=f"{called(node)} makes it") for size in sizes)
