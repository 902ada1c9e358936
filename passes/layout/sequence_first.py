"""The sequence-first layout: activations go from [b, s, h] to [s, b, h] between the embedding and the loss (SC21 §4.2).

The exchange of batch and sequence is pushed through the graph, operator by operator, until it cancels: token numbers
are transposed (a few bytes), every operator is written on its new arguments (by its record's `order`), transposes to
heads and back absorb the exchange, and the loss sees rows and labels in the same order. Where an operator cannot take
it, the exchange is undone in front of it and the bytes that this copies are counted.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from autoptd.passes.ir.nodes import copy_node, results_of
from autoptd.passes.ir.program import Program
from autoptd.passes.layout.copies import Strides, find_copies
from autoptd.passes.layout.packed_projections import unpack_projections
from autoptd.passes.operators.layout import LayoutWriter
from autoptd.passes.operators.table import rules_of
from autoptd.passes.tensor_parallel.analysis import find_axes
from autoptd.passes.tensor_parallel.sharding import find_batch
from autoptd.runtime import aten


def rewrite_layout(program: Program) -> Program:
    """Hold activations [s, b, h] instead of [b, s, h], if that copies less memory, or no more for several tensor ranks.

    Dimension 0 of what tensor ranks exchange is then the sequence, and attention reads its heads as strided views. The
    model is left alone, and the log says why, when it is sequence-first already, has no [b, s] token input, or when
    nothing is gained. Same numbers but for the order in which rows are added up.
    """
    (stage,) = program.stages
    # Of one sequence, all heads are even steps apart.
    several = any(len(i.shape) == 2 and min(i.shape) > 1 for i in program.inputs)
    source = unpack_projections(stage.graph, program.mesh) if several else stage.graph
    axis_map = find_axes(replace(stage, graph=source), 1, rules={})
    inputs, _ = find_batch(program.inputs, axis_map)
    numbers = [i for i in inputs if len(i.shape) == 2 and not i.dtype.is_floating_point]
    tokens = {i.name for i in numbers if i.batch_dim is not None}
    if any(i.batch_dim for i in inputs if i.name in tokens):
        return _leave(program, "it is [s, b, h] already")
    if not tokens:
        return _leave(program, "no input holds token numbers [b, s]")
    if any(node.target is aten.as_strided.default for node in stage.graph.nodes):
        return _leave(program, "as_strided reads its memory as it is")
    strides = Strides(program.mesh)
    writer = LayoutWriter(strides.visit, axis_map, [n for n in axis_map.inputs if str(n.target) in tokens])
    graph = _run(writer, source)
    before, after = (sum(find_copies(g, strides).values()) for g in (stage.graph, graph))
    undone = "".join(f"; undone for {count} {name}" for name, count in writer.undone.most_common(3))
    if after > before:
        return _leave(program, f"[s, b, h] would copy {after:,} instead of {before:,} bytes{undone}")
    if after == before and program.mesh.tensor == 1:
        return _leave(program, f"[s, b, h] would copy as much, {after:,} bytes, and no tensor ranks exchange its rows")
    copied = f"{before:,} -> {after:,} bytes copied per microbatch{undone}"
    return program.replace_stages((replace(stage, graph=graph),), f"rewrite_layout [b, s, h] -> [s, b, h]: {copied}")


def _leave(program: Program, reason: str) -> Program:
    return program.replace_stages(program.stages, f"rewrite_layout: left as it is, {reason}")


def _run(writer: LayoutWriter, source: fx.Graph) -> fx.Graph:
    """Return the new graph; its results are in the user's order."""
    for node in source.nodes:
        writer.current = node
        if node.op == "output":
            known = set(writer.graph.nodes)
            results = fx.map_arg(node.args[0], writer.restore)
            for new in [new for new in writer.graph.nodes if new not in known]:
                new.all_input_nodes[0].append(new)  # in the stage that makes the value
            writer.graph.output(results).meta = dict(node.meta)
        elif node.op == "call_function":
            _rewrite(writer, node)
        else:
            new = copy_node(writer.graph, node)
            writer.find_value(new)
            if node in writer.transposed:
                writer.made["user", node] = new
            else:
                writer.values[node] = new
    return writer.graph


def _rewrite(writer: LayoutWriter, node: fx.Node) -> None:
    rule = rules_of(node).order
    written = rule(writer, node) if rule else None
    writer.values[node], transposed = written or (writer.undo(node, node.args), False)
    if transposed:
        writer.transposed.add(node)
    for order, val in zip(writer.orders(node), results_of(writer.values[node]), strict=True):
        assert order.arranged == list(val.shape), f"{node}: {order} is not {list(val.shape)}"
