"""The axes of a model in the field's letters, by what they do and never by their size.

b sequences of s tokens; V the vocabulary, which the embedding contracts, and h its width; a heads of size h/a, g of
keys and values; f the width between two products with weights. Layers have axes of their own: the same role in the
same size is the same letter, another size has a number behind it ("f2"). What packs tensors into one (the 3 of
queries, keys and values) is a number. Of a divided axis, one of t tensor ranks has one t-th.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import sympy
import torch
from torch import fx

from autoptd.passes.ir.node_info import info
from autoptd.passes.ir.nodes import operator_name, shape_of
from autoptd.passes.ir.program import Program
from autoptd.passes.tensor_parallel import axes as ax
from autoptd.passes.tensor_parallel.axes import Axes, Axis
from autoptd.passes.tensor_parallel.axis_map import AxisMap

PACKED = (
    "takes it apart",
    "selects from it",
)  # why an index of equal blocks may not be divided (`shape_rules`)
EMBEDDING, LOSS, ATTENTION = "aten.embedding", "aten.cross_entropy_loss", "aten.scaled_dot_product_attention"
PRODUCTS = ("aten.linear", "aten.addmm", "aten.mm", "aten.matmul", "aten.einsum")


@cache
def letter(name: str) -> sympy.Symbol:
    """The symbol of a letter: a positive whole number."""
    return sympy.Symbol(name, positive=True, integer=True)


class Letters:
    """Every leaf of an analysed one-stage program as an expression; `values` are the sizes of the letters."""

    def __init__(self, program: Program, axis_map: AxisMap) -> None:
        self.values: dict[sympy.Symbol, int] = {letter("t"): program.mesh.tensor}
        self._program, self._axis_map = program, axis_map
        self._graph = program.stages[0].graph
        self._leaves: dict[Axis, sympy.Expr] = {}
        self._sizes: dict[sympy.Expr, int] = {}
        self._name_inputs()
        self._name_tables()
        self._name_attention()
        self._name_widths()

    def shape(self, axes: Axes, divided: Mapping[Axis, int], shape: Sequence[int]) -> tuple[sympy.Expr, ...]:
        """One rank's `shape` in letters; `divided` has the padding of each divided leaf."""
        sizes = (self._local(axis, divided) for axis in axes)
        return tuple(
            expression if self._evaluate(expression) == size else sympy.Integer(size)
            for expression, size in zip(sizes, shape, strict=True)
        )

    def _local(self, axis: Axis, divided: Mapping[Axis, int]) -> sympy.Expr:
        axis = ax.find(axis)
        if axis.kind == "leaf":
            size = self._leaves.get(axis, sympy.Integer(axis.size))
            return (size + divided[axis]) / letter("t") if axis in divided else size
        parts = [self._local(part, divided) for part in axis.parts]
        return sympy.Mul(*parts) if axis.kind == "product" else sympy.Add(*parts)

    def _evaluate(self, expression: sympy.Expr) -> int:
        if expression not in self._sizes:
            self._sizes[expression] = expression.subs(self.values)
        return self._sizes[expression]

    # Names

    def _symbol(self, name: str, size: int) -> sympy.Symbol:
        """The letter of a role: another one for each size that the role has."""
        number, found = 1, letter(name)
        while self.values.setdefault(found, size) != size:
            number += 1
            found = letter(f"{name}{number}")
        return found

    def _name(self, name: str, axis: Axis) -> None:
        """Call an axis by the letter of its role, if it has no name yet."""
        axis = ax.find(axis)
        # Of two indices that were cut apart no part is free: each is one index.
        if self._is_free(axis) or (axis.kind == "sum" and self._leaves.keys().isdisjoint(ax.leaves(axis))):
            self._set(axis, self._symbol(name, axis.size))

    def _set(self, axis: Axis, size: sympy.Expr) -> None:
        """Say how large an axis is; where it is made of others, the largest that has no name is what they leave."""
        axis = ax.find(axis)
        if axis.kind == "leaf":
            self._leaves[axis] = size
            return
        parts = [ax.find(part) for part in axis.parts]
        free = max(filter(self._is_free, parts), key=lambda part: part.size, default=parts[0])
        others = [self._local(part, {}) for part in parts if part is not free]
        if axis.kind == "product":
            self._set(free, size / sympy.Mul(*others))
        else:
            self._set(free, (size - sympy.Add(*others)) / parts.count(free))

    def _is_free(self, axis: Axis) -> bool:
        return any(leaf not in self._leaves and not ax.vanishes(leaf) for leaf in ax.leaves(axis))

    # Roles

    def _calls(self, *names: str) -> Iterable[fx.Node]:
        calls = (node for node in self._graph.nodes if node.op == "call_function")
        return (node for node in calls if operator_name(node.target) in names)

    def _name_inputs(self) -> None:
        nodes = {str(node.target): node for node in self._axis_map.inputs}
        for entry in self._program.inputs:
            if entry.batch_dim is not None and entry.name in nodes:
                self._name("b", self._axis_map.of(nodes[entry.name])[entry.batch_dim])

    def _name_tables(self) -> None:
        """The first table that the batch is looked up in is the vocabulary's; numbers that are not of its batch are
        of the sequence."""
        for node in self._calls(EMBEDDING):
            (rows, width), ids = self._axis_map.of(node.args[0]), node.args[1]
            if self._axis_map.reads_batch(ids):
                for axis in self._axis_map.of(ids):
                    for factor in ax.factors(axis):
                        self._name("s", factor)
                self._name("V", rows)
            elif self._is_sequence(ids, ax.find(rows).size):
                self._set(rows, letter("s"))
            else:
                self._name("positions", rows)
            if ax.find(width).kind == "leaf":
                self._name("h", width)
            else:
                self._symbol("h", ax.find(width).size)
        for node in self._calls(LOSS):
            logits: Any = node.args[0]
            self._name("V", self._axis_map.of(logits)[min(1, len(shape_of(logits)) - 1)])

    def _is_sequence(self, ids: Any, rows: int) -> bool:
        """Whether all rows of a table are looked up in their order: it is as long as the sequence."""
        taken = _compute(ids, self._program)
        return letter("s") in self.values and taken is not None and taken.flatten().tolist() == [*range(rows)]

    def _name_attention(self) -> None:
        for (_, source), dim in self._axis_map.severed.items():
            heads = self._axis_map.of(source)[dim]
            self._name("g", ax.factors(heads)[0])
            self._name("a", heads)  # where they were repeated for the queries
        for node, axis in self._axis_map.heads:
            own = [f for f in ax.factors(axis) if self._leaves.get(f) != letter("b")]
            if not own or len(shape_of(node)) < 3 or operator_name(node.target) == "aten.einsum":
                continue
            heads = ax.product(own)
            if len(own) > 1:
                self._name("g", own[0])
            self._name("a", heads)
            x, y = (self._axis_map.of(factor) for factor in _factors(node))
            self._name("s", x[-2])
            self._name_head(x[-1], heads)
            if operator_name(node.target) == ATTENTION:
                self._name("s", y[-2])
                self._name_head(self._axis_map.of(node.args[2])[-1], heads)
            elif self._is_free(y[-1]):
                self._name("s", y[-1]) if self._is_scores(node) else self._name_head(y[-1], heads)

    def _is_scores(self, node: fx.Node) -> bool:
        """Whether a product of an attention is that of queries and keys: what it contracts is the size of a head."""
        contracted = self._axis_map.of(_factors(node)[0])[-1]
        return letter("s") not in self._local(contracted, {}).free_symbols

    def _name_head(self, axis: Axis, heads: Axis) -> None:
        """The size of a head is h/a, where the heads make up the model's width."""
        width, size = self.values.get(letter("h")), ax.find(heads).size * ax.find(axis).size
        if self._is_free(axis):
            whole = letter("h") / self._local(heads, {}) if width == size else None
            self._set(axis, whole or self._symbol("head", ax.find(axis).size))

    def _name_widths(self) -> None:
        """What a product with a weight contracts and has no name is the width of an MLP."""
        for node in self._calls(EMBEDDING):
            self._name("h", self._axis_map.of(node.args[0])[1])
        for node in self._calls(*PRODUCTS):
            axis = self._axis_map.contractions.get(node)
            if axis is not None and any(map(self._axis_map.is_weight, node.all_input_nodes)):
                self._name("f", axis)
        for node in self._graph.nodes:
            if self._axis_map.is_weight(node):
                for leaf in (leaf for axis in self._axis_map.of(node) for leaf in ax.leaves(axis)):
                    if not any(reason in leaf.blocked for reason in PACKED):
                        self._name("n", leaf)


