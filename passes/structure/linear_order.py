"""A stage's operators as one row of items: where it may be cut, what crosses there, what it costs to hold."""

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import fx

from autoptd.passes.cost.durations import Durations
from autoptd.passes.cost.saved_tensors import Ledger, count_bytes
from autoptd.passes.ir.gradients import find_reached, find_trained
from autoptd.passes.ir.nodes import describe, info, nodes_in, walk
from autoptd.passes.ir.program import Stage, tensor_bytes
from autoptd.passes.operators.quantities import FLOAT32_BYTES, adam_bytes

Nodes = Sequence[fx.Node]


class RowBytes(NamedTuple):
    """Bytes of each item, `static` for good and `activation` for every microbatch in flight; `working` are what the
    backward of the largest recomputed group holds besides."""

    static: list[int]
    activation: list[int]
    working: int


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
            bare = all(s in self.replicable and not self._is_parameter(s) for s in node.all_input_nodes)
            if node.op != "call_function" or (bare and node not in self.outputs):  # all stages can have it
                self.replicable.add(node)
            else:
                self.position[node] = len(self.items)
                self.items.append(node)
        self.last_use = {node: i for i, node in enumerate(self.items)}
        for i, sources in enumerate([*(node.all_input_nodes for node in self.items), [self.loss]]):
            self.last_use.update((source, i) for source in sources if source in self.position)
        self.trained = find_reached([self.loss], find_trained(stage))

    def _is_parameter(self, node: fx.Node) -> bool:
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
        """Return whether a cut may stand before each item: live values are whole real tensors with whole gradients."""

        def is_unfit(node: fx.Node) -> bool:
            value, about = node.meta["val"], info(node)
            real = isinstance(value, torch.Tensor) and not value.is_complex()
            return not real or about.is_partial or about.has_partial_gradient

        live, unfit = self.sum_alive(lambda _: 1, is_unfit)
        allowed: list[bool] = ((live > 0) & (unfit == 0))[:-1].tolist()
        return allowed

    def transfer_times(self, durations: Durations) -> NDArray[np.int64]:
        """Return the nanoseconds to send the values that live before each item, and to send their gradients back."""

        def time(node: fx.Node) -> int:
            value, divided = node.meta["val"], info(node).is_divided
            return durations.of_transfer(value, divided=divided) if isinstance(value, torch.Tensor) else 0

        return self.sum_alive(time, lambda node: time(node) if node in self.trained else 0)[:, :-1]

    def memory(self, items: Nodes, ledger: Ledger, *, once: bool) -> RowBytes:
        """Return the bytes of each of the `items`: its parameters with their state, and what the backward keeps of it.

        A tied parameter counts where it is used, each time; `once`: only the first.
        """
        kept = {node: count_bytes(storages) for node, storages in ledger.first_kept()}
        static: list[int] = []
        seen: set[fx.Node] = set()
        for node in items:
            owned = [s for s in node.all_input_nodes if self._is_parameter(s) and not (once and s in seen)]
            seen.update(owned)
            static.append(sum(self._state_bytes(source) for source in owned))
        working = max((count_bytes(ledger.saved(group)) for group in ledger.groups), default=0)
        return RowBytes(static, [kept[node] for node in items], working)

    def build_graph(self, items: Nodes, receives: Nodes, sends: Nodes | None, outputs: Nodes = ()) -> fx.Graph:
        """Return the graph of one stage: the values that it `receives`, the batch inputs that it reads, its `items`,
        and the replicable nodes that these and its own `outputs` need."""
        needed = self.needed((*items, *outputs))
        graph = fx.Graph()
        rank, *inputs = (node for node in self.order if node.op == "placeholder")
        values = {rank: graph.node_copy(rank)}
        for node in receives:
            values[node] = graph.create_node("placeholder", node.name, name=node.name)
            wanted = node in self.trained
            describe(values[node], node.meta["val"], info(node), role="boundary", requires_grad=wanted)
        for node in inputs:
            if node in needed and node not in values:
                values[node] = graph.node_copy(node)
        calls = (*items, *(node for node in needed if node.op != "placeholder"))
        for node in sorted(calls, key=self._place.__getitem__):
            values[node] = graph.node_copy(node, values.__getitem__)
        results = tuple(values[node] for node in (*([self.loss] if sends is None else sends), *outputs))
        output = graph.output(results if len(results) > 1 else results[0])
        about = zip(self.outputs, info(self.output).outputs, strict=True)
        own = tuple(result for node, result in about if node in outputs)
        describe(output, self.output.meta["val"], info(self.output), outputs=own)
        return graph

    def needed(self, nodes: Iterable[fx.Node]) -> set[fx.Node]:
        """Return the replicable nodes among `nodes`, and those that they need, directly or through each other."""
        own = self.replicable
        return own.intersection(walk(nodes, lambda node: own.intersection(node.all_input_nodes)))

    def _state_bytes(self, node: fx.Node) -> int:
        value = node.meta["val"]
        if node not in self.trained:
            return tensor_bytes(value)
        item = value.element_size()  # of the weight; its gradient is at least float32
        return int(value.numel() * (item + max(FLOAT32_BYTES, item) + adam_bytes(item)))


def _order(graph: fx.Graph) -> list[fx.Node]:
    """Return all nodes but the output, the getitems of a call's results right behind it."""
    place: dict[Any, int] = {}
    for node in graph.nodes:
        place[node] = place[node.args[0]] if node.target is operator.getitem else len(place)
    return sorted((node for node in graph.nodes if node.op != "output"), key=place.__getitem__)
