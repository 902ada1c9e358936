"""Mixtures that compute all experts of all tokens, and weigh with zero those that a token did not choose (Llama-4).

A value of all pairs of an expert and a token is [experts, tokens, width] or [experts * tokens, width]; without a width
it is 1. Where a sum over the experts adds zeros but for the chosen pairs, whatever the weights are, the zeros have no
gradient either, and the rows of the chosen pairs alone are computed (`kernels.experts`).
"""

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._ops import OpOverload

from autoptd.passes.ir.nodes import argument, aten_name, called, shape_of
from autoptd.passes.ir.views import dim_map, read_dim
from autoptd.passes.normal_form.writer import Call
from autoptd.passes.operators.table import Trait, has_trait
from autoptd.runtime import aten, kernels


class _Rows(NamedTuple):
    """The chosen pairs of a value: [tokens, slots or 1, width]; behind a product [rows, width], sorted by expert.

    All other pairs are the number `others`, if known. `gates`, [tokens, slots, 1], are still to be multiplied.
    """

    value: fx.Node
    others: torch.Tensor | None = None
    gates: fx.Node | None = None


def write_sum(call: Call) -> fx.Node | None:
    """Write the sum over the experts of all pairs as that over the chosen ones, if the others are proved to be zero."""
    if call.args[1:] != ([0],) or call.kwargs or call.given.dim() != 3:
        return None
    nodes = reversed(call.writer.graph.nodes)
    scores = next((node for node in nodes if _holds_scores(node, *call.given.shape[:2])), None)
    made = scores and _Mixture(call, scores).write()
    if scores and made is None:
        reason = "computes all experts of all tokens: those that a token did not choose are not proved to add 0"
        call.writer.remarks[f"{called(call.node)} {reason}"] += 1
    return made


def _holds_scores(node: fx.Node, experts: int, tokens: int) -> bool:
    """Return whether a node has a score of the different experts that each token chose, and a number for all others."""
    if node.target is not aten.scatter.src:
        return False
    given: Any = node.args
    *_, chosen, source = given
    *own, slots = shape_of(chosen)
    best, last = chosen.args[0] if chosen.target is getitem else chosen, len(own)
    differ = aten_name(best.target) == "topk" and read_dim(best, last + 1) == last
    alike = shape_of(node) == (*own, experts) and shape_of(source) == (*own, slots) and prod(own) == tokens
    return differ and alike and read_dim(node, last + 1) == last


