"""All-reduces of the backward that run beside the gradients of weights.

f (`collectives.copy_to_tensor`) sums the gradient of what a divided region reads. Autograd calls it when all readers
have done their backwards, and nothing is left to do meanwhile. Where these are linears, one operator stands for f and
them: its backward computes the gradient of x, posts the sum, computes the gradients of the weights, and waits. Works
on each stage as it is after fusion.
"""

import operator
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from autoptd.passes.fusion.patterns import alike, is_reshape
from autoptd.passes.ir.gradients import find_trained
from autoptd.passes.ir.names import rename_nodes
from autoptd.passes.ir.nodes import Propagation, argument, called, change_info, describe, info, shape_of, walk
from autoptd.passes.ir.products import MatrixProduct, read_product
from autoptd.passes.ir.program import Program, Stage, copy_graph
from autoptd.runtime import aten, collectives, kernels


def overlap_reductions(program: Program) -> Program:
    """Join every f with its readers, if they are linears with weights to train; the log says why others stay.

    Raises ValueError where what is written has another shape or dtype than what it stands for.
    """
    if program.mesh.tensor == 1:
        return program
    propagation = Propagation(program.mesh)
    left: Counter[str] = Counter()  # the reasons why others stay
    hidden = 0
    stages = []
    for stage in program.stages:
        made = _Rewriting(stage, propagation)
        for f in made.graph.find_nodes(op="call_function", target=collectives.copy_to_tensor):
            readers, reason = made.read(f)
            if reason:
                left[reason] += 1
            else:
                made.join(f, readers)
                hidden += 1
        stages.append(replace(stage, graph=rename_nodes(made.graph)))
    total = hidden + left.total()
    entry = f"overlap_reductions {hidden} of {total} all-reduces backward beside weight gradients"
    reasons = "; ".join(f"{count} {reason}" for reason, count in left.items())
    return program.replace_stages(tuple(stages), entry + (f", not: {reasons}" if reasons else ""))


