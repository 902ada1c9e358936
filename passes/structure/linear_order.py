"""A stage's operators as one row of items: where it may be cut, what crosses there, what it costs to hold."""

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import fx

from autoptd.passes.ir.nodes import copy_node, describe, info, nodes_in, walk
from autoptd.passes.ir.program import Stage, find_reached, find_trained
from autoptd.runtime.program.placement import Ragged

Nodes = Sequence[fx.Node]


class Row:
    """A stage's operators as a row of items, and what lives how long along it.

    `order`: all nodes but the output, each getitem right behind what it takes apart. `items`: the calls that
    depend on a parameter. `last_use`: item -> the position of its last reader, ``len(items)`` for the loss.
    `trained`: the items and parameters that a gradient of the loss reaches. `outputs` are the values that a call
    returns besides the loss; a value that is one is an item if it is computed at all.
    """

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.order = _order(stage.graph)
        self._place = {node: i for i, node in enumerate(self.order)}
        self.output = stage.graph.output_node()
        self.loss, *self.outputs = nodes_in(self.output.args[0])
        self.items: list[fx.Node] = []
        self.position: dict[fx.Node, int] = {}
        self.replicable: set[fx.Node] = set()
        for node in self.order:
            bare = all(s in self.replicable and not self.is_parameter(s) for s in node.all_input_nodes)
            if node.op != "call_function" or (bare and node not in self.outputs):  # all stages can have it
                self.replicable.add(node)
            else:
                self.position[node] = len(self.items)
                self.items.append(node)
        self.last_use = {node: i for i, node in enumerate(self.items)}
        for i, sources in enumerate([*(node.all_input_nodes for node in self.items), [self.loss]]):
            self.last_use.update((source, i) for source in sources if source in self.position)
        self.trained = find_reached([self.loss], find_trained(stage))

    def is_parameter(self, node: fx.Node) -> bool:
        return node.op == "get_attr" and self.stage.parameters[str(node.target)].kind == "parameter"

    def sum_alive(self, *measures: Callable[[fx.Node], int]) -> NDArray[np.int64]:
        """Return, for each of the `measures`, its sums over the values alive before each item and behind the last."""
        ends = [self.last_use[node] + 1 for node in self.items]
        changes = np.zeros((len(measures), len(self.items) + 2), np.int64)
        for row, measure in zip(changes, measures, strict=True):
            sizes = [measure(node) for node in self.items]
            row[1:-1] += sizes
            np.subtract.at(row, ends, sizes)
        return changes.cumsum(1)[:, :-1]

    def allowed(self) -> list[bool]:
        """Return whether a cut may stand before each item: live values are real, of known rows, gradients whole."""

        def is_unfit(node: fx.Node) -> bool:
            value, about = node.meta["val"], info(node)
            real = isinstance(value, torch.Tensor) and not value.is_complex()
            ragged = any(isinstance(on, Ragged) for placement in about.placements for on in placement.values())
            return not real or ragged or about.is_partial or about.has_partial_gradient

        live, unfit = self.sum_alive(lambda _: 1, is_unfit)
        allowed: list[bool] = ((live > 0) & (unfit == 0))[:-1].tolist()
        return allowed

    def build_graph(self, items: Nodes, receives: Nodes, sends: Nodes | None, outputs: Nodes = ()) -> fx.Graph:
        """Return the graph of one stage: the values that it `receives`, the batch inputs that it reads, its `items`,
        and the replicable nodes that these and its own `outputs` need."""
        graph, rank = fx.Graph(), self.order[0]
        values = {rank: copy_node(graph, rank)}
        for node in receives:
            values[node] = graph.create_node("placeholder", node.name, name=node.name)
            describe(values[node], node.meta["val"], info(node), role="boundary", requires_grad=node in self.trained)
        own = {*items, *self.needed((*items, *outputs))}.difference(values)
        for node in sorted(own, key=self._place.__getitem__):
            values[node] = copy_node(graph, node, values.__getitem__)
        results = tuple(values[node] for node in (*([self.loss] if sends is None else sends), *outputs))
        output = graph.output(results if len(results) > 1 else results[0])
        about = zip(self.outputs, info(self.output).outputs, strict=True)
        described = tuple(result for node, result in about if node in outputs)
        describe(output, self.output.meta["val"], info(self.output), outputs=described)
        return graph

    def needed(self, nodes: Iterable[fx.Node]) -> set[fx.Node]:
        """Return the replicable nodes among `nodes`, and those that they need, directly or through each other."""
        own = self.replicable
        return own.intersection(walk(nodes, lambda node: own.intersection(node.all_input_nodes)))


def _order(graph: fx.Graph) -> list[fx.Node]:
    """Return all nodes but the output, the getitems of a call's results right behind it."""
    place: dict[Any, int] = {}
    for node in graph.nodes:
        place[node] = place[node.args[0]] if node.target is operator.getitem else len(place)
    return sorted((node for node in graph.nodes if node.op != "output"), key=place.__getitem__)
