"""The cost of a step as formulas in the symbols of the field: ``program.cost``."""

import operator
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache, cached_property
from math import prod
from typing import Any

import sympy
from torch import Tensor, UntypedStorage, fx

from autoptd.options import check_counts
from autoptd.passes.cost.saved_tensors import Ledger
from autoptd.passes.cost.work import Work, backward_work, forward_work
from autoptd.passes.ir.nodes import info, shaping_arguments
from autoptd.passes.ir.program import Stage, find_trained
from autoptd.passes.operators.quantities import Number, Sizes, local_sizes, tensor_arguments
from autoptd.passes.tensor_parallel.symbols import DimensionSymbols, symbol
from autoptd.runtime.collectives import copied_linears
from autoptd.runtime.program.manifest import Manifest
from autoptd.runtime.program.mesh import Mesh

Label = tuple[int, int] | None  # which stack of layers, and which layer of it


@dataclass(frozen=True)
class Amounts:
    """The work, traffic and memory of one tensor rank for one microbatch, each a sympy expression.

    `forward`, `backward` and `recomputed` are FLOPs of products, the accounting of SC21 (its appendix): causal
    attention in full, and of a fused attention's backward the scores that it computes again left out; they are in
    `scores_again`. `elementwise` are FLOPs besides products, which the paper drops. `moved` are bytes read and written,
    `communicated` bytes that a ring sends over the tensor group, `saved` bytes of activations kept for the backward,
    `parameters` the elements that the rank holds, `elements` those of whole parameters, tied ones once.
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
    elements: Number = 0

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
        own |= {"e": mesh.expert} if mesh.expert > mesh.tensor else {}
        self.values = dict(symbols.values if symbols else {}) | {symbol(name): n for name, n in own.items()}
        works: Works = {}
        named: set[str] = set()
        self._bills = [_Bill(stage, mesh, works, named, symbols) for stage in stages]
        self.stages = tuple(_total(bill.lines) for bill in self._bills)
        self.layers: dict[sympy.Symbol, Amounts] = {}
        self._find_layers()

    def _find_layers(self) -> None:
        lines: dict[Label, Counter[Line]] = {}
        for bill in self._bills:
            for label, counted in bill.by_layer.items():
                lines.setdefault(label, Counter()).update(counted)
        for stack in sorted({label[0] for label in lines if label is not None}):
            own = [counted for label, counted in lines.items() if label is not None and label[0] == stack]
            name = symbol(f"l{stack + 1}" if stack else "l")
            self.values[name] = len(own)
            once = {frozenset(counted.items()): counted for counted in own}
            known = {key: _total(counted) for key, counted in once.items()}
            totals = [known[frozenset(counted.items())] for counted in own]
            rows = {f.name: [getattr(layer, f.name) for layer in totals] for f in fields(Amounts)}
            self.layers[name] = Amounts(**{n: _typical(amounts) for n, amounts in rows.items()})

    @cached_property
    def model(self) -> Amounts:
        """Sum over all stages, with the number of layers as a symbol."""
        whole = _total(sum((bill.lines for bill in self._bills), Counter()))
        sums = {field.name: getattr(whole, field.name) for field in fields(whole)}
        for count, layer in self.layers.items():
            for name in sums:
                sums[name] += (count - self.values[count]) * getattr(layer, name)
        return Amounts(**{name: sympy.expand(total) for name, total in sums.items()})

    @property
    def parameters(self) -> sympy.Expr:
        """Elements of the model's parameters, tied ones once (SC21 equation 2)."""
        return self.model.elements

    @cached_property
    def flops(self) -> sympy.Expr:
        """FLOPs of the products of one step on all ranks (SC21 equation 3)."""
        return self._everywhere(self.model.flops)

    @cached_property
    def dropped(self) -> Mapping[str, sympy.Expr]:
        """FLOPs of one step on all ranks that equation 3 leaves out."""
        return {n: self._everywhere(getattr(self.model, n)) for n in ("elementwise", "scores_again")}

    def _everywhere(self, amount: Number) -> sympy.Expr:
        size = self.manifest.mesh.tensor  # of a loaded program, whose sizes no other t would divide
        tensor = symbol("t") if self._symbols and size > 1 else size
        return sympy.expand(amount * tensor * symbol("m") * symbol("d"))

    def evaluate(self, expression: sympy.Expr, **sizes: int) -> int | float:
        """Evaluate an expression at the program's own sizes, or at `sizes` given by their symbols.

        Raises ValueError for a symbol that the program does not have, and for a size that is no positive integer.
        """
        for name in sizes:
            if symbol(name) not in self.values:
                known = ", ".join(sorted(map(str, self.values)))
                raise ValueError(f"{name!r} is no symbol of this program's cost: expected one of {known}")
        check_counts(**sizes)
        own = {symbol(name): size for name, size in sizes.items()}
        values = {name: sympy.Integer(size) for name, size in (self.values | own).items()}
        found = sympy.Rational(sympy.sympify(expression).xreplace(values))  # exact: nothing is rounded before
        return int(found) if found.is_Integer else found.p / found.q


# Lines of the bill

Line = tuple[str, Any]  # the name of an amount, and its expression
Works = dict[Hashable, tuple[Line, ...]]


