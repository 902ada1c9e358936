"""The cost of a step as formulas in the symbols of the field: ``program.cost``."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from functools import cache, cached_property
from math import prod
from typing import Any

import sympy
from torch import fx

from autoptd.options import check_counts
from autoptd.passes.cost.saved_tensors import Ledger
from autoptd.passes.cost.work import Work, backward_work, forward_work
from autoptd.passes.ir.gradients import find_trained
from autoptd.passes.ir.node_info import info
from autoptd.passes.ir.program import Stage, recomputed_groups
from autoptd.passes.operators.quantities import Number, Sizes, local_sizes
from autoptd.passes.tensor_parallel.symbols import DimensionSymbols, symbol
from autoptd.runtime.collectives import copied_linears
from autoptd.runtime.program.manifest import Manifest

Label = tuple[int, int] | None  # which stack of layers, and which layer of it


@dataclass(frozen=True)
class Amounts:
    """The work, traffic and memory of one tensor rank for one microbatch, each a sympy expression.

    `forward`, `backward` and `recomputed` are FLOPs of products, the accounting of SC21 (its appendix): causal
    attention in full, and of a fused attention's backward the scores that it computes again left out; they are in
    `scores_again`. `elementwise` are FLOPs besides products, which the paper drops. `moved` are bytes read and written,
    `communicated` bytes that a ring sends over the tensor group, `saved` bytes of activations kept for the backward,
    `parameters` the elements that the rank holds.
    """

    forward: Number = 0
    backward: Number = 0
    recomputed: Number = 0
    scores_again: Number = 0
    elementwise: Number = 0
    moved: Number = 0
    communicated: Number = 0
    saved: Number = 0
    parameters: Number = 0

    @property
    def flops(self) -> Number:
        """FLOPs of the products of all passes."""
        return self.forward + self.backward + self.recomputed


class Cost:
    """The costs of a program as sympy expressions, summed per layer, stage and model.

    `values` has the size of every symbol in this program: the axes' (see `passes/tensor_parallel/symbols.py`), l
    layers, t tensor and d data ranks, m microbatches. `layers` has one layer of each stack of equal ones, `stages` a
    row for each stage. The operators are those of this program's sizes: one that broadcasts over a single sequence, for
    example, keeps its formula for several. A loaded program knows no symbols of axes and has numbers instead.
    """

    def __init__(self, stages: Sequence[Stage], manifest: Manifest, symbols: DimensionSymbols | None) -> None:
        self.manifest, self._symbols = manifest, symbols
        mesh = manifest.mesh
        own = {"t": mesh.tensor, "d": mesh.data, "m": manifest.num_microbatches}
        self.values = dict(symbols.values if symbols else {}) | {symbol(name): n for name, n in own.items()}
        works: dict[Hashable, tuple[Line, ...]] = {}
        self._bills = [_Bill(stage, manifest, works, symbols) for stage in stages]
        self.stages = tuple(_total([bill.lines]) for bill in self._bills)
        self.layers: dict[sympy.Symbol, Amounts] = {}
        self._functions: dict[sympy.Expr, tuple[Callable[..., int], ...]] = {}
        self._find_layers()

    def _find_layers(self) -> None:
        """Set `layers`, one of each stack."""
        lines: dict[Label, Counter[Line]] = {}
        for bill in self._bills:
            for label, counted in bill.by_layer.items():
                lines.setdefault(label, Counter()).update(counted)
        for stack in sorted({label[0] for label in lines if label is not None}):
            own = [counted for label, counted in lines.items() if label is not None and label[0] == stack]
            name = symbol(f"l{stack + 1}" if stack else "l")
            self.values[name] = len(own)
            once = {frozenset(counted.items()): counted for counted in own}
            known = {key: _total([counted]) for key, counted in once.items()}
            totals = [known[frozenset(counted.items())] for counted in own]
            names = (field.name for field in fields(Amounts))
            self.layers[name] = Amounts(
                **{n: _typical([getattr(layer, n) for layer in totals]) for n in names}
            )

    def _over_layers(self, total: Number, name: str) -> sympy.Expr:
        """Return a sum over the whole model with the number of layers as a symbol."""
        for count, layer in self.layers.items():
            total += (count - self.values[count]) * getattr(layer, name)
        return sympy.expand(total)

    @cached_property
    def model(self) -> Amounts:
        """Sum over all stages."""
        whole = _total([bill.lines for bill in self._bills])
        return Amounts(**{f.name: self._over_layers(getattr(whole, f.name), f.name) for f in fields(whole)})

    @cached_property
    def parameters(self) -> sympy.Expr:
        """Elements of the model's parameters, tied ones once (SC21 equation 2)."""
        whole: dict[str, tuple[Label, Number]] = {}
        for bill in self._bills:
            for name, found in bill.parameters.items():
                whole.setdefault(name, found)
        total = sympy.Add(*(size for _, size in whole.values()))
        for stack, count in enumerate(self.layers):
            sums: dict[Label, Number] = {}
            for label, size in whole.values():
                if label is not None and label[0] == stack:
                    sums[label] = sums.get(label, 0) + size
            total += (count - self.values[count]) * _typical(list(sums.values()))
        return sympy.expand(total)

    @cached_property
    def flops(self) -> sympy.Expr:
        """FLOPs of the products of one step on all ranks (SC21 equation 3)."""
        return sympy.expand(self._everywhere(self.model.flops))

    @cached_property
    def dropped(self) -> Mapping[str, sympy.Expr]:
        """FLOPs of one step on all ranks that equation 3 leaves out."""
        return {
            name: sympy.expand(self._everywhere(getattr(self.model, name)))
            for name in ("elementwise", "scores_again")
        }

    def _everywhere(self, amount: Number) -> Number:
        size = self.manifest.mesh.tensor  # of a loaded program, whose sizes no other t would divide
        tensor = symbol("t") if self._symbols and size > 1 else size
        return amount * tensor * symbol("m") * symbol("d")

    def evaluate(self, expression: sympy.Expr, **sizes: int) -> int | float:
        """Evaluate an expression at the program's own sizes, or at `sizes` given by their symbols.

        Raises ValueError for a symbol that the program does not have, and for a size that is no positive integer.
        """
        for name in sizes:
            if symbol(name) not in self.values:
                known = ", ".join(sorted(map(str, self.values)))
                raise ValueError(f"{name!r} is no symbol of this program's cost: expected one of {known}")
        check_counts(**sizes)
        values = {**self.values, **{symbol(name): size for name, size in sizes.items()}}
        if expression not in self._functions:
            halves = sympy.fraction(sympy.together(expression))  # whole numbers: nothing is rounded
            self._functions[expression] = tuple(sympy.lambdify(tuple(self.values), half) for half in halves)
        above, below = (
            function(*map(values.__getitem__, self.values)) for function in self._functions[expression]
        )
        found = Fraction(above, below)
        return int(found) if found.denominator == 1 else float(found)

    def __str__(self) -> str:
        """One table, for people."""
        return "\n".join(_write_table(self))


