"""Megatron's tensor parallelism, found in the graph (SC21 §2.3): divide axes, sum partial results, place f and g.

The axis axis_map says which dimensions are the same axis; `choose_axes` picks which to divide; this pass rewrites the
graph to what ONE tensor rank computes: local sizes in the operators that name sizes, vocabulary-parallel kernels for
embedding and loss, an all-reduce (g) behind each contraction of a divided axis, its bias added once behind that, and
finally (see `gradients`) the conjugate f where a replicated value enters a divided region.
"""

import difflib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import fx

from autoptd.passes.cost.cluster import Cluster
from autoptd.passes.ir.names import free_name
from autoptd.passes.ir.nodes import copy_node
from autoptd.passes.ir.program import Program, Stage, constants_graph, constants_made, copy_graph
from autoptd.passes.normal_form.constants import filled
from autoptd.passes.operators import axes as ax
from autoptd.passes.operators.axes import Axis
from autoptd.passes.operators.axis_map import ATTENTION, OF_ACTIVATIONS, RUNS, AxisMap
from autoptd.passes.operators.localizer import Localizer
from autoptd.passes.operators.table import rules_of
from autoptd.passes.tensor_parallel.analysis import find_axes
from autoptd.passes.tensor_parallel.choice import choose_axes, replicated_heads
from autoptd.passes.tensor_parallel.experts import divide_experts
from autoptd.passes.tensor_parallel.gradient_copies import place_copies
from autoptd.passes.tensor_parallel.sequence import divide_tokens
from autoptd.passes.tensor_parallel.symbols import name_dimensions
from autoptd.passes.tensor_parallel.text_rule import name_rules, read_rules
from autoptd.runtime import collectives
from autoptd.runtime.program.manifest import Input
from autoptd.runtime.program.placement import Parameter


def shard_tensors(
    program: Program, rules: Mapping[Any, str] | None = None, tokens: bool | None = None, cluster: Cluster | None = None
) -> Program:
    """Divide the one-stage program over the tensor ranks of its mesh; every value's ``meta`` becomes one rank's.

    Where `tokens`, what lies between the divided regions is divided by tokens; None: where it pays on a `cluster`,
    by default the paper's. Also finds which dimension of each
    batch input is the batch, and gives dropout the axes its mask is keyed by. Raises ValueError for an operator that is
    not torch's own and has no rule, or heads that t does not divide.
    """
    stage = _separate_uses(program.stages[0])
    tensor = program.mesh.tensor
    table = read_rules(rules)
    axis_map = find_axes(stage, tensor, table)
    for name in (name for name in table if name not in axis_map.operators):
        (near,) = difflib.get_close_matches(name, axis_map.operators, n=1, cutoff=0.0)
        raise ValueError(f"rules= has {name!r}, which the model does not call; did you mean {near!r}?")
    replicated = replicated_heads(axis_map) if tensor > 1 else frozenset[fx.Node]()
    if replicated:
        axis_map = find_axes(stage, tensor, table, replicated)
    inputs, batch = find_batch(program.inputs, axis_map)
    divided, notes = choose_axes(stage.graph, axis_map)
    program = replace(program, inputs=inputs, stages=(stage,))
    localizer = Localizer(program, axis_map, divided, batch, filled(stage.constants))
    graph = localizer.run(lambda localizer, node: rules_of(node).local(localizer, node))
    note = ""
    if tensor > 1 and tokens is not False:
        asked = None if tokens else cluster or Cluster.load("dgx-a100")
        note = divide_tokens(graph, program.mesh, table, localizer.named, batch, asked)
    parameters, copies = place_copies(graph, localizer.parameters, program.mesh.pipeline)
    parameters, exchanged = divide_experts(graph, parameters, program.mesh)
    reductions = sum(n.target is collectives.reduce_from_tensor for n in graph.nodes)
    summed = f"{reductions} all-reduces forward, {copies} backward"
    entry = f"shard_tensors tensor={tensor}: {len(divided)} axes divided, {summed}{note}{exchanged}"
    if axis_map.repeated:
        names = ", ".join(sorted(axis_map.repeated))
        entry += f"; no rule divides {names}: every tensor rank does them whole"
    whole = Stage(graph, parameters, constants_graph(constants_made(stage.constants), parameters))
    symbols = name_dimensions(program, axis_map, divided, localizer.named)
    log = (*program.log, entry, *notes)
    return replace(program, stages=(whole,), symbols=symbols, log=log, rules=name_rules(rules or {}))


