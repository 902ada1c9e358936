"""Bytes that the operators of a graph copy although a better layout would leave them in place, by strides."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, fx

from autoptd.passes.ir.nodes import Propagation, info
from autoptd.passes.operators.table import Trait, has_trait, rules_of
from autoptd.runtime.program.mesh import Mesh


def find_copies(graph: fx.Graph, strides: Strides) -> dict[fx.Node, int]:
    """Return the operators that copy before (or instead of) computing, with the bytes that each writes.

    These are a ``reshape`` that is not a view, a ``contiguous`` of another order, operands of a product whose batch
    dimensions do not merge, and arguments that a normalisation or a softmax must first make contiguous. Concatenations
    move data in any layout, and integers (token numbers) are a few bytes: neither counts.
    """
    found: dict[fx.Node, int] = {}
    for node in graph.nodes:
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
