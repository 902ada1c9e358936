"""Sequence parallelism: between two divided regions a tensor rank has its own tokens (Korthikanti et al. 2022, §4.2).

What lies between the sum g of one divided region and the next region (norms, dropout, residual sums) is the same on all
tensor ranks. Where it treats tokens one by one, g becomes a reduce-scatter over the tokens, and an all-gather stands in
front of what needs all of them: the same bytes as an all-reduce, and a t-th of the memory and the work between the two.
"""

from collections import Counter
from collections.abc import Container, Mapping
from math import prod
from typing import Any

from torch import fx

from autoptd.passes.cost.cluster import Cluster
from autoptd.passes.cost.work import Work
from autoptd.passes.ir.nodes import Propagation, change_info, describe, info, operator_name, results_of, shape_of
from autoptd.passes.operators import axes as ax
from autoptd.passes.operators.axes import Axes, Axis
from autoptd.passes.operators.axis_map import AxisMap
from autoptd.passes.operators.record import Records
from autoptd.passes.operators.table import Trait, has_trait, rules_of
from autoptd.runtime import collectives
from autoptd.runtime.program.mesh import Mesh
from autoptd.runtime.program.placement import Placement, Shard


def divide_tokens(
    graph: fx.Graph,
    mesh: Mesh,
    rules: Records,
    named: Mapping[str, tuple[Axes, ...]],
    batch: Container[Axis],
    cluster: Cluster | None,
) -> str:
    """Divide the tokens between the divided regions of one rank's `graph`, in place; return what the log says of it.

    `named` has the axes of each value in the undivided graph, by its name; those in `batch` are left whole, as they are
    the samples' (random numbers are keyed by them). With a `cluster` only where it pays there.
    """
    regions = _Regions(graph, mesh, rules)
    sums = graph.find_nodes(op="call_function", target=collectives.reduce_from_tensor)
    undivided = regions.find({node: _token_dim(named[node.name][0], batch, mesh.tensor) for node in sums})
    if cluster is not None and not regions.pay(cluster):
        return f"; tokens stay whole, as they are few for {cluster.name}" if regions.dims else ""
    regions.write()
    count = Counter(node.target for node in graph.nodes)
    scattered, gathers = count[collectives.reduce_scatter], count[collectives.all_gather]
    entry = f"; tokens divided between {scattered} reduce-scatters and {gathers} all-gathers forward"
    rest = f"behind {undivided} sums tokens stay whole, as tensor={mesh.tensor} divides no dimension of theirs"
    return (entry if scattered else "") + (f"; {rest}" if undivided else "")


def has_divided_tokens(graph: fx.Graph) -> bool:
    """Return whether tokens are divided between divided regions of one rank's `graph`."""
    return any(node.target in collectives.SCATTERED for node in graph.nodes)


def _token_dim(axes: Axes, batch: Container[Axis], tensor: int) -> int | None:
    """Return the dimension of a sum of `axes` that begins with its tokens: the first, but for samples, t divides."""
    outermost = [next((part for part in ax.factors(axis) if part.size > 1), axis) for axis in axes[:-1]]
    return next((d for d, axis in enumerate(outermost) if axis not in batch and axis.size % tensor == 0), None)