def _separate_uses(stage: Stage) -> Stage:
    """Let each use of a buffer or constant read one of its own, so that each may be divided differently (VeRA's are).

    The `name` of such a parameter is still the first one's: `Localizer` joins those that are placed alike.
    """
    read = stage.graph.find_nodes(op="get_attr")
    shared = {n.target for n in read if len(n.users) > 1 and stage.parameters[str(n.target)].kind != "parameter"}
    if not shared:
        return stage
    graph, constants, parameters = copy_graph(stage.graph), copy_graph(stage.constants), dict(stage.parameters)
    made = dict(constants_made(constants))
    for node in graph.find_nodes(op="get_attr"):
        old, following = parameters[str(node.target)], node.next
        for user in list(node.users)[1:] if node.target in shared else ():
            name = free_name(f"constant.{node.name}", parameters)
            parameters[name] = Parameter(old.name, old.shape, old.dtype, "constant", False)
            with graph.inserting_before(following), constants.inserting_before(next(iter(constants.nodes), None)):
                use, made[name] = copy_node(graph, node), made.get(old.name) or copy_node(constants, node)
            use.target = name
            user.replace_input_with(node, use)
    return Stage(graph, parameters, constants_graph(made, parameters))


def find_batch(inputs: tuple[Input, ...], axis_map: AxisMap) -> tuple[tuple[Input, ...], set[Axis]]:
    """Return the batch dimension of each input, and its axis if the batch is more than one.

    The captured guess stands unless some operator needs that axis whole (attention, the sequence of a sequence-first
    model); then it is the first axis that none, or at least no attention, needs whole, or a dimension of size 1.
    """
    nodes = {str(n.target): n for n in axis_map.inputs}
    dims = {i.name: [ax.find(a) for a in axis_map.of(nodes[i.name])] for i in inputs if i.name in nodes}
    split = [i for i in inputs if i.batch_dim is not None and i.name in dims]
    guessed = [dims[i.name][i.batch_dim] for i in split if i.batch_dim is not None]
    if not guessed:
        return inputs, set()
    if all(_is_sequence(axis) for axis in guessed):
        every = [axis for i in split for axis in dims[i.name]]
        free = [axis for axis in every if axis.size > 1 and not axis.blocked]
        if not free and all(_is_attended(axis) for axis in guessed):
            # The mean of an auxiliary loss needs the batch whole, too.
            free = [axis for axis in every if axis.size > 1 and not _is_sequence(axis)]
        batch = (free or [axis for axis in every if axis.size == 1] or guessed)[0]
    else:
        batch = next(axis for axis in guessed if not _is_sequence(axis))
    others = {axis for i in split for d, axis in enumerate(dims[i.name]) if d != i.batch_dim}

    def place(entry: Input) -> Input:
        own = dims.get(entry.name, [])
        exact = [d for d, axis in enumerate(own) if axis is batch or axis.size == batch.size == 1]
        outer = [d for d, axis in enumerate(own) if batch in ax.factors(axis)[:1]]
        if exact or outer:
            return replace(entry, batch_dim=(exact or outer)[0])
        at = entry.batch_dim
        if at is not None and own and (own[at].size != batch.size or own[at] in others):
            return replace(entry, batch_dim=None)  # it merely has the batch's size
        return entry

    return tuple(place(entry) for entry in inputs), {batch} if batch.size > 1 else set()


def _is_attended(axis: Axis) -> bool:
    return any(reason in axis.blocked for reason in (ATTENTION, OF_ACTIVATIONS))


def _is_sequence(axis: Axis) -> bool:
    """Does attention, or a cumulative sum, run over it? One element is none, and is taken for others of size 1."""
    return axis.size > 1 and (_is_attended(axis) or RUNS in axis.blocked)
