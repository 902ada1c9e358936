"""The sequence-first layout: activations go from [b, s, h] to [s, b, h] between the embedding and the loss (SC21 §4.2).

The exchange of batch and sequence is pushed through the graph, operator by operator, until it cancels: token numbers
are transposed (a few bytes), every operator is written on what its arguments became (see `layout_rules`), transposes
to heads and back absorb the exchange, and the loss sees rows and labels in the same order. Where an operator cannot
take it, the exchange is undone in front of it and what that copies is counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import fx

from autoptd.passes.analysis import Analysis
from autoptd.passes.calls import called, operator_name
from autoptd.passes.copies import Strides, count_copied_bytes
from autoptd.passes.forms import BATCH, SEQUENCE, Form, plain_form
from autoptd.passes.layout_rules import RULES, elementwise
from autoptd.passes.packing import unpack_projections
from autoptd.passes.program import Program
from autoptd.passes.sharding import find_batch
from autoptd.runtime import aten

Found = Form | tuple[Form, ...]  # of an operator with several results, one form each


def rewrite_layout(program: Program) -> Program:
    """Hold activations [s, b, h] instead of [b, s, h], if that copies less memory, or no more for several tensor ranks.

    Dimension 0 of what tensor ranks exchange is then the sequence, and attention reads its heads as strided views. The
    model is left alone, and the log says why, when it is sequence-first already, has no [b, s] token input, or when
    nothing is gained. Same numbers but for the order in which rows are added up.
    """
    (stage,) = program.stages
    analysis = Analysis(stage.graph, stage.parameters, tensor=1, rules={})
    inputs, _ = find_batch(program.inputs, analysis)
    tokens = {i.name: i.shape for i in inputs if i.batch_dim is not None and _is_token(i.shape, i.dtype)}
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
    mover = Mover(source, strides, tokens)
    graph = mover.run()
    if not mover.moved:
        return _leave(program, "no activation is [b, s, h]")
    before, after = (count_copied_bytes(g, strides) for g in (stage.graph, graph))
    undone = "".join(f"; undone for {count} {name}" for name, count in mover.undone.most_common(3))
    if after > before:
        return _leave(program, f"[s, b, h] would copy {after:,} instead of {before:,} bytes{undone}")
    if after == before and program.mesh.tensor == 1:
        return _leave(
            program, f"[s, b, h] would copy as much, {after:,} bytes, and no tensor ranks exchange its rows"
        )
    entry = (
        f"rewrite_layout [b, s, h] -> [s, b, h]: {before:,} -> {after:,} bytes copied per microbatch{undone}"
    )
    return program.replace_stages((replace(stage, graph=graph),), entry)


def _is_token(shape: Sequence[int], dtype: torch.dtype) -> bool:
    return len(shape) == 2 and not dtype.is_floating_point


def _leave(program: Program, reason: str) -> Program:
    return program.replace_stages(program.stages, f"rewrite_layout: left as it is, {reason}")


class Mover:
    """The rewrite of one graph: for each of its nodes, the value that stands for it and the form that has.

    `undone` counts the operators that were given the user's order back, `moved` the activations that were exchanged.
    """

    def __init__(self, source: fx.Graph, strides: Strides, tokens: Mapping[str, Sequence[int]]) -> None:
        self.source = source
        self.tokens = tokens
        self.graph = fx.Graph()
        self.strides = strides
        self.forms: dict[fx.Node, Found] = {}
        self.undone: Counter[str] = Counter()
        self.moved = 0
        self._current: fx.Node
        self._values: dict[fx.Node, fx.Node] = {}
        self._made: dict[tuple[Any, ...], fx.Node] = {}

    def run(self) -> fx.Graph:
        """The new graph; its results are in the user's order."""
        for node in self.source.nodes:
            self._current = node
            if node.op == "output":
                self.graph.output(fx.map_arg(node.args[0], self.restore)).meta = dict(node.meta)
            elif node.op == "call_function":
                self._rewrite(node)
            else:
                self._enter(node)
        return self.graph

    # What rules read

    def form(self, node: Any) -> Form:
        found = self.forms[node]
        assert isinstance(found, Form)
        return found

    def is_moved(self, node: Any) -> bool:
        found = self.forms.get(node)
        return isinstance(found, Form) and found.moved

    def value(self, node: Any) -> Any:
        """What stands for a value, as the new graph holds it; a number, or None, for itself."""
        if not isinstance(node, fx.Node):
            return node
        if node not in self._values:  # token numbers, when they are first read
            self._values[node] = self.add(
                aten.transpose.int, (self._made["user", node], 0, 1), f"{node.name}_sb"
            )
        return self._values[node]

    def restore(self, node: Any) -> Any:
        """What stands for a value, in the user's order."""
        if not isinstance(node, fx.Node) or not self.is_moved(node):
            return self.value(node)
        key = ("user", node)
        if key not in self._made:
            form, name = self.form(node), f"{node.name}_bs"
            (at, merged), (batch, sequence) = form.pair or (0, False), form.rows
            rows = (sequence, batch) if merged else None
            self._made[key] = self._exchange(self.value(node), form.arrange(form.shape), at, rows, name)
        return self._made[key]

    def fit(self, node: Any, out: Form) -> Any:
        """What stands for an argument of an operator whose result has form `out`: broadcast against that."""
        if not isinstance(node, fx.Node) or node not in self.forms or not out.moved or out.pair is None:
            return self.restore(node)
        form, (at, merged) = self.form(node), out.pair
        at -= len(out.dims) - len(form.dims)
        if form.moved and form.pair == (at, merged) and (not merged or form.rows == out.rows):
            return self.value(node)
        shape = form.shape
        end = at if merged else at + 1
        if end < 0 or all(size == 1 for size in shape[max(at, 0) : end + 1]):
            return self.restore(node)
        key = ("fit", node, at, out.rows if merged else None)
        if key not in self._made:
            source, name = self.restore(node), f"{node.name}_sb"
            if at < 0:
                self._made[key] = self.add(aten.unsqueeze.default, (source, 1), name)
            else:
                self._made[key] = self._exchange(source, shape, at, out.rows if merged else None, name)
        return self._made[key]

    # What rules write

    def write(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None, target: Any = None
    ) -> fx.Node:
        """The operator that is being rewritten, on new arguments."""
        node = self._current
        new = self.graph.create_node(
            "call_function", target or node.target, args, dict(kwargs or {}), name=node.name
        )
        new.meta = dict(node.meta)
        new.meta["val"] = self.strides.visit(new)
        return new

    def undo(self, node: fx.Node, args: tuple[Any, ...], target: Any = None) -> fx.Node:
        """The operator `node` on arguments in the user's order; of an unfamiliar operator, in memory too."""
        name = called(node)
        if any(map(self.is_moved, node.all_input_nodes)):
            self.undone[name] += 1
        read = self.restore if name.startswith(("aten.", "kernels.", "_operator.")) else self._restore_memory
        return self.write(fx.map_arg(args, read), fx.map_arg(node.kwargs, read), target)

    def _restore_memory(self, node: fx.Node) -> fx.Node:
        value, val = self.restore(node), node.meta["val"]
        if isinstance(val, torch.Tensor) and val.is_contiguous() and not value.meta["val"].is_contiguous():
            made: fx.Node = self.add(aten.contiguous.default, (value,), f"{node.name}_dense")
            return made
        return value  # type: ignore[no-any-return]

    def add(self, target: Any, args: tuple[Any, ...], name: str) -> fx.Node:
        """A further operator in front of, or behind, the one that is being rewritten."""
        new = self.graph.create_node("call_function", target, args, {}, name=name)
        new.meta = {key: self._current.meta.get(key, "") for key in ("path", "line")}
        new.meta["val"] = None
        new.meta["val"] = self.strides.visit(new)
        return new

    def permute(self, value: fx.Node, order: Sequence[int], name: str) -> fx.Node:
        """`value` with its dimensions in another order; itself where that changes nothing."""
        changed = [d for d, source in enumerate(order) if d != source]
        if not changed:
            return value
        if len(changed) == 2:
            return self.add(aten.transpose.int, (value, *changed), name)
        return self.add(aten.permute.default, (value, list(order)), name)

    def _exchange(
        self, value: fx.Node, shape: list[int], at: int, rows: tuple[int, int] | None, name: str
    ) -> fx.Node:
        """`value`, of `shape`, with dimensions `at` and the next exchanged, or the two that `at` merges (`rows`)."""
        if rows is None:
            return self.permute(value, _swapped(len(shape), at), name)
        opened = [*shape[:at], *rows, shape[at] // prod(rows), *shape[at + 1 :]]
        value = self.add(aten.reshape.default, (value, opened), f"{name}_rows")
        value = self.permute(value, _swapped(len(opened), at), f"{name}_swapped")
        return self.add(aten.reshape.default, (value, shape), name)

    # The walk

    def _enter(self, node: fx.Node) -> None:
        """Take over an input or a parameter."""
        new = self.graph.node_copy(node)
        new.meta = dict(node.meta)
        self.strides.visit(new)
        if node.op == "placeholder" and str(node.target) in self.tokens:
            batch, sequence = self.tokens[str(node.target)]
            self.forms[node] = Form((((BATCH, batch),), ((SEQUENCE, sequence),)), moved=True)
            self._made["user", node] = new
            return
        self._values[node] = new
        if isinstance(node.meta["val"], torch.Tensor):
            self.forms[node] = plain_form(node.meta["val"].shape)

    def _rewrite(self, node: fx.Node) -> None:
        rule = RULES.get(operator_name(node.target))
        pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
        if rule is None and pointwise and isinstance(node.meta["val"], torch.Tensor):
            rule = elementwise
        written = rule(self, node) if rule is not None else None
        if written is None:
            written = self.undo(node, node.args), _plain(node.meta["val"])
        new, found = written
        self._values[node], self.forms[node] = new, found
        forms: Any = found if isinstance(found, tuple) else (found,)
        before, after = (v if isinstance(found, tuple) else (v,) for v in (node.meta["val"], new.meta["val"]))
        for form, old, val in zip(forms, before, after, strict=True):
            assert form.shape == list(old.shape), f"{node}: {form.dims} is not {list(old.shape)}"
            assert form.arrange(form.shape) == list(val.shape), f"{node}: {form} is not {list(val.shape)}"
            self.moved += form.moved and val.is_floating_point()


def _swapped(rank: int, at: int) -> list[int]:
    order = list(range(rank))
    order[at], order[at + 1] = at + 1, at
    return order


def _plain(val: Any) -> Found:
    several = isinstance(val, (tuple, list))
    return tuple(plain_form(v.shape) for v in val) if several else plain_form(val.shape)
