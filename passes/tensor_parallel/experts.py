"""Expert parallelism: the experts of a mixture are divided over data ranks too, and tokens' rows sent to them.

A tensor rank routes its tokens to its experts, all of them or its part (`passes.operators.experts`). Here these are
divided over consecutive data ranks, and rows go to the rank that has their expert and back: two all-to-alls forward,
and two backward. The experts' gradients then have the tokens of all these ranks (Megatron's folded expert parallelism).
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from operator import getitem
from typing import Any

from torch import fx

from autoptd.passes.ir.nodes import Propagation, add_node, argument, change_info, describe, info, where
from autoptd.passes.operators.table import Trait, has_trait
from autoptd.runtime import collectives, kernels
from autoptd.runtime.program.mesh import Mesh
from autoptd.runtime.program.placement import Parameter, Placement, Ragged, Segment, Shard


def divide_experts(graph: fx.Graph, held: Mapping[str, Parameter], mesh: Mesh) -> tuple[dict[str, Parameter], str]:
    """Divide the experts of one rank's `graph` over the data ranks that exchange rows, in place.

    Returns the parameters that it has `held`, those of experts divided, and what the log says of it. Raises ValueError
    where the mesh asks for that, and experts cannot be divided so.
    """
    divided = dict(held)
    if mesh.sizes["exchange"] == 1:
        return divided, ""
    routes = graph.find_nodes(op="call_function", target=kernels.route)
    if not routes:
        raise ValueError(f"expert={mesh.expert}: the model has no mixture of stacked experts: leave it out")
    readers = set[fx.Node]()
    for route in routes:
        divided |= _Mixture(route, mesh, readers).divide(held)
    for node in graph.find_nodes(op="get_attr"):
        if "expert" in divided[str(node.target)].placement and not readers.issuperset(node.users):
            _refuse(mesh, node, "it is read outside of the experts, too")
    return divided, f"; experts of {len(routes)} layers divided over {mesh.expert} ranks"


def _refuse(mesh: Mesh, node: fx.Node, why: str) -> None:
    raise ValueError(f"expert={mesh.expert}: {where(node)} cannot be divided over data ranks, as {why}: leave it out")


class _Mixture:
    """What computes the experts behind one `route`: from the dispatch of tokens to their sum, one rank's part.

    Products and casts that read weights of experts are added to `readers`.
    """

    def __init__(self, route: fx.Node, mesh: Mesh, readers: set[fx.Node]) -> None:
        self.route, self.mesh, self.propagation, self.readers = route, mesh, Propagation(mesh), readers
        self.rank: Any = route.args[0]
        self.number, own = (int(given) for given in route.args[2:])  # type: ignore[arg-type]
        if self.number == 1:
            _refuse(
                mesh, route, "each expert has weights of its own, and only stacked ones are divided over data ranks"
            )
        if self.number % mesh.expert:
            _refuse(mesh, route, f"its weights have {self.number} experts, which {mesh.expert} ranks do not divide")
        if own * mesh.tensor != self.number:
            _refuse(mesh, route, "its experts are not divided over the tensor ranks first")
        self.own = self.number // mesh.expert
        self.name = route.name.removesuffix("_route")
        self.placement = Placement(expert=Shard(0, (Segment(1, self.number, 1, True),)))

    def divide(self, parameters: Mapping[str, Parameter]) -> dict[str, Parameter]:
        """Exchange the rows in front of the experts and behind them; return their parameters, divided."""
        order, counts = sorted((n for n in self.route.users if n.target is getitem), key=lambda n: int(n.args[1]))  # type: ignore[arg-type]
        ends = [[n for n in order.users if n.target is kind] for kind in (kernels.dispatch, kernels.combine)]
        if [len(found) for found in ends] != [1, 1]:
            _refuse(self.mesh, self.route, "its rows are sorted by expert, or added up for tokens, more than once")
        (dispatch,), (combine,) = ends
        inside = list(self._walk(dispatch, combine))
        first, last = inside[0], combine.args[0]
        ragged = Placement(expert=Ragged(0))
        results = {"sent": ragged, "own": Placement(expert=Shard(0)), "all": Placement()}
        sent = self._write(first, collectives.send_to_experts, (dispatch, counts), "send", tuple(results.values()))
        parts = (self._write(first, getitem, (sent, i), *part) for i, part in enumerate(results.items()))
        rows, own_counts, all_counts = parts
        given = (last, all_counts, len(order.meta["val"]))
        placement = info(dispatch).placement
        back = self._write(combine, collectives.return_from_experts, given, "returned", placement)
        combine.replace_input_with(last, back)  # type: ignore[arg-type]
        for node in inside:
            node.replace_input_with(dispatch, rows)
            node.replace_input_with(counts, own_counts)
            change_info(node, placement=ragged)
        linears = [node for node in inside if node.target is kernels.grouped_linear]
        self.readers.update(linears)
        weights = (value for node in linears for value in (node.args[1], argument(node, "bias")))
        return dict(self._divide_parameter(value, parameters) for value in weights if value is not None)

    def _walk(self, dispatch: fx.Node, combine: fx.Node) -> Iterator[fx.Node]:
        """Yield the calls between both, in their order. ValueError for one that is not made for any number of rows."""
        members = {dispatch}
        for node in self.route.graph.nodes:
            if node is combine or members.isdisjoint(node.all_input_nodes):
                continue
            members.add(node)
            if node.op == "output" or node.target is kernels.combine or has_trait(node, Trait.RESHAPES | Trait.REPEATS):
                _refuse(self.mesh, node, "it is written for one number of rows")
            yield node

    def _write(self, at: fx.Node, target: Any, args: Any, name: str, placement: Any) -> fx.Node:
        """Write a call of the mixture before the node `at`."""
        args = args if target is getitem else (self.rank, *args)
        with at.graph.inserting_before(at):
            made = add_node(at.graph, "call_function", target, args, name=f"{self.name}_{name}")
        describe(made, self.propagation.run(made), info(self.route), placement=placement)
        return made

    def _divide_parameter(self, value: Any, parameters: Mapping[str, Parameter]) -> tuple[str, Parameter]:
        """Divide a weight or bias of the experts, and what casts it."""
        whole = value.meta["val"]
        value.meta["val"] = whole.new_empty(self.own, *whole.shape[1:])
        change_info(value, placement=self.placement)
        if value.op == "get_attr":
            return str(value.target), replace(parameters[str(value.target)], placement=self.placement)
        if not has_trait(value, Trait.CASTS) or not self.readers.issuperset(value.users):
            _refuse(self.mesh, value, "the experts' weight is computed in the model")
        self.readers.add(value)
        return self._divide_parameter(value.args[0], parameters)
