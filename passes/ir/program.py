"""Program and Stage: what the compiler rewrites; the values in a stage, and those that have a gradient."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import torch
from torch import fx

from autoptd.passes.ir.autocast import Autocast
from autoptd.passes.ir.nodes import copy_node, has_gradients, info, nodes_in, walk, wants_gradient
from autoptd.runtime import aten, kernels
from autoptd.runtime.program.manifest import Input, Output
from autoptd.runtime.program.mesh import Mesh
from autoptd.runtime.program.placement import Parameter


@dataclass(frozen=True)
class Stage:
    """A contiguous part of the model: a graph, and the tensors it owns by their ``state_dict`` names.

    `graph`: placeholder ``rank`` first, then the boundary values it receives, then batch inputs; ``get_attr`` nodes
    name entries of `parameters`. `constants`: a graph without placeholders whose output is a dict from the name of
    each constant to its node; it runs once, at bind. Every node's ``meta["val"]`` is a meta tensor (or tuple
    of them) with the shape ONE rank holds, and every node has a `NodeInfo`.
    """

    graph: fx.Graph
    parameters: Mapping[str, Parameter]
    constants: fx.Graph


@dataclass(frozen=True)
class Program:
    """The model on its way through the compiler: frozen, each pass makes the next one.

    `buffers`: the values of the user's buffers and of tensors lifted from the forward's code, by name; those on
    the meta device are absent. `proved` are the user's buffers whose values a pass decided by, so that the program
    holds for these values only. `symbols` names the model's dimensions (a `DimensionSymbols` of tensor_parallel,
    or None). `uninitialized` says why nobody knows how the weights begin, where they have none. `autocast` is the
    context around `compile`. `model_flops`, `fixed`, `rules` and `device` as in the manifest.
    """

    mesh: Mesh
    stages: tuple[Stage, ...]
    inputs: tuple[Input, ...]
    output: Output
    aliases: Mapping[str, str] = field(default_factory=dict)
    log: tuple[str, ...] = ()
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict, compare=False, repr=False)
    proved: frozenset[str] = frozenset()
    uninitialized: str = ""
    symbols: Any = field(default=None, compare=False, repr=False)
    model_flops: int = 0
    autocast: Autocast | None = None
    fixed: Mapping[str, Any] = field(default_factory=dict)
    rules: Mapping[str, str] = field(default_factory=dict)
    device: str = "cpu"

    def replace_stages(self, stages: tuple[Stage, ...], entry: str, *, proved: frozenset[str] = frozenset()) -> Program:
        """Return the program with other stages, one more log line, and the buffers that these were `proved` of."""
        return replace(self, stages=stages, log=(*self.log, entry), proved=self.proved | proved)


Passes = tuple[tuple[str, Callable[[Program], Program]], ...]


def copy_nodes(nodes: Iterable[fx.Node]) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """Return a graph of copies of `nodes`, each behind what it reads, and the copy of each.

    Copies have ``meta`` dicts of their own, whose values are shared: replace them, never mutate.
    """
    graph, values = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in nodes:
        values[node] = copy_node(graph, node, values.__getitem__)
    return graph, values


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """Return a copy of a graph; see `copy_nodes`."""
    return copy_nodes(graph.nodes)[0]


def constants_made(constants: fx.Graph) -> Mapping[str, Any]:
    """Return the node of each constant that a graph such as ``Stage.constants`` makes, by name."""
    table: Any = next((node.args[0] for node in constants.find_nodes(op="output")), {})
    return table  # type: ignore[no-any-return]


def constants_graph(made: Mapping[str, Any], names: Container[str]) -> fx.Graph:
    """Return a graph that makes those constants of `made` that have these names; empty where there are none."""
    own = {name: node for name, node in made.items() if name in names}
    graph, values = copy_nodes(sorted(walk(nodes_in(own))))
    if own:
        graph.output(fx.map_arg(own, values.__getitem__))
    return graph


def split_results(graph: fx.Graph) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return the results of a stage: what it sends on, or the loss, and what a call returns besides that."""
    output = graph.output_node()
    results = nodes_in(output.args[0])
    count = len(results) - len(info(output).outputs)
    return results[:count], results[count:]


def recomputed_groups(graph: fx.Graph) -> list[list[fx.Node]]:
    """Return the groups that the backward computes again: neighbouring calls with one label."""
    calls = [node for node in graph.nodes if node.op == "call_function"]
    runs = groupby(calls, key=lambda node: info(node).recompute)
    return [list(run) for label, run in runs if label is not None]


def values_taken(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Return the values that a group of calls takes from outside, besides parameters and the rank, in order of use."""
    inside = set(nodes)
    sources = dict.fromkeys(source for node in nodes for source in node.all_input_nodes)
    return [s for s in sources if s not in inside and s.op != "get_attr" and info(s).role != "rank"]


def values_given(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Return the values of a group of calls that are read outside, in order."""
    inside = set(nodes)
    return [node for node in nodes if not inside.issuperset(node.users)]


def find_trained(stage: Stage) -> set[fx.Node]:
    """Return the values that have a gradient, from a trainable parameter or a received value that wants one."""
    trained: set[fx.Node] = set()
    for node in stage.graph.nodes:
        if node.op == "get_attr":
            wants = stage.parameters[str(node.target)].requires_grad
        else:
            starts = node.op == "placeholder" or not trained.isdisjoint(node.all_input_nodes)
            wants = starts and may_be_trained(node)
        if wants:
            trained.add(node)
    return trained


def find_reached(results: Iterable[fx.Node], trained: Container[fx.Node]) -> set[fx.Node]:
    """Return the values among the `trained` that a gradient of `results` reaches."""
    wanted = (node for node in results if node in trained)
    return set(walk(wanted, lambda node: [source for source in node.all_input_nodes if source in trained]))


def may_be_trained(node: fx.Node) -> bool:
    """Return whether a value may have a gradient, judged by its node alone."""
    if not has_gradients(node.meta.get("val")):
        return False
    if node.op == "placeholder":
        return info(node).role == "boundary" and wants_gradient(node)
    return node.target not in (aten.detach.default, kernels.uniform)
