"""Read the constants of a stage's masks, and make further constants from them."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from autoptd.passes.ir.names import free_name, operator_word
from autoptd.passes.ir.nodes import copy_node, describe, info, is_lifted, name_arguments
from autoptd.passes.ir.program import Stage, constants_graph, constants_made, copy_graph
from autoptd.passes.normal_form.constant_masks import MaskJudge, buffers_under
from autoptd.runtime.program.placement import Parameter


class Constants:
    """A copy of a stage's constants; `judge` computes them, `sources` holds them and their buffers by name."""

    def __init__(self, stage: Stage, buffers: Mapping[str, torch.Tensor]) -> None:
        self.parameters = dict(stage.parameters)
        self.judge = MaskJudge(buffers)
        self.graph = copy_graph(stage.constants)
        loaded = {str(node.target): node for node in self.graph.find_nodes(op="get_attr")}
        self.sources: dict[str, fx.Node] = loaded | dict(constants_made(self.graph))
        self.made: dict[Any, fx.Node] = {}

    def source(self, value: Any) -> fx.Node | None:
        """Return what computes a value of the stage's graph from buffers at most; None for a value that varies."""
        if not isinstance(value, fx.Node) or value.op != "get_attr":
            return None
        name = str(value.target)
        if name not in self.sources:
            if self.parameters[name].kind != "buffer":
                return None
            self.sources[name] = copy_node(self.graph, value)
        return self.sources[name]

    def number(self, value: Any) -> float | None:
        """Return an argument that is one number: a literal, or a constant of one element in the model's code.

        The number is exact: ``torch.sqrt(torch.tensor(8.0))`` is a factor in any precision. Buffers are not read.
        """
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
        source = self.source(value)
        if source is None or source.meta["val"].numel() != 1 or buffers_under(source):
            return None
        found = self.judge.value(source)
        if found is None:
            return None
        return float(_exact(source, self.judge) if math.isfinite(found) else found)

    def name(self, source: fx.Node) -> str:
        """Return the name under which the stage loads a constant; a new name if it has none."""
        for name, node in self.sources.items():
            if node is source:
                return name
        name = free_name("constant.attention_mask", self.parameters)
        val = source.meta["val"]
        self.parameters[name] = Parameter(name, tuple(val.shape), val.dtype, "constant", False)
        self.sources[name] = source
        return name

    def finish(self, graph: fx.Graph) -> Stage:
        """Return the stage of `graph` without the constants that it no longer loads."""
        used = {str(node.target) for node in graph.find_nodes(op="get_attr")}
        constants = constants_graph(self.sources, {n for n in used if self.parameters[n].kind == "constant"})
        used.update(str(node.target) for node in constants.find_nodes(op="get_attr"))
        own = {n for n, p in self.parameters.items() if p.kind != "constant" and not is_lifted(n)}
        return Stage(graph, {n: p for n, p in self.parameters.items() if n in used | own}, constants)

    def emit(self, target: Any, *args: Any) -> fx.Node:
        """Add a constant, each distinct one once."""
        key = (target, str(args))
        if key not in self.made:
            node = self.graph.create_node("call_function", target, args, name=operator_word(target))
            describe(node, target(*fx.map_arg(args, lambda n: n.meta["val"])), info(args[0]))
            self.made[key] = node
        return self.made[key]


def _exact(node: fx.Node, judge: MaskJudge) -> Any:
    """Return the value of a constant that `judge` has computed, in float64 throughout."""
    if node.op == "get_attr" or not node.meta["val"].is_floating_point():
        value = judge.value(node)
        return value.double() if value.is_floating_point() else value
    target: Any = node.target
    given = name_arguments(target, *fx.map_arg((node.args, node.kwargs), lambda n: _exact(n, judge)))
    return target(**(given | ({"dtype": torch.float64} if "dtype" in given else {})))