class _Regions:
    """The values whose tokens may be divided: `dims` has the dimension of the tokens of each, in the graph's order.

    `taken` are the whole arguments of a member that have tokens too, with their dimension.
    """

    def __init__(self, graph: fx.Graph, mesh: Mesh, rules: Records) -> None:
        self.graph, self.mesh, self.tensor, self.rules = graph, mesh, mesh.tensor, rules
        self.propagation = Propagation(mesh)
        self.rank = next(node for node in graph.nodes if info(node).role == "rank")
        self.dims: dict[fx.Node, int] = {}
        self.taken: dict[fx.Node, dict[fx.Node, int]] = {}

    def find(self, sums: Mapping[fx.Node, int | None]) -> int:
        """Find the members, beginning with `sums` over the ranks; return how many of these t does not divide."""
        for node in self.graph.nodes:
            if (dim := sums.get(node)) is not None:
                self.dims[node] = dim
            elif node.op == "call_function" and not self.dims.keys().isdisjoint(node.all_input_nodes):
                self._follow(node)
        # Last members larger than what they are made of are gathered before, and sums that no member reads are summed.
        for node in reversed(self.dims.copy()):
            made_of = [source.meta["val"].nbytes for source in node.all_input_nodes if source in self.dims]
            if self.dims.keys().isdisjoint(node.users) and sum(made_of) < node.meta["val"].nbytes:
                del self.dims[node]
        return sum(dim is None for dim in sums.values())

    def _follow(self, node: fx.Node) -> None:
        """Add a call that treats the tokens of its arguments one by one, as its operator's rule of axes says."""
        unsized = has_trait(node, Trait.RESHAPES | Trait.REPEATS) and not isinstance(node.args[1], (list, tuple))
        if unsized or info(node).is_divided or info(node).is_partial or isinstance(node.meta["val"], (tuple, list)):
            return
        axis_map = AxisMap(self.tensor)
        sources = [source for source in node.all_input_nodes if source is not self.rank]
        for source in sources:
            axis_map.axes[source] = tuple(tuple(map(Axis, value.shape)) for value in results_of(source))
        for marked in (axis_map.batch, axis_map.learned):
            marked.update((node, *sources))
        rule = self.rules.get(operator_name(node.target)) or rules_of(node)
        axis_map.axes[node] = (rule.axes(axis_map, node),)
        tokens, *others = {ax.factors(axis_map.of(s)[self.dims[s]])[0] for s in sources if s in self.dims}
        contracted = axis_map.contractions.get(node)
        summed = contracted is not None and tokens in ax.leaves(contracted)
        # A rank's only one of t groups: a dimension of size 1 is like any other.
        lone = has_trait(node, Trait.RESHAPES) and tokens.size == self.tensor
        if others or summed or lone or tokens.kind != "leaf" or tokens.blocked or tokens.size % self.tensor:
            return
        place, places = _place(axis_map.all_of(node), tokens), {s: _place(axis_map.all_of(s), tokens) for s in sources}
        taken = {source: dim for source, dim in places.items() if source not in self.dims and dim is not None}
        fits = all(dim >= 0 and not info(source).is_divided for source, dim in taken.items())
        fits &= all(dim == self.dims[source] for source, dim in places.items() if source in self.dims)
        if fits and place is not None and place >= 0:
            self.dims[node], self.taken[node] = place, taken

    def pay(self, cluster: Cluster) -> bool:
        """Return whether the time to read and write the others' tokens exceeds that of the gathers that are added.

        The backward gathers the gradient of each sum, where the all-reduce ran beside weight gradients; a device of one
        multiprocessor, which runs nothing beside, also waits for the inputs that are gathered again.
        """
        sizes = {node: node.meta["val"].nbytes for node in self.dims}
        # What one member alone reads is never in memory where the two are fused.
        inner = {node for node in sizes if len(node.users) == 1 and not self.dims.keys().isdisjoint(node.users)}
        made = sum(size for node, size in sizes.items() if node not in inner)
        others = made * (self.tensor - 1) // self.tensor
        device, group = cluster.device, cluster.slowest(self.mesh.groups("tensor"))
        gathered = [size for node, size in sizes.items() if not self.dims.keys() >= node.users.keys()]
        waited = sum(cluster.all_gather_seconds(size, group) for size in gathered)
        waited += device.seconds(Work(written=sum(gathered), launches=2 * len(gathered)), "fp32")
        waited *= 2 if device.multiprocessors == 1 else 1
        # The backward reads gradients and what was kept.
        return device.seconds(Work(read=3 * others, written=2 * others), "fp32") > waited

    def write(self) -> None:
        """Rewrite the members to a rank's tokens, and gather them for other readers."""
        own: dict[tuple[fx.Node, int], fx.Node] = {}
        for node, dim in self.dims.items():
            for source, at in self.taken.get(node, {}).items():
                if (source, at) not in own:
                    own[source, at] = self._add(node, collectives.take_own, source, at, f"{source.name}_tokens")
                    change_info(own[source, at], placement=Placement(tensor=Shard(at)))
                node.replace_input_with(source, own[source, at])
            self._localize(node, dim, shape := shape_of(node))
            node.meta["val"] = self.propagation.run(node)
            assert shape_of(node) == (*shape[:dim], shape[dim] // self.tensor, *shape[dim + 1 :]), node.format_node()
            change_info(node, placement=Placement(tensor=Shard(dim)))
        for node, dim in self.dims.items():
            if readers := sorted(user for user in node.users if user not in self.dims):
                gathered = self._add(readers[0], collectives.all_gather, node, dim, f"{node.name}_all")
                for reader in readers:
                    reader.replace_input_with(node, gathered)

    def _add(self, at: fx.Node, target: Any, source: fx.Node, dim: int, name: str) -> fx.Node:
        """Write a collective on a value before the node `at`."""
        with self.graph.inserting_before(at):
            made = self.graph.create_node("call_function", target, (self.rank, source, dim), {}, name)
        describe(made, self.propagation.run(made), info(source).place)
        return made

    def _localize(self, node: fx.Node, dim: int, shape: tuple[int, ...]) -> None:
        """Write what a call says of sizes, and of the places of random numbers, for one rank's tokens."""
        if node.target is collectives.reduce_from_tensor:
            node.target, node.args = collectives.reduce_scatter, (*node.args, dim)
        elif has_trait(node, Trait.RESHAPES | Trait.REPEATS):
            sizes: Any = list(node.args[1])  # type: ignore[arg-type]
            sizes[dim] = shape[dim] // self.tensor
            node.args = (node.args[0], sizes)
        elif "sample" in node.kwargs:
            given: Any = node.kwargs.get("shape") or shape
            drawn = list(given)
            at = next(i for i in range(len(drawn)) if prod(drawn[:i]) == prod(shape[:dim]) and drawn[i] > 1)
            drawn[at] //= self.tensor
            kept = {"shape": drawn} if "shape" in node.kwargs else {}
            node.kwargs = {**node.kwargs, "divided": at, **kept}


def _place(found: tuple[Axes, ...], tokens: Axis) -> int | None:
    """Return the dimension that the `tokens` begin; None for a value without them, -1 where they lie otherwise."""
    dims = [(d, ax.factors(axis)) for axes in found for d, axis in enumerate(axes) if tokens in ax.leaves(axis)]
    if not dims:
        return None
    return dims[0][0] if len(dims) == 1 and dims[0][1][0] is tokens else -1