class _Bill:
    """The costs of one stage, line by line: a `Counter` of (name of an amount, expression)."""

    def __init__(
        self, stage: Stage, mesh: Mesh, works: Works, named: set[str], symbols: DimensionSymbols | None
    ) -> None:
        self.by_layer: dict[Label, Counter[Line]] = {}
        self._works = works  # of equal calls in all stages
        self._sizes = cache(symbols.shape if symbols else local_sizes)
        ledger = Ledger(stage, mesh)
        repeated, trained = ledger.repeated_nodes, find_trained(stage)
        for node in stage.graph.nodes:
            if node.op == "call_function":
                # All decoder layers' linears of an encoder's output are one call, with one all-reduce.
                several = node.target is copied_linears
                for name, amount in self._list_work(node, trained, node in repeated):
                    calls = node.users if several and name != "communicated" else (node,)
                    for call in calls:
                        share = amount / sympy.Integer(len(calls))
                        self._count(info(call).layer, [(name, share)])
        reads = {str(node.target): node for node in stage.graph.nodes if node.op == "get_attr"}
        for name, parameter in stage.parameters.items():
            if parameter.kind == "parameter":
                label, held, whole = None, parameter.shape, parameter.shape
                if name in reads:
                    label, held = info(reads[name]).layer, self._sizes(reads[name])
                    whole = symbols.whole_shape(reads[name], whole) if symbols else whole
                lines = [("parameters", prod(held)), ("elements", prod(whole))]
                self._count(label, lines[: 1 if name in named else 2])
                named.add(name)
        for node, size in _list_kept(stage, ledger, self._sizes):
            self._count(info(node).layer, [("saved", size)])
        self.lines: Counter[Line] = sum(self.by_layer.values(), Counter())

    def _count(self, label: Label, lines: Iterable[Line]) -> None:
        counter = self.by_layer.setdefault(label, Counter())
        counter.update(line for line in lines if line[1] != 0)

    def _list_work(self, node: fx.Node, trained: set[fx.Node], repeated: bool) -> tuple[Line, ...]:
        taken = [s for s in node.all_input_nodes if info(s).role != "rank"]
        sources = tuple((self._sizes(s), str(s.meta["val"]), s.op, s in trained) for s in taken)
        given = repr(fx.map_arg((shaping_arguments(node), node.kwargs), lambda source: source.op))
        readers = sum(user.op == "output" or user in trained for user in node.users)
        key = node.target, self._sizes(node), sources, given, readers, node in trained, repeated
        if key not in self._works:
            forward = forward_work(node, self._sizes)
            backward = backward_work(node, trained, self._sizes)
            self._works[key] = (
                *_list_work_lines(forward, "forward"),
                *_list_work_lines(backward, "backward"),
                *(_list_work_lines(forward, "recomputed") if repeated else ()),
            )
        return self._works[key]


def _list_kept(stage: Stage, ledger: Ledger, sizes: Sizes) -> Iterator[tuple[fx.Node, Number]]:
    """Yield the first call that keeps each storage for the backward, and its bytes in numbers of `sizes`.

    All parts of a storage are taken to be equal.
    """
    homes: dict[UntypedStorage, tuple[fx.Node, Tensor]] = {}
    for node in (node for node in stage.graph.nodes if node.op != "output"):
        for tensor in ledger.tensors(node):
            if tensor.nbytes == tensor.untyped_storage().nbytes() or node.op == "placeholder":
                homes.setdefault(tensor.untyped_storage(), (node, tensor))
    for node, kept in ledger.first_kept():
        for storage in kept:
            home, tensor = homes.get(storage) or ledger.first_saved[storage]
            times, rest = divmod(storage.nbytes(), max(1, tensor.nbytes))
            shape = _name_shape(tensor, [home, *tensor_arguments(home)], sizes)
            yield node, storage.nbytes() if rest else times * tensor.element_size() * prod(shape)


def _name_shape(tensor: Tensor, nodes: Iterable[fx.Node], sizes: Sizes) -> Sequence[Number]:
    """Return the shape of a tensor in the numbers of the first of `nodes` that begins with the same dimensions.

    Else of one of which it has several: a loss keeps four numbers for each row.
    """
    found: Sequence[Number] = tuple(tensor.shape)
    for node in nodes:
        value, named = node.meta["val"], sizes(node)
        for own, shape in [(value, named)] if isinstance(value, Tensor) else zip(value, named, strict=True):
            pairs = list(zip(tensor.shape, own.shape, shape, strict=False))
            if len(pairs) == tensor.dim() and all(size in (1, other) for size, other, _ in pairs):
                return [number if size == other else 1 for size, other, number in pairs]
            if own.dim() and tensor.shape[1:] == own.shape:
                found = [tensor.shape[0], *shape]
    return found


def _list_work_lines(work: Work, direction: str) -> Iterator[Line]:
    t, e = symbol("t"), symbol("e")
    yield direction, sum((p.flops for p in work.products if not p.repeated), sympy.Integer(0))
    yield "scores_again", sum((p.flops for p in work.products if p.repeated), sympy.Integer(0))
    yield "elementwise", work.elementwise
    yield "moved", work.moved
    sent = (e - t) / e * work.dispatched if work.dispatched else 0
    yield "communicated", (t - 1) / t * (2 * work.reduced + work.gathered) + sent


def _typical(amounts: Sequence[Number]) -> Number:
    """Return the amount of most layers, or their mean if no amount has the majority, as layers may be cut apart."""
    common, times = max(Counter(amounts).items(), key=operator.itemgetter(1), default=(0, 0))
    return common if times * 2 > len(amounts) else sympy.expand(sympy.Add(*amounts) / len(amounts))


def _total(counted: Counter[Line]) -> Amounts:
    sums: dict[str, list[Number]] = {}
    for (name, amount), times in counted.items():
        sums.setdefault(name, []).append(times * amount)
    return Amounts(**{name: sympy.expand(sympy.Add(*terms)) for name, terms in sums.items()})