# Lines of the bill

Line = tuple[str, Any]  # the name of an amount, and its expression


class _Bill:
    """The costs of one stage, line by line: a `Counter` of (name of an amount, expression)."""

    def __init__(
        self,
        stage: Stage,
        manifest: Manifest,
        works: dict[Hashable, tuple[Line, ...]],
        symbols: DimensionSymbols | None,
    ) -> None:
        self.by_layer: dict[Label, Counter[Line]] = {}
        self.parameters: dict[str, tuple[Label, Number]] = {}
        self._works = works  # of equal calls in all stages
        self._sizes = cache(symbols.shape if symbols else local_sizes)
        ledger = Ledger(stage, manifest.mesh)
        groups = recomputed_groups(stage.graph)
        repeated = {node for group in groups for node in ledger.repeated(group)}
        trained = find_trained(stage)
        for node in stage.graph.nodes:
            if node.op == "call_function":
                # All decoder layers' linears of an encoder's output are one call, with one all-reduce.
                several = node.target is copied_linears
                for name, amount in self._list_work(node, trained, node in repeated):
                    calls = node.users if several and name != "communicated" else (node,)
                    for call in calls:
                        share = amount / sympy.Integer(len(calls))
                        self._count(info(call).layer, [(name, share)])
            elif node.op == "get_attr" and stage.parameters[str(node.target)].kind == "parameter":
                name, label = str(node.target), info(node).layer
                shape = stage.parameters[name].shape
                whole = symbols.whole_shape(node, shape) if symbols else shape
                self.parameters[name] = label, prod(whole)
                self._count(label, [("parameters", prod(self._sizes(node)))])
        for name, parameter in stage.parameters.items():
            if parameter.kind == "parameter" and name not in self.parameters:  # no operator reads it
                self.parameters[name] = None, prod(parameter.shape)
                self._count(None, [("parameters", prod(parameter.shape))])
        for node, size in ledger.itemize(groups, self._sizes):
            self._count(info(node).layer, [("saved", size)])

    @property
    def lines(self) -> Counter[Line]:
        return sum(self.by_layer.values(), Counter())

    def _count(self, label: Label, lines: Iterable[Line]) -> None:
        counter = self.by_layer.setdefault(label, Counter())
        counter.update(line for line in lines if line[1] != 0)

    def _list_work(self, node: fx.Node, trained: set[fx.Node], repeated: bool) -> tuple[Line, ...]:
        """Return the lines of a call, once for all equal calls."""
        sources = tuple(
            (self._sizes(s), str(s.meta["val"]), s.op, s in trained)
            for s in node.all_input_nodes
            if info(s).role != "rank"
        )
        given = tuple(_pattern(value) for value in (*node.args, *node.kwargs.values()))
        readers = sum(user.op == "output" or user in trained for user in node.users)
        key = node.target, self._sizes(node), sources, given, readers, node in trained, repeated
        if key not in self._works:
            self._works[key] = tuple(_list_lines(node, trained, repeated, self._sizes))
        return self._works[key]