class _Rewriting:
    """A stage's graph, rewritten f by f."""

    def __init__(self, stage: Stage, propagation: Propagation) -> None:
        self.graph = copy_graph(stage.graph)
        self._trained = find_trained(replace(stage, graph=self.graph))
        self._propagation = propagation

    def read(self, f: fx.Node) -> tuple[list[MatrixProduct], str]:
        """Return the readers of f, in graph order; or why it stays."""
        users = sorted(f.users)
        views = [user for user in users if is_reshape(user)]
        if views and views == users:
            if len({shape_of(view) for view in views}) > 1 or shape_of(views[0])[-1] != shape_of(f)[-1]:
                return [], f"read in other shapes by {called(views[0])}"
            users = sorted(user for view in views for user in view.users)
        found = []
        for user in users:
            reader = _read_linear(user)
            if reader is None or reader.x not in (f, *views):
                return [], f"read by {user.op if user.op == 'output' else called(user)}"
            # A parameter, or computed from parameters alone.
            if not all(n.op == "get_attr" or n.all_input_nodes for n in walk(reader.parameters)):
                return [], f"read by {called(user)}, whose weight depends on the batch"
            found.append(reader)
        if not any(reader.weight in self._trained for reader in found):
            return [], "with weights that are frozen"
        mixed = len({r.transposed for r in found}) > 1 or any(r.sections is not None for r in found)
        if len(found) > 1 and mixed:
            return [], f"read by linears of several kinds, {called(found[0].node)}"
        if len({info(reader.node).recompute for reader in found}) > 1:
            return [], "read inside and outside of what is recomputed"
        return found, ""

    def join(self, f: fx.Node, readers: Sequence[MatrixProduct]) -> None:
        """Write the operator where the first reader is, behind what its arguments need."""
        x: Any = f.args[1]
        first, source = readers[0].node, readers[0].x
        if source is not f:  # a view, whose like the other readers have too
            source.update_arg(0, x)
            x = source
        self._bring_before(first, (p for reader in readers for p in reader.parameters))
        rank = f.args[0]
        if len(readers) == 1:
            self._replace(first, self._write(first, *_single(rank, x, readers[0]), first))
        else:
            self._join_several(rank, x, readers)
        for node in (*f.users, f):
            if not node.users:
                self.graph.erase_node(node)

    def _join_several(self, rank: Any, x: fx.Node, readers: Sequence[MatrixProduct]) -> None:
        first = readers[0].node
        weights, biases = ([getattr(r, name) for r in readers] for name in ("weight", "bias"))
        options: dict[str, Any] = {"transposed": True} if readers[0].transposed else {}
        given = [biases] if any(bias is not None for bias in biases) else []
        placements = tuple(placement for reader in readers for placement in info(reader.node).placements)
        args = rank, x, weights, *given
        together = self._write(first, collectives.copied_linears, args, options, first, placement=placements)
        change_info(together, name=f"{first.name}_together")
        place, own = {"path": info(first).path, "line": info(first).line}, enumerate(r.node for r in readers)
        parts = [self._write(first, operator.getitem, (together, i), {}, node, **place) for i, node in own]
        for reader, part in zip(readers, parts, strict=True):
            if reader.node.target is kernels.linear_gelu:
                change_info(part, name=f"{reader.node.name}_linear")
                chosen = _approximation(reader)
                part = self._write(reader.node, aten.gelu.default, (part,), chosen, reader.node)
            self._replace(reader.node, part)

    def _write(
        self, place: fx.Node, target: Any, args: Any, kwargs: Any, like: fx.Node, **about: Any
    ) -> fx.Node:
        """Write a call before `place`, with the facts of `like` but for those in `about`."""
        with self.graph.inserting_before(place):
            made = self.graph.call_function(target, args, kwargs)
        describe(made, self._propagation.run(made), info(like), **about)
        return made

    def _replace(self, old: fx.Node, new: fx.Node) -> None:
        """Let `new` have the place and the name of `old`."""
        if not alike(new.meta["val"], old.meta["val"]):
            raise ValueError(f"{called(new)} gives {new.meta['val']} for {old}, expected {old.meta['val']}")
        change_info(new, name=old.name)
        old.replace_all_uses_with(new)
        self.graph.erase_node(old)

    def _bring_before(self, place: fx.Node, nodes: Iterable[fx.Node]) -> None:
        """Move `nodes`, and what they are computed from, before `place` where they are behind."""
        for node in nodes:
            if place < node:
                self._bring_before(place, node.all_input_nodes)
                place.prepend(node)


def _single(rank: Any, x: fx.Node, reader: MatrixProduct) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The operator for one reader, and its arguments."""
    options: dict[str, Any] = {"transposed": True} if reader.transposed else {}
    if reader.sections is not None:
        args = (rank, x, reader.weight, reader.bias, reader.sections)
        return collectives.copied_split_linear, args, options
    if reader.node.target is kernels.linear_gelu:
        options = _approximation(reader) | options
        return collectives.copied_linear_gelu, (rank, x, reader.weight, reader.bias), options
    given = [] if reader.bias is None else [reader.bias]
    return collectives.copied_linear, (rank, x, reader.weight, *given), options


def _approximation(reader: MatrixProduct) -> dict[str, Any]:
    """Of a GELU, as a keyword, where it is not the default."""
    chosen = argument(reader.node, 3, "approximate", "none")
    return {} if chosen == "none" else {"approximate": chosen}


def _read_linear(node: fx.Node) -> MatrixProduct | None:
    """The product that a call computes, if its weight is a matrix and its bias a vector, in the dtype of the result."""
    product = read_product(node)
    scaled = node.target is aten.addmm.default and (node.kwargs or len(node.args) != 3)
    if product is None or scaled or len(shape_of(product.x)) < 2:
        return None
    dtype, parameters = node.meta["val"].dtype, product.parameters
    fits = all(isinstance(p, fx.Node) and p.meta["val"].dtype == dtype for p in parameters)
    return product if fits and [len(shape_of(p)) for p in parameters] in ([2], [2, 1]) else None
