"""The batch inputs that are labels of a mean loss, and those that are row numbers of a table or classes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from autoptd.passes.ir.gradients import find_trained
from autoptd.passes.ir.node_info import info
from autoptd.passes.ir.nodes import argument, aten_name, shape_of, walk
from autoptd.passes.ir.program import Program
from autoptd.passes.normal_form.constant_masks import MaskJudge
from autoptd.passes.operators.record import Trait
from autoptd.passes.operators.table import has_trait, strip
from autoptd.runtime import aten, kernels
from autoptd.runtime.program.manifest import Input

MOVING = Trait.REARRANGES | Trait.TAKES | Trait.PADS  # moves elements, or adds constant ones
LINEAR = MOVING | Trait.SCALES | Trait.REPEATS | Trait.LINEAR  # in its argument
# The losses that read each input, each with the result of `_place`.
Places = dict[str, list[tuple[fx.Node, tuple[int, int] | None]]]


class Loss(NamedTuple):
    """A cross-entropy of labels: the label it ignores, and whether it is a mean over the others, and a weighted one."""

    target: fx.Node
    ignored: int
    mean: bool
    weighted: bool


class Lookup(NamedTuple):
    """A lookup of `rows` of a table, or a loss over `rows` classes, with the number that the loss ignores.

    `numbers` are the row numbers or labels; `source` is the table or the logits.
    """

    source: fx.Node
    numbers: fx.Node
    rows: int
    ignored: int | None


def describe_inputs(program: Program) -> tuple[Input, ...]:
    """Return the inputs of `program`, with the facts about labels and row numbers.

    Labels have the ``ignore_index`` of their loss and the number of leading elements that it skips: if only mean
    cross-entropies without class weights read them, through operators that only move elements, and all ignore the same
    elements. They weigh microbatches if one such cross-entropy, at most scaled, is the whole loss. Row numbers and
    labels, at most moved, have the number of `rows`, and `exempt` if all their readers are losses that ignore the same
    number.
    """
    inputs = {value.name: value for value in program.inputs}
    whole = strip(find_loss(program), MOVING | Trait.SCALES)
    for name, places in _find_places(program).items():
        (node, place), *others = places
        if place is not None and all(other is not None and other[0] == place[0] for _, other in others):
            weighs = node is whole and not others and inputs[name].batch_dim is not None
            inputs[name] = replace(inputs[name], ignore_index=place[0], skipped=place[1], weighs=weighs)
    found: dict[str, list[Lookup]] = {}
    for lookup in find_lookups(program):
        if info(number := strip(lookup.numbers, MOVING)).role == "input":
            found.setdefault(str(number.target), []).append(lookup)
    for name, lookups in found.items():
        if not inputs[name].dtype.is_floating_point:
            ignored = {lookup.ignored for lookup in lookups}
            exempt = ignored.pop() if len(ignored) == 1 else None
            rows = min(lookup.rows for lookup in lookups)
            inputs[name] = replace(inputs[name], rows=rows, exempt=exempt)
    return tuple(inputs.values())


def find_lookups(program: Program) -> Iterator[Lookup]:
    """Yield the lookups of rows and the losses over classes in a program."""
    for node in (node for stage in program.stages for node in stage.graph.nodes):
        args: Any = node.args
        ignored = argument(node, 4, "ignore_index", -100) if read_loss(node) else None
        if node.target in (kernels.embedding, kernels.cross_entropy):
            source, numbers, rows = args[1:4]
        elif node.target in (aten.embedding.default, aten.cross_entropy_loss.default):
            source, numbers = args[:2]
            rows = shape_of(source)[0 if ignored is None else 1]
        else:
            continue
        yield Lookup(source, numbers, rows, ignored)


def find_uncounted(program: Program) -> tuple[str, ...]:
    """Return the labels that reach a mean cross-entropy changed or weighted, so that it is unknown which count."""
    places = _find_places(program, means=True)
    return tuple(name for name, found in places.items() if any(place is None for _, place in found))


def find_counts(program: Program) -> tuple[str, ...]:
    """Return the inputs of a count that the loss is divided by, or multiplied by the inverse of.

    A division before a cross-entropy is no part of a mean, and does not count.
    """
    (stage,) = program.stages
    trained = find_trained(stage)

    def parts(node: fx.Node) -> list[fx.Node]:
        arguments = node.all_input_nodes if has_trait(node, LINEAR) else ()
        return [x for x in arguments if x in trained or not shape_of(x)]

    divisors = [divisor for node in walk([find_loss(program)], parts) for divisor in find_divisors(node)]
    counts = [x for x in divisors if isinstance(x, fx.Node) and x not in trained and not shape_of(x)]
    # A count of labels is computed with a sum.
    sums = ("sum", "count_nonzero", "mean")
    summed = (x for x in counts if any(aten_name(node.target) in sums for node in walk([x])))
    return tuple(dict.fromkeys(name for x in summed for name, _ in find_sources(x)))


def find_divisors(node: fx.Node) -> Sequence[Any]:
    """Return the divisors of `node`."""
    if aten_name(node.target) == "div":
        return node.args[1:2]
    exponent = node.args[1] if aten_name(node.target) == "pow" else None
    inverse = isinstance(exponent, (int, float)) and exponent < 0
    return node.args[:1] if inverse or aten_name(node.target) == "reciprocal" else ()


def _find_places(program: Program, *, means: bool = False) -> Places:
    """Return the losses that read each input, or only the `means` among them."""
    found: Places = {}
    for stage in program.stages:
        for node in stage.graph.nodes:
            loss = read_loss(node)
            # A mean over probabilities ignores no row.
            if loss is None or (means and not loss.mean) or loss.target.meta["val"].is_floating_point():
                continue
            for name, source in find_sources(loss.target):
                counts = loss.mean and not loss.weighted
                place = _place(source, loss.target, loss.ignored) if counts else None
                found.setdefault(name, []).append((node, place))
    return found


def find_loss(program: Program) -> fx.Node:
    """Return the value that the model returns."""
    loss = next(n for n in program.stages[-1].graph.nodes if n.op == "output").args[0]
    assert isinstance(loss, fx.Node)
    return loss


def read_loss(node: fx.Node) -> Loss | None:
    """Read a cross-entropy; return None for any other node."""
    ours = node.target is kernels.cross_entropy
    if not ours and node.target not in (aten.cross_entropy_loss.default, aten.nll_loss_nd.default):
        return None
    target, ignored = node.args[2 if ours else 1], argument(node, 4, "ignore_index", -100)
    mean = (
        argument(node, 5, "reduction", "mean") == "mean" if ours else argument(node, 3, "reduction", 1) == 1
    )
    weighted = not ours and argument(node, 2, "weight") is not None
    return Loss(target, ignored, mean, weighted) if isinstance(target, fx.Node) else None


def find_sources(target: fx.Node) -> Iterator[tuple[str, fx.Node]]:
    """Return the names and nodes of the inputs that `target` is computed from."""
    return ((str(node.target), node) for node in walk([target]) if info(node).role == "input")


def _place(source: fx.Node, target: fx.Node, ignored: int) -> tuple[int, int] | None:
    """Return `ignored` and the number of leading elements of the labels' last dimension that the loss does not read.

    None if the loss does not read each other element once.
    """
    shape = source.meta["val"].shape
    if not shape:
        return None
    # Distinct numbers for labels show where each one is in the target.
    numbers = torch.arange(shape.numel()).view(shape) + max(0, ignored + 1)
    moved = _move(source, target, numbers)
    if moved is None:
        return None
    kept = torch.isin(numbers, moved)
    skipped = int((~kept).reshape(-1, shape[-1])[0].sum())
    alike = torch.equal(kept, (torch.arange(shape[-1]) >= skipped).expand(shape))
    once = bool((moved != ignored).sum() == kept.sum())
    return (ignored, skipped) if alike and once else None


def _move(source: fx.Node, target: fx.Node, numbers: Tensor) -> Tensor | None:
    """Return the value of `target` where `source` is `numbers`, or None if more than moves lie between them."""
    judge, node = MaskJudge({}), target
    judge.values[source] = numbers
    while node is not source:
        if not has_trait(node, MOVING) or len(node.all_input_nodes) != 1:
            return None
        (node,) = node.all_input_nodes
    return judge.value(target)  # type: ignore[no-any-return]
