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
    """The batch dimension of each input, and its axis where the batch is more than one.

    The captured guess stands unless some operator needs that axis whole (attention, the sequence of a sequence-first
    model); then it is the first axis that none needs whole, or a dimension of size 1.
    """
    nodes = {str(n.target): n for n in analysis.inputs}
    dims = {i.name: [ax.find(a) for a in analysis.of(nodes[i.name])] for i in inputs if i.name in nodes}
    split = [i for i in inputs if i.batch_dim is not None and i.name in dims]
    guessed = [dims[i.name][i.batch_dim] for i in split if i.batch_dim is not None]
    every = [axis for i in split for axis in dims[i.name]]
    candidates = [
        *(axis for axis in guessed if not axis.blocked),
        *(axis for axis in every if axis.size > 1 and not axis.blocked),
        *(axis for axis in every if axis.size == 1),
        *guessed,
    ]
    if not candidates:
        return inputs, set()
    batch = candidates[0]

    def place(entry: Input) -> Input:
        if entry.name not in dims:
            return entry
        own = dims[entry.name]
        same = [d for d, axis in enumerate(own) if axis is batch or axis.size == batch.size == 1]
        return replace(entry, batch_dim=same[0] if same else None)

    return tuple(place(entry) for entry in inputs), {batch} if batch.size > 1 else set()
