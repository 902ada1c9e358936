"""Megatron's tensor parallelism, found in the graph (SC21 §2.3): divide axes, sum partial results, place f and g.

The axis analysis says which dimensions are the same axis; `choose_axes` picks which to divide; this pass rewrites the
graph to what ONE tensor rank computes: local sizes in the operators that name sizes, vocabulary-parallel kernels for
embedding and loss, an all-reduce (g) behind each contraction of a divided axis, its bias added once behind that, and
finally (see `gradients`) the conjugate f where a replicated value enters a divided region.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import fx

from autoptd.passes import axes as ax
from autoptd.passes.analysis import Analysis, user_rules
from autoptd.passes.axes import Axis
from autoptd.passes.choice import choose_axes, replicated_heads
from autoptd.passes.gradients import place_copies
from autoptd.passes.local_operators import lower_operator
from autoptd.passes.lowering import Lowering
from autoptd.passes.program import Program
from autoptd.runtime import collectives
from autoptd.runtime.manifest import Input


def shard_tensors(program: Program, *, rules: Mapping[Any, str] | None = None) -> Program:
    """Divide the one-stage program over the tensor ranks of its mesh; every value's ``meta`` becomes one rank's.

    Also finds which dimension of each batch input is the batch, and gives dropout the axes its mask is keyed by.
    Raises ValueError for an operator without a rule, or heads that t does not divide.
    """
    (stage,) = program.stages
    tensor = program.mesh.tensor
    table = user_rules(rules)
    analysis = Analysis(stage.graph, stage.parameters, tensor=tensor, rules=table)
    severed = replicated_heads(analysis) if tensor > 1 else frozenset[fx.Node]()
    if severed:
        analysis = Analysis(stage.graph, stage.parameters, tensor=tensor, rules=table, sever=severed)
    inputs, batch = find_batch(program.inputs, analysis)
    divided, notes = choose_axes(stage.graph, analysis)
    lowering = Lowering(stage, program, analysis, divided, batch)
    graph = lowering.run(lower_operator)
    parameters, copies = place_copies(graph, lowering.parameters)
    reductions = sum(n.target is collectives.reduce_from_tensor for n in graph.nodes)
    entry = (
        f"shard_tensors tensor={tensor}: {len(divided)} axes divided, "
        f"{reductions} all-reduces forward, {copies} backward"
    )
    whole = replace(stage, graph=graph, parameters=parameters)
    return replace(program, stages=(whole,), inputs=inputs, log=(*program.log, entry, *notes))


def find_batch(inputs: tuple[Input, ...], analysis: Analysis) -> tuple[tuple[Input, ...], set[Axis]]:
    """The batch dimension of each input: the first axis of the inputs that no operator needs whole.

    For a batch of one, axes say nothing (size 1 has none) and the captured guess stands.
    """
    nodes = {str(n.target): n for n in analysis.inputs}
    wanted = {i.shape[i.batch_dim] for i in inputs if i.batch_dim is not None and i.name in nodes}
    candidates = [
        leaf
        for node in nodes.values()
        for axis in analysis.of(node)
        for leaf in ax.factors(axis)
        if leaf.size in wanted and leaf.size > 1
    ]
    free = [leaf for leaf in candidates if not leaf.blocked]
    batch = {(free or candidates)[0]} if candidates else set()
    if not batch:
        return inputs, batch
    found = []
    for entry in inputs:
        dims = analysis.of(nodes[entry.name]) if entry.name in nodes else ()
        at = [d for d, axis in enumerate(dims) if ax.find(axis) in batch]
        found.append(replace(entry, batch_dim=at[0] if at else None) if dims else entry)
    return tuple(found), batch
