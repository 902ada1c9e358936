"""Run a one-stage Program on this machine, with autograd: its meaning, to compare with the plain model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from autoptd.passes.ir.program import Program
from autoptd.runtime.comm.rank import Rank
from autoptd.runtime.program.mesh import Mesh


def run_graph(
    program: Program, weights: Mapping[str, Tensor], inputs: Mapping[str, Tensor], training: bool = True
) -> Tensor:
    """The loss of a Program's only stage on mesh (1, 1, 1).

    `weights` are parameters and buffers by name; buffers may be left to the program's own.
    """
    (stage,) = program.stages
    values = {**program.buffers, **weights}
    with torch.no_grad():
        constants = run_stage(stage.constants, values, {}) if len(stage.constants.nodes) else {}
    rank = Rank.local(Mesh(1, 1, 1))
    rank.randomness.training = training
    loss = run_stage(stage.graph, {**values, **constants}, {"rank": rank, **inputs})
    assert isinstance(loss, Tensor)
    return loss


def run_stage(graph: fx.Graph, tensors: Mapping[str, Tensor], inputs: Mapping[str, Any]) -> Any:
    values: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            values[node] = inputs[str(node.target)]
        elif node.op == "get_attr":
            values[node] = tensors[str(node.target)]
        elif node.op == "output":
            return fx.map_arg(node.args[0], values.__getitem__)
        else:
            args = fx.map_arg(node.args, values.__getitem__)
            kwargs = fx.map_arg(node.kwargs, values.__getitem__)
            values[node] = node.target(*args, **kwargs)
    raise AssertionError("a graph without output")
