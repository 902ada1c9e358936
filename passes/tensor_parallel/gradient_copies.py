"""Place f, which sums the partial gradients of replicated values that divided regions read.

A replicated value that a divided operator reads gets, on each tensor rank, only its own part of the gradient. f
(`collectives.copy_to_tensor`: forward identity, backward all-reduce) completes it. Because our backwards are linear
in the incoming gradient, a partial gradient may also travel further back through replicated operators, and be summed
where that is cheapest, for all readers at once: a minimum cut between the divided regions and the values that other,
whole gradients reach. The user's own backwards, which may not be linear, get whole ones. A parameter on the cut needs
no f: its gradient is summed once per step (`AxisPlacement.partial_gradient`).
"""

from collections.abc import Collection, Mapping
from dataclasses import replace

import networkx as nx
import torch
from torch import fx

from autoptd.passes.ir.nodes import add_node, change_info, describe, info, where
from autoptd.passes.ir.program import Stage, find_trained
from autoptd.passes.operators.table import Trait, has_trait
from autoptd.runtime import collectives
from autoptd.runtime.program.placement import REPLICATED, Parameter

PARAMETER_DISCOUNT = 64  # a parameter's gradient is summed once per step, an activation's once per microbatch


def place_copies(
    graph: fx.Graph, parameters: Mapping[str, Parameter], pipeline: int
) -> tuple[dict[str, Parameter], int]:
    """Insert f into `graph` (in place, while it is still the caller's own) and mark parameters.

    Activations whose gradient is partial are marked so (`NodeInfo`): no stage boundary may cross them, for
    what is scattered over the tensor ranks must be the same on all. So where a residual stream would have partial ones
    from end to end, and leave no place for a cut, it keeps whole ones if there are several `pipeline` ranks.

    Returns the parameters with their partial gradients marked, and the number of f placed.
    """
    region = _Region(graph, parameters)
    summed: set[str] = set()  # once per step
    copies = 0
    for component in region.components():
        cut, before = region.cut(component)
        if pipeline > 1 and before.isdisjoint(stream := region.stream(component)):
            cut, before = region.cut(component, stream)
        for node in component:
            if node not in before:
                marks = tuple(p.with_partial_gradient("tensor") for p in info(node).placements)
                change_info(node, placement=marks if len(marks) > 1 else marks[0])
        for node in cut:
            partial = [n for n in region.partial_readers(node) if n not in before]
            if node.op == "get_attr" and len(partial) == len(region.readers(node)):
                summed.add(str(node.target))
            else:
                region.insert_copy(node, partial)
                copies += 1
    marked = dict(parameters)
    for name, p in parameters.items():
        # The gradients of whole rows beside divided ones are partial, too.
        if name in summed or (p.requires_grad and not all(s.divided for s in p.placement["tensor"].segments)):
            marked[name] = replace(p, placement=p.placement.with_partial_gradient("tensor"))
    return marked, copies


def _is_local(node: fx.Node) -> bool:
    """Does the value differ between tensor ranks?"""
    return info(node).is_divided or info(node).is_partial