def _factors(node: fx.Node) -> tuple[Any, Any]:
    """The first two tensors that an attention, or a product of one, multiplies."""
    first = 1 if operator_name(node.target) == "aten.baddbmm" else 0
    return node.args[first], node.args[first + 1]


def _compute(value: Any, program: Program) -> torch.Tensor | None:
    """The value of whole numbers that depend on no input; None where they do, or are not known."""
    constants = program.stages[0].constants
    outputs: Any = [node.args[0] for node in constants.nodes if node.op == "output"]
    made = dict(outputs[0]) if outputs else {}
    known: dict[fx.Node, Any] = {}

    def run(node: fx.Node) -> Any:
        if node not in known:
            if node.op == "get_attr":
                name = str(node.target)
                known[node] = run(made[name]) if name in made else program.buffers.get(name)
            elif node.op == "call_function" and not info(node).role:
                sources = {source: run(source) for source in node.all_input_nodes}
                usable = all(isinstance(value, torch.Tensor) for value in sources.values())
                args, kwargs = fx.map_arg((node.args, node.kwargs), sources.get)
                known[node] = node.target(*args, **kwargs) if usable else None  # type: ignore[operator]
            else:
                known[node] = None
        return known[node]

    found = run(value) if isinstance(value, fx.Node) else None
    return found if isinstance(found, torch.Tensor) and not found.is_meta else None
