"""The symbols of a model's dimensions, found by the roles of its axes and never by their sizes.

b sequences of s tokens; V the vocabulary, which the embedding contracts, and h its width; a heads of size h/a, g of
keys and values; f the width between two products with weights; E experts. Layers have axes of their own: the same role
in the same size is the same symbol, another size has a number behind it ("f2"). The number of tensors packed into one
(3 for queries, keys and values) is a number. Of a divided axis, one of t tensor ranks has one t-th.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from operator import getitem
from typing import Any

import sympy
import torch
from torch import fx

from autoptd.passes.attention.constants import Constants
from autoptd.passes.ir.names import final_name
from autoptd.passes.ir.nodes import operator_name, shape_of
from autoptd.passes.ir.products import find_factors
from autoptd.passes.ir.program import Program
from autoptd.passes.operators import axes as ax
from autoptd.passes.operators.axes import Axes, Axis
from autoptd.passes.operators.axis_map import AxisMap
from autoptd.passes.operators.table import Trait, has_trait, strip
from autoptd.runtime import aten, kernels

# Reasons not to divide an index of equal blocks (`shape_rules`).
PACKED = ("takes it apart", "selects from it")


@cache
def symbol(name: str) -> sympy.Symbol:
    """Return the symbol of a dimension, a positive whole number."""
    return sympy.Symbol(name, positive=True, integer=True)


@dataclass(frozen=True)
class DimensionSymbols:
    """The dimensions of a divided program's values as expressions, read when they are asked for.

    `values` are the sizes of the symbols, `sizes` the expressions of the leaves that have one, `divided` the padding of
    each divided leaf. `axes` has the axes of each result of a value, by the name that it keeps in the finished program.
    """

    values: dict[sympy.Symbol, int]
    divided: Mapping[Axis, int] = field(default_factory=dict)
    axes: Mapping[str, tuple[Axes, ...]] = field(default_factory=dict)
    sizes: dict[Axis, sympy.Expr] = field(default_factory=dict)
    _evaluated: dict[sympy.Expr, int] = field(default_factory=dict)

    def shape(self, node: fx.Node) -> Any:
        """Return one rank's shape of a value, or a tuple of shapes for several results; numbers where no axis is known.

        A kernel has the axes of the values that it replaces: its own name, or a neighbour of the same shape, has them.
        """
        value, near = node.meta["val"], (*node.all_input_nodes, *node.users)
        if isinstance(value, torch.Tensor):
            return self._find(value, (node, *near))
        axes = self.axes.get(final_name(node), ())
        if len(axes) == len(value):
            return tuple(self._express(own, v.shape, self.divided, {}) for own, v in zip(axes, value, strict=True))
        parts = {user.args[1]: user for user in node.users if user.target is getitem}
        return tuple(self._find(v, (parts.get(i, node), *near)) for i, v in enumerate(value))

    def _find(self, value: torch.Tensor, candidates: Iterable[fx.Node]) -> tuple[Any, ...]:
        """Return the shape of `value` by the axes of the first candidate that has its shape."""
        for like in candidates:
            own, axes = like.meta.get("val"), self.axes.get(final_name(like), ())
            same = isinstance(own, torch.Tensor) and own.shape == value.shape
            if same and [*map(len, axes)] == [value.dim()]:
                return self._express(axes[0], value.shape, self.divided, {})
        return tuple(value.shape)

    def whole_shape(self, node: fx.Node, shape: Sequence[int]) -> tuple[sympy.Expr, ...]:
        """Return the `shape` of the parameter that a ``get_attr`` node reads, on all tensor ranks together."""
        (axes,) = self.axes.get(final_name(node)) or ((),)
        return self._express(axes, shape, {}) if len(axes) == len(shape) else tuple(shape)

    def _express(self, axes: Axes, shape: Sequence[int], *tried: Mapping[Axis, int]) -> tuple[Any, ...]:
        """Return a `shape` of `axes` as expressions by what is `tried` as divided; one of another size is a number."""

        def express(axis: Axis, size: int) -> sympy.Expr:
            found = [self.local(axis, own) for own in tried]
            found += [whole / symbol("t") for whole in found]  # of a rank's tokens
            return next((e for e in found if self._evaluate(e) == size), sympy.Integer(size))

        return tuple(express(axis, size) for axis, size in zip(axes, shape, strict=True))

    def _evaluate(self, expression: sympy.Expr) -> int:
        if expression not in self._evaluated:
            self._evaluated[expression] = expression.subs(self.values)
        return self._evaluated[expression]

    def local(self, axis: Axis, divided: Mapping[Axis, int]) -> sympy.Expr:
        """Return one rank's size of an axis."""
        axis = ax.find(axis)
        if axis.kind == "leaf":
            size = self.sizes.get(axis, sympy.Integer(axis.size))
            return (size + divided[axis]) / symbol("t") if axis in divided else size
        if axis.kind == "ragged":
            return sympy.Integer(axis.size)
        parts = [self.local(part, divided) for part in axis.parts]
        return sympy.Mul(*parts) if axis.kind == "product" else sympy.Add(*parts)


