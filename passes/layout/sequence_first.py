"""The sequence-first layout: activations go from [b, s, h] to [s, b, h] between the embedding and the loss (SC21 §4.2).

The exchange of batch and sequence is pushed through the graph, operator by operator, until it cancels: token numbers
are transposed (a few bytes), every operator is written on its new arguments (by its record's `order`), transposes to
heads and back absorb the exchange, and the loss sees rows and labels in the same order. Where an operator cannot take
it, the exchange is undone in front of it and the bytes that this copies are counted.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from autoptd.passes.ir.nodes import Propagation, as_results, info, results_of
from autoptd.passes.ir.program import Program
from autoptd.passes.layout.packed_projections import unpack_projections
from autoptd.passes.operators.layout import BATCH, SEQUENCE, DimOrder, LayoutWriter, plain_order
from autoptd.passes.operators.pointwise import elementwise_order
from autoptd.passes.operators.table import Trait, has_trait, rules_of
from autoptd.passes.tensor_parallel.sharding import find_axes, find_batch
from autoptd.runtime import aten
from autoptd.runtime.program.mesh import Mesh


def rewrite_layout(program: Program) -> Program:
    """Hold activations [s, b, h] instead of [b, s, h], if that copies less memory, or no more for several tensor ranks.

    Dimension 0 of what tensor ranks exchange is then the sequence, and attention reads its heads as strided views. The
    model is left alone, and the log says why, when it is sequence-first already, has no [b, s] token input, or when
    nothing is gained. Same numbers but for the order in which rows are added up.
    """
    (stage,) = program.stages
    inputs, _ = find_batch(program.inputs, find_axes(stage, 1, rules={}))
    numbers = [i for i in inputs if len(i.shape) == 2 and not i.dtype.is_floating_point]
    tokens = {i.name: i.shape for i in numbers if i.batch_dim is not None}
    if any(i.batch_dim for i in inputs if i.name in tokens):
        return _leave(program, "it is [s, b, h] already")
    if not tokens:
        return _leave(program, "no input holds token numbers [b, s]")
    if any(node.target is aten.as_strided.default for node in stage.graph.nodes):
        return _leave(program, "as_strided reads its memory as it is")
    # Of one sequence, all heads are even steps apart.
    several = any(min(shape) > 1 for shape in tokens.values())
    source = unpack_projections(stage.graph, program.mesh) if several else stage.graph
    strides = Strides(program.mesh)
    writer = LayoutWriter(source, strides.visit, tokens)
    graph = _run(writer)
    if not writer.exchanged:
        return _leave(program, "no activation is [b, s, h]")
    before, after = (sum(find_copies(g, strides).values()) for g in (stage.graph, graph))
    undone = "".join(f"; undone for {count} {name}" for name, count in writer.undone.most_common(3))
    if after > before:
        return _leave(program, f"[s, b, h] would copy {after:,} instead of {before:,} bytes{undone}")
    if after == before and program.mesh.tensor == 1:
        reason = f"[s, b, h] would copy as much, {after:,} bytes, and no tensor ranks exchange its rows"
        return _leave(program, reason)
    entry = (
        f"rewrite_layout [b, s, h] -> [s, b, h]: {before:,} -> {after:,} bytes copied per microbatch{undone}"
    )
    return program.replace_stages((replace(stage, graph=graph),), entry)


def _leave(program: Program, reason: str) -> Program:
    return program.replace_stages(program.stages, f"rewrite_layout: left as it is, {reason}")


def _run(writer: LayoutWriter) -> fx.Graph:
    """Return the new graph; its results are in the user's order."""
    for node in writer.source.nodes:
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
            _enter(writer, node)
    return writer.graph


def _enter(writer: LayoutWriter, node: fx.Node) -> None:
    """Take over an input or a parameter."""
    new = writer.graph.node_copy(node)
    new.meta = dict(node.meta)
    writer.find_value(new)
    if node.op == "placeholder" and str(node.target) in writer.tokens:
        batch, sequence = writer.tokens[str(node.target)]
        writer.orders[node] = DimOrder((((BATCH, batch),), ((SEQUENCE, sequence),)), transposed=True)
        writer.made["user", node] = new
        return
    writer.values[node] = new
    if isinstance(node.meta["val"], torch.Tensor):
        writer.orders[node] = plain_order(node.meta["val"].shape)


def _rewrite(writer: LayoutWriter, node: fx.Node) -> None:
    rule = rules_of(node).order
    pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
    if rule is None and pointwise and isinstance(node.meta["val"], torch.Tensor):
        rule = elementwise_order
    written = rule(writer, node) if rule is not None else None
    if written is None:
        plain = as_results(node, [plain_order(value.shape) for value in results_of(node)])
        written = writer.undo(node, node.args), plain
    new, found = written
    writer.values[node], writer.orders[node] = new, found
    orders: Any = found if isinstance(found, tuple) else (found,)
    for order, old, val in zip(orders, results_of(node), results_of(new), strict=True):
        assert order.shape == list(old.shape), f"{node}: {order.dims} is not {list(old.shape)}"
        assert order.arrange(order.shape) == list(val.shape), f"{node}: {order} is not {list(val.shape)}"
        writer.exchanged += order.transposed and val.is_floating_point()


def find_copies(graph: fx.Graph, strides: Strides) -> dict[fx.Node, int]:
    """Return the operators that copy before (or instead of) computing, with the bytes that each writes.

    These are a ``reshape`` that is not a view, a ``contiguous`` of another order, operands of a product whose batch
    dimensions do not merge, and arguments that a normalisation or a softmax must first make contiguous. Concatenations
    move data in any layout, and integers (token numbers) are a few bytes: neither counts.
    """
    found: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if node.op == "output":
            continue
        value = strides.visit(node)
        rule = rules_of(node).copies
        given = [strides.values.get(n) for n in node.args if isinstance(n, fx.Node)]
        if rule is not None and (copied := rule(given, value)):
            found[node] = copied
    return found


class Strides(Propagation):
    """Values on the meta device with the strides that the real kernels give them."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh)
        self.values: dict[fx.Node, Any] = {}

    def visit(self, node: fx.Node) -> Any:
        """Compute the node's value for its readers, or take the captured one if meta tensors cannot."""
        if node in self.values:
            return self.values[node]
        value = node.meta["val"]
        if node.op == "call_function":
            with suppress(RuntimeError):  # no meta kernel, or a shape that depends on data
                value = self.run(node)
            if has_trait(node, Trait.FUSED_ATTENTION):
                value = self._attention_output(node, value)
        self.values[node] = value
        return value

    def _value(self, node: fx.Node) -> Any:
        return self.rank if info(node).role == "rank" else self.values[node]

    def _attention_output(self, node: fx.Node, value: Tensor) -> Tensor:
        """Return a result that lies in memory as the queries do: so the fused kernels write it, unlike meta kernels."""
        operands: list[Any] = [self.values[n] for n in node.args[:3]]  # type: ignore[index]
        query = operands[0]
        fused = query.shape == value.shape and query.dim() == 4 and all(x.stride(-1) == 1 for x in operands)
        return torch.empty_like(query) if fused else value