class _Mixture:
    """The rewrite of one sum over experts; `scores` are of those that each token chose."""

    def __init__(self, call: Call, scores: fx.Node) -> None:
        self.call, self.scores = call, scores
        self.experts, self.tokens, _ = call.given.shape
        chosen: Any = scores.args[2]
        self.slots = shape_of(chosen)[-1]
        self.chosen = call.reshape(chosen, [self.tokens, self.slots])
        val = torch.ops.autoptd.route(self.chosen.meta["val"], 0, self.experts)
        args = call.writer.rank, self.chosen, self.experts, self.experts
        route = call.writer.emit(kernels.route, args, {**call.meta, "val": val})
        self.order, self.counts = (call.derive(getitem, route, i) for i in range(2))
        self.found: dict[fx.Node, _Rows | None] = {}
        self.sorted: dict[fx.Node, fx.Node] = {}  # rows of tokens, sorted once for all that multiply them

    def write(self) -> fx.Node | None:
        """Write the sum of the chosen pairs; None if it is not proved to be all, and nobody reads what is written."""
        call, rows = self.call, self._find(self.call.source)
        if rows is None or rows.others != 0 or len(shape_of(rows.value)) == 3:
            return None
        gates = rows.gates or call.derive(aten.ones_like.default, self.chosen, dtype=rows.value.meta["val"].dtype)
        return call.emit(kernels.combine, rows.value, call.reshape(gates, [self.tokens, self.slots]), self.order)

    def _find(self, node: Any) -> _Rows | None:
        """Return the chosen pairs of a value of all pairs; None where it is not proved to be one."""
        if node not in self.found:
            self.found[node] = self._write(self._at(node)) if node.op == "call_function" else None
        return self.found[node]

    def _write(self, call: Call) -> _Rows | None:
        node, front = call.node, self._count_leading(call.val)
        if node.target in (getitem, aten.split.Tensor, aten.split_with_sizes.default):
            own, rank = self._find(call.source), call.given.dim() if node.target is not getitem else 0
            if own is None or (rank and not self._count_leading(call.given) == rank - 1 == read_dim(node, rank)):
                return None
            return own._replace(value=call.derive(node.target, own.value, call.args[1], *[-1] * bool(rank)))
        if not front or not isinstance(node.target, OpOverload):
            return None
        if node.target is aten.expand.default:
            width = shape_of(node)[-1]
            alike = front == 2 and call.given.shape in ((self.tokens, width), (1, self.tokens, width))
            return _Rows(call.reshape(call.source, [self.tokens, 1, width])) if alike else None
        if has_trait(node, Trait.PERMUTES):
            turned = call.val.shape == (self.experts, self.tokens) and dim_map(node) == (1, 0)
            return self._find_scores(call.source) if turned else None
        if has_trait(node, Trait.RESHAPES | Trait.SQUEEZES):
            return self._find(call.source)
        if node.target in (aten.bmm.default, aten.matmul.default):
            return self._multiply(call)
        given = [n for n in node.all_input_nodes if len(shape_of(n)) > call.val.dim() - front]
        rows = {n: own for n in given if len(shape_of(n)) == call.val.dim() and (own := self._find(n))}
        return self._compute(call, rows) if rows and len(rows) == len(given) else None

    def _count_leading(self, value: Any) -> int:
        """Return how many dimensions of a value are its pairs, if there is at most one behind them; else 0."""
        shape = value.shape if isinstance(value, torch.Tensor) else ()
        pairs = (self.experts * self.tokens,), (self.experts, self.tokens)
        return next((n for n in (1, 2) if shape[:n] in pairs and len(shape) <= n + 1), 0)

    def _multiply(self, call: Call) -> _Rows | None:
        """Multiply the rows of each expert by its matrix, for which they are sorted."""
        own, weight = self._find(call.source), call.args[1]
        if own is None or own.gates or call.val.dim() < 3 or shape_of(weight)[:-2] != (self.experts,):
            return None
        *pairs, width = shape_of(own.value)
        if len(pairs) == 2 and own.value not in self.sorted:
            flat = call.reshape(own.value, [prod(pairs), width])
            self.sorted[own.value] = call.derive(kernels.dispatch, flat, self.order, self.slots // pairs[1])
        rows = self.sorted.get(own.value, own.value)
        made = call.derive(kernels.grouped_linear, rows, weight, self.counts, None, True)
        return _Rows(made, own.others if own.others == 0 else None)

    def _find_scores(self, node: fx.Node) -> _Rows | None:
        """Return the chosen pairs of a function of the scores, [.., experts]."""
        if node is self.scores:
            filled, _, _, chosen = self._at(node).args
            known = aten_name(filled.target).removesuffix("_like") in ("zeros", "full")
            others = torch.tensor(argument(filled, "fill_value", 0.0)) if known else None
            return _Rows(self.call.reshape(chosen, [self.tokens, self.slots, 1]), others)
        if node.op != "call_function" or len(node.all_input_nodes) != 1:
            return None
        own = self._find_scores(node.all_input_nodes[0])
        if own is None or (has_trait(node, Trait.RESHAPES) and shape_of(node)[-1] == self.experts):
            return own
        return self._compute(self._at(node), {node.all_input_nodes[0]: own})

    def _compute(self, call: Call, rows: Mapping[fx.Node, _Rows]) -> _Rows | None:
        """Compute what works element by element, on `rows` and on what is the same for all pairs."""
        node, numbers = call.node, {n: own.others for n, own in rows.items() if own.others is not None}
        elements = isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags
        if not (elements or has_trait(node, Trait.CASTS)) or any(own.gates for own in rows.values()):
            return None
        multiplies = node.target is aten.mul.Tensor
        others = next((number for number in numbers.values() if multiplies and number == 0), None)
        if others is None and len(numbers) == len(node.all_input_nodes):
            args, kwargs = fx.map_arg((node.args, node.kwargs), numbers.__getitem__)
            others = node.target(*args, **kwargs)  # type: ignore[operator]
        first, *_, last = sorted([own.value for own in rows.values()] * 2, key=lambda value: len(shape_of(value)))
        if len(shape_of(first)) < len(shape_of(last)):
            weighs = multiplies and shape_of(last) == (self.tokens, self.slots, 1)
            return _Rows(first, others, last) if weighs else None
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: rows[n].value if n in rows else n)
        return _Rows(call.derive(node.target, *args, **kwargs), others)

    def _at(self, node: fx.Node) -> Call:
        return replace(self.call, node=node, args=node.args, kwargs=node.kwargs, meta=node.meta)