def name_dimensions(
    program: Program, axis_map: AxisMap, divided: Mapping[Axis, int], axes: Mapping[str, tuple[Axes, ...]]
) -> DimensionSymbols:
    """Name the axes of an analysed one-stage program; `divided` and `axes` as `DimensionSymbols` has them."""
    symbols = DimensionSymbols({symbol("t"): program.mesh.tensor}, divided, axes)
    _Roles(program, axis_map, symbols)
    return symbols


class _Roles:
    """Names the axes of a program in `symbols`, role by role."""

    def __init__(self, program: Program, axis_map: AxisMap, symbols: DimensionSymbols) -> None:
        self._program, self._axis_map, self._symbols = program, axis_map, symbols
        self._graph = program.stages[0].graph
        self._name_inputs()
        self._name_tables()
        self._name_attention()
        self._name_widths()

    # Names

    def _symbol(self, name: str, size: int) -> sympy.Symbol:
        """Return the symbol of a role: another one for each size of the role."""
        number, found = 1, symbol(name)
        while self._symbols.values.setdefault(found, size) != size:
            number += 1
            found = symbol(f"{name}{number}")
        return found

    def _name(self, name: str, axis: Axis) -> None:
        """Name an axis after its role if it has no name yet."""
        axis = ax.find(axis)
        # Two indices that were cut apart are one index each, although no part of them is free.
        cut = axis.kind == "sum" and self._symbols.sizes.keys().isdisjoint(ax.leaves(axis))
        if cut or self._is_free(axis):
            self._set(axis, self._symbol(name, axis.size))

    def _set(self, axis: Axis, size: sympy.Expr) -> None:
        """Set the size of an axis; of a composed one, its largest part without a name gets the remaining size."""
        axis = ax.find(axis)
        if axis.kind == "leaf":
            self._symbols.sizes[axis] = size
            return
        parts = [ax.find(part) for part in axis.parts]
        free = max(filter(self._is_free, parts), key=lambda part: part.size, default=parts[0])
        others = [self._symbols.local(part, {}) for part in parts if part is not free]
        if axis.kind == "product":
            self._set(free, size / sympy.Mul(*others))
        else:
            self._set(free, (size - sympy.Add(*others)) / parts.count(free))

    def _is_free(self, axis: Axis) -> bool:
        return any(leaf not in self._symbols.sizes and not ax.vanishes(leaf) for leaf in ax.leaves(axis))

    # Roles

    def _name_inputs(self) -> None:
        nodes = {str(node.target): node for node in self._axis_map.inputs}
        for entry in self._program.inputs:
            if entry.batch_dim is not None and entry.name in nodes:
                self._name("b", self._axis_map.of(nodes[entry.name])[entry.batch_dim])

    def _name_tables(self) -> None:
        """Name V, h and s: the first table that the batch is looked up in is the vocabulary's, others are positions."""
        for node in self._graph.find_nodes(op="call_function", target=aten.embedding.default):
            (rows, width), ids = self._axis_map.of(node.args[0]), node.args[1]
            if ids in self._axis_map.batch:
                for axis in self._axis_map.of(ids):
                    for factor in ax.factors(axis):
                        self._name("s", factor)
                self._name("V", rows)
            elif self._is_sequence(ids, ax.find(rows).size):
                self._set(rows, symbol("s"))
            else:
                self._name("positions", rows)
            if ax.find(width).kind == "leaf":
                self._name("h", width)
            else:
                self._symbol("h", ax.find(width).size)
        for node in self._graph.find_nodes(op="call_function", target=aten.cross_entropy_loss.default):
            logits: Any = node.args[0]
            self._name("V", self._axis_map.of(logits)[min(1, len(shape_of(logits)) - 1)])

    def _is_sequence(self, ids: Any, rows: int) -> bool:
        """Return whether all rows of a table are looked up in order, so that it is as long as the sequence."""
        constants = Constants(self._program.stages[0], self._program.buffers)
        source = constants.source(strip(ids, Trait.VIEWS)) if symbol("s") in self._symbols.values else None
        taken = None if source is None else constants.judge.value(source)
        return taken is not None and taken.flatten().tolist() == [*range(rows)]

    def _name_attention(self) -> None:
        for (_, source), dim in self._axis_map.kv_heads.items():
            heads = self._axis_map.of(source)[dim]
            self._name("g", ax.factors(heads)[0])
            self._name("a", heads)  # where they were repeated for the queries
        for node, axis in self._axis_map.heads:
            own = [f for f in ax.factors(axis) if self._symbols.sizes.get(f) != symbol("b")]
            if not own or len(shape_of(node)) < 3 or operator_name(node.target) == "aten.einsum":
                continue
            heads = ax.product(own)
            if len(own) > 1:
                self._name("g", own[0])
            self._name("a", heads)
            x, y = (self._axis_map.of(factor) for factor in (find_factors(node) or node.args)[:2])
            self._name("s", x[-2])
            self._name_head(x[-1], heads)
            if has_trait(node, Trait.FUSED_ATTENTION):
                self._name("s", y[-2])
                self._name_head(self._axis_map.of(node.args[2])[-1], heads)
            elif self._is_free(y[-1]):
                # The product of queries and keys contracts no sequence.
                is_scores = symbol("s") not in self._symbols.local(x[-1], {}).free_symbols
                self._name("s", y[-1]) if is_scores else self._name_head(y[-1], heads)

    def _name_head(self, axis: Axis, heads: Axis) -> None:
        """Name the size of a head: h/a if the heads make up the model's width."""
        width, size = self._symbols.values.get(symbol("h")), ax.find(heads).size * ax.find(axis).size
        if self._is_free(axis):
            whole = symbol("h") / self._symbols.local(heads, {}) if width == size else None
            self._set(axis, whole or self._symbol("head", ax.find(axis).size))

    def _name_widths(self) -> None:
        """Name the remaining axes that a product with a weight contracts as widths of an MLP."""
        for node in self._graph.find_nodes(op="call_function", target=aten.embedding.default):
            self._name("h", self._axis_map.of(node.args[0])[1])
        for node in self._graph.find_nodes(op="call_function", target=kernels.route):
            self._name("E", self._axis_map.all_of(node)[1][0])
        for node, axis in self._axis_map.contractions.items():
            if find_factors(node) and not self._axis_map.weights.isdisjoint(node.all_input_nodes):
                self._name("f", axis)
        for node in self._graph.nodes:
            if node in self._axis_map.weights:
                for leaf in (leaf for axis in self._axis_map.of(node) for leaf in ax.leaves(axis)):
                    if not any(reason in leaf.blocked for reason in PACKED):
                        self._name("n", leaf)
