"""Move values that depend on neither parameters nor data out of the step."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from autoptd.passes.ir.names import free_name
from autoptd.passes.ir.nodes import add_node, copy_node, is_lifted, where
from autoptd.passes.ir.program import Program, Stage, constants_graph, constants_made
from autoptd.passes.normal_form.constant_masks import MaskJudge, buffers_under
from autoptd.passes.operators.table import Trait, has_trait, strip
from autoptd.runtime import aten
from autoptd.runtime.program.placement import Parameter


def fold_constants(program: Program) -> Program:
    """Move constant subgraphs, which depend on buffers at most, to ``Stage.constants``, each made once.

    Raises ValueError for an embedding of constant numbers, such as positions, that its table lacks.
    """
    (stage,) = program.stages
    folder = _Folder(stage, program.buffers)
    folder.check_lookups()
    folder.slice_indices()
    constants = folder.split()
    graph, made = folder.graph, folder.made
    used = {str(n.target) for g in (graph, constants) for n in g.nodes if n.op == "get_attr"}
    kept = {n: p for n, p in stage.parameters.items() if n in used or not is_lifted(n)}
    size = sum(p.bytes for p in made.values())
    before, after = len(stage.graph.nodes), len(graph.nodes)
    entry = f"fold_constants {before} -> {after} nodes, {len(made)} constants of {size} bytes"
    return program.replace_stages((Stage(graph, {**kept, **made}, constants),), entry, proved=folder.proved)


class _Folder:
    """A copy of a stage's graph, equal constants merged, whose constants are taken out."""

    def __init__(self, stage: Stage, buffers: Mapping[str, Tensor]) -> None:
        self.parameters = stage.parameters
        self.judge = MaskJudge(buffers)
        self.graph = fx.Graph()
        self.constant: set[fx.Node] = set()
        self.made: dict[str, Parameter] = {}
        self.proved: frozenset[str] = frozenset()
        values: dict[fx.Node, fx.Node] = {}
        first: dict[str, fx.Node] = {}
        for node in stage.graph.nodes:
            values[node] = copied = copy_node(self.graph, node, values.__getitem__)
            if node.op == "get_attr":
                fixed = self.parameters[str(node.target)].kind == "buffer"
            else:
                fixed = node.op == "call_function" and all(n in self.constant for n in copied.all_input_nodes)
            if fixed:
                # repr tells 1 from 1.0 and True; arguments are merged already, so names are identities.
                key = f"{copied.target} {copied.args!r} {copied.kwargs!r}"
                values[node] = kept = first.setdefault(key, copied)
                self.constant.add(kept)
                if kept is not copied:
                    self.graph.erase_node(copied)

    def check_lookups(self) -> None:
        for node in self.graph.find_nodes(op="call_function", target=aten.embedding.default):
            table, index = node.args[:2]
            numbers = self.judge.value(index) if index in self.constant else None
            if numbers is None or not numbers.numel():
                continue
            least, most, rows = int(numbers.min()), int(numbers.max()), table.meta["val"].shape[0]
            if least < 0 or most >= rows:
                raise ValueError(
                    f"{where(node)}: rows {least} to {most} are looked up in a table of {rows}; use shorter sequences "
                    "in example_inputs, or a model with more positions"
                )

    def slice_indices(self) -> None:
        """Turn an index of constant, consecutive numbers into a slice (Falcon takes its one key head so)."""
        for node in self.graph.find_nodes(op="call_function", target=aten.index.Tensor):
            arguments: Any = node.args
            source, indices = arguments
            (dim, index), *others = [(d, i) for d, i in enumerate(indices) if i is not None]
            fits = index in self.constant and node not in self.constant and index.meta["val"].dim() == 1
            numbers = self.judge.value(index) if fits and not others else None
            if numbers is None or numbers.dtype != torch.int64 or not len(numbers):
                continue
            if (numbers < 0).all():
                numbers = numbers + source.meta["val"].shape[dim]
            start, end = int(numbers[0]), int(numbers[0]) + len(numbers)
            if start >= 0 and torch.equal(numbers, torch.arange(start, end)):
                self.proved |= buffers_under(index)
                node.target, node.args = aten.slice.Tensor, (source, dim, start, end)

    def split(self) -> fx.Graph:
        """Take the constants out of the graph and return the graph that makes them; `made` names them."""
        self.graph.eliminate_dead_code()
        outputs: dict[str, fx.Node] = {}
        for node in list(self.graph.nodes):
            users = [user for user in node.users if user not in self.constant]
            if node in self.constant and users and node.op != "get_attr":
                outputs[str(self._load(node, users).target)] = node
        once = constants_graph(outputs, outputs)
        self.graph.eliminate_dead_code()
        return once

    def _load(self, node: fx.Node, users: list[fx.Node]) -> fx.Node:
        """Load a constant where it was computed, named after the operator that computed its elements."""
        origin = strip(node, Trait.VIEWS)
        # It becomes an attribute of the rank's nn.Module, which already has `to` and `type`.
        name = f"constant.{origin.name}" + "_value" * hasattr(torch.nn.Module, origin.name)
        unique = free_name(name, {**self.parameters, **self.made})
        val = node.meta["val"]
        self.made[unique] = Parameter(unique, tuple(val.shape), val.dtype, "constant", False)
        with self.graph.inserting_before(node):
            loaded = add_node(self.graph, "get_attr", unique, name=unique.removeprefix("constant."), meta=node.meta)
        for user in users:
            user.replace_input_with(node, loaded)
        return loaded


def filled(constants: fx.Graph) -> frozenset[str]:
    """Return the constants that are made of one number, as ``x.new_ones(b, 1, 1)`` is."""
    names = set()
    for name, node in constants_made(constants).items():
        while len(node.all_input_nodes) == 1:
            (node,) = node.all_input_nodes
        if has_trait(node, Trait.FILLS):
            names.add(name)
    return frozenset(names)