class _Region:
    """The replicated values whose gradient may be partial."""

    def __init__(self, graph: fx.Graph, parameters: Mapping[str, Parameter]) -> None:
        self.graph = graph
        self.rank = next(n for n in graph.nodes if info(n).role == "rank")
        self.differentiable = find_trained(Stage(graph, parameters, fx.Graph()))
        calls = [n for n in graph.nodes if n.op == "call_function"]
        self.divided = {n for n in calls if any(map(_is_local, (n, *n.all_input_nodes)))}
        # Replicated results of divided operators, other than sums: a part of packed rows that every rank holds.
        whole = (n for n in self.divided & self.differentiable if not _is_local(n))
        self.forced = {n for n in whole if not has_trait(n, Trait.SUMS_RANKS)}
        self.partial = self._find_partial()

    def _find_partial(self) -> set[fx.Node]:
        """Replicated nodes whose readers are all divided, or such nodes themselves: their gradient may be partial."""
        found: set[fx.Node] = set()
        for node in reversed(self.graph.nodes):
            candidate = node in self.forced or (node not in self.divided and node.op == "call_function")
            if not candidate or node not in self.differentiable or has_trait(node, Trait.OWN_BACKWARD):
                continue
            readers = self.readers(node)
            if readers and all(n in self.divided or n in found for n in readers):
                found.add(node)
            elif node in self.forced:
                raise ValueError(
                    f"{node.name} takes undivided rows from a tensor whose other rows are divided, and both feed "
                    f"operators that tensor parallelism does not divide, at {where(node)}; use tensor=1"
                )
        return found

    def readers(self, node: fx.Node) -> list[fx.Node]:
        """Readers that give `node` a gradient."""
        return [n for n in node.users if n.op == "output" or n in self.differentiable]

    def partial_readers(self, node: fx.Node) -> list[fx.Node]:
        """Readers that give `node` a partial gradient, if partial gradients go as far back as they may."""
        return [n for n in self.readers(node) if n in self.divided or n in self.partial]

    def components(self) -> list[list[fx.Node]]:
        """Replicated values with a partial reader, grouped by what they flow through."""
        inside = {n for n in self.differentiable if not _is_local(n) and self.partial_readers(n)}
        network = nx.Graph()
        network.add_nodes_from(inside)
        network.add_edges_from((s, n) for n in self.partial & inside for s in inside & {*n.all_input_nodes})
        return sorted(map(sorted, nx.connected_components(network)))

    def stream(self, component: list[fx.Node]) -> set[fx.Node]:
        """Return the values of a residual stream that several operators read, to which sums over the ranks are added.

        Not what is computed of those whose gradient may not be whole: its own may not, either.
        """
        if not any(has_trait(n, Trait.SUMS_RANKS) for n in component):
            return set()
        calls = {n for n in component if n.op == "call_function" and len(self.partial_readers(n)) > 1}
        bound = set(self.forced)
        for node in component:  # in the graph's order
            if not bound.isdisjoint(node.all_input_nodes):
                bound.add(node)
        return calls - bound

    def cut(self, component: list[fx.Node], stream: Collection[fx.Node] = ()) -> tuple[list[fx.Node], set[fx.Node]]:
        """Return the cheapest members that separate whole gradients from divided readers, and those with whole ones.

        The `stream` is to do so.
        """
        sources = [node for node in component if node not in self.partial or node in stream]
        if not sources or len(component) == 1:
            return sources, set(sources)
        network = nx.DiGraph()
        network.add_edges_from(("source", (node, "in")) for node in sources)
        # The gradient of a forced one may not be whole.
        network.add_edges_from(((node, "in"), "sink") for node in component if node in self.forced)
        for node in component:
            network.add_edge((node, "in"), (node, "out"), capacity=self._price(node))
            for reader in self.partial_readers(node):
                if reader in self.partial:
                    network.add_edge((node, "out"), (reader, "in"))
                    network.add_edge((reader, "in"), (node, "in"))  # a whole gradient gives a whole one
                else:
                    network.add_edge((node, "out"), "sink")
        _, (near, _) = nx.minimum_cut(network, "source", "sink")
        before = [node for node in component if (node, "in") in near]
        return [node for node in before if (node, "out") not in near], set(before)

    def _price(self, node: fx.Node) -> float:
        """Bytes to sum at this node; infinite where it cannot be done."""
        value = node.meta["val"]
        if node in self.forced or not isinstance(value, torch.Tensor):
            return float("inf")
        size = value.nbytes
        if node.op == "get_attr" and len(self.partial_readers(node)) == len(self.readers(node)):
            return size // PARAMETER_DISCOUNT + 1
        return size

    def insert_copy(self, node: fx.Node, readers: list[fx.Node]) -> None:
        """Let `readers` read f(node); a gather whose gradient is partial on all ranks is one with f."""
        marked = REPLICATED.with_partial_gradient("tensor")
        if node.target is collectives.all_gather and len(readers) == len(self.readers(node)):
            node.target = collectives.gather_to_tensor
            change_info(node, placement=marked)
            return
        with self.graph.inserting_after(node):
            arguments = self.rank, node
            copy = add_node(self.graph, "call_function", collectives.copy_to_tensor, arguments, name=f"{node.name}_f")
        layers = {info(reader).layer for reader in readers} - {None}
        layer = layers.pop() if len(layers) == 1 else info(node).layer
        describe(copy, node.meta["val"], info(node), placement=marked, layer=layer)
        for reader in readers:
            reader.replace_input_with(node, copy)