def _pattern(value: Any) -> Any:
    """Return the part of an argument that work may depend on; the numbers of dropouts differ from layer to layer."""
    if isinstance(value, (tuple, list)):
        return tuple(map(_pattern, value))
    return value if isinstance(value, (str, float, bool)) else type(value).__name__


def _list_lines(node: fx.Node, trained: set[fx.Node], repeated: bool, sizes: Sizes) -> Iterator[Line]:
    forward = forward_work(node, sizes)
    yield from _list_work_lines(forward, "forward")
    yield from _list_work_lines(backward_work(node, trained, sizes), "backward")
    if repeated:
        yield from _list_work_lines(forward, "recomputed")


def _list_work_lines(work: Work, direction: str) -> Iterator[Line]:
    t = symbol("t")
    yield direction, sum((p.flops for p in work.products if not p.repeated), sympy.Integer(0))
    yield "scores_again", sum((p.flops for p in work.products if p.repeated), sympy.Integer(0))
    yield "elementwise", work.elementwise
    yield "moved", work.moved
    yield "communicated", 2 * (t - 1) / t * work.reduced


def _typical(amounts: Sequence[Number]) -> Number:
    """Return the amount of most layers, or their mean if no amount has the majority, as layers may be cut apart."""
    common, times = max(Counter(amounts).items(), key=operator.itemgetter(1), default=(0, 0))
    return common if times * 2 > len(amounts) else sympy.expand(sympy.Add(*amounts) / len(amounts))


def _total(counted: Iterable[Counter[Line]]) -> Amounts:
    sums: dict[str, list[Number]] = {}
    for counter in counted:
        for (name, amount), times in counter.items():
            sums.setdefault(name, []).append(times * amount)
    return Amounts(**{name: sympy.expand(sympy.Add(*terms)) for name, terms in sums.items()})


# The table

ROWS = {
    "forward": "FLOPs forward",
    "backward": "FLOPs backward",
    "recomputed": "FLOPs recomputed",
    "scores_again": "FLOPs of scores again",
    "elementwise": "FLOPs elementwise",
    "moved": "bytes moved",
    "communicated": "bytes sent, tensor group",
    "saved": "bytes saved",
    "parameters": "parameters held",
}


def _write_table(cost: Cost) -> Iterator[str]:
    sizes = ", ".join(f"{name} {size:,}" for name, size in sorted(cost.values.items(), key=str))
    yield f"sizes: {sizes}"
    yield f"parameters of the model: {_write(cost, cost.parameters)}"
    yield f"FLOPs of a step, products on all ranks: {_write(cost, cost.flops)}"
    for name, amount in cost.dropped.items():
        yield f"besides, {ROWS[name].removeprefix('FLOPs ')}: {_write(cost, amount)}"
    yield ""
    yield "of one tensor rank and one microbatch:"
    columns = {
        **{f"one of {count} layers": layer for count, layer in cost.layers.items()},
        "model": cost.model,
    }
    width = max(map(len, ROWS.values()))
    for title, amounts in columns.items():
        yield f"  {title}"
        for name, text in ROWS.items():
            amount = getattr(amounts, name)
            if amount != 0:
                yield f"    {text.ljust(width)}  {_write(cost, amount)}"


def _write(cost: Cost, amount: Number) -> str:
    return f"{cost.evaluate(amount):.4g} = {sympy.factor_terms(amount)}"
