"""What the loss counts: its labels, its classes, and whether the losses of microbatches may be averaged."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from autoptd.passes.ir.nodes import argument, aten_name, info, shape_of, walk
from autoptd.passes.ir.program import Program, find_trained, split_results
from autoptd.passes.normal_form.constant_masks import MaskJudge
from autoptd.passes.operators.table import Trait, has_trait, strip
from autoptd.runtime import aten, kernels
from autoptd.runtime.program.manifest import Input

MOVING = Trait.REARRANGES | Trait.TAKES | Trait.PADS  # moves elements, or adds constant ones
LINEAR = MOVING | Trait.SCALES | Trait.REPEATS | Trait.LINEAR  # in its argument


class Lookup(NamedTuple):
    """A lookup of `rows` of a table, or a cross-entropy over `rows` classes.

    `numbers` are the row numbers or labels; `source` is the table or the logits. A cross-entropy has the number that
    it ignores, and whether it is a mean over the others, and a weighted one.
    """

    node: fx.Node
    source: fx.Node
    numbers: fx.Node
    rows: int
    ignored: int | None = None
    mean: bool = False
    weighted: bool = False


def describe_inputs(program: Program) -> tuple[Input, ...]:
    """Return the inputs of `program`, with the facts about labels and row numbers.

    Labels have the ``ignore_index`` of their loss and the number of leading elements that it skips: if only mean
    cross-entropies without class weights read them, through operators that only move elements, and all ignore the same
    elements. They weigh microbatches if one such cross-entropy, at most scaled, is the whole loss. Row numbers and
    labels, at most moved, have the number of `rows`, and `exempt` if all readers are losses that ignore one number.
    """
    inputs = {value.name: value for value in program.inputs}
    whole = strip(find_loss(program), MOVING | Trait.SCALES)
    for name, places in _find_places(program).items():
        (loss, place), *others = places
        if place is not None and all(other is not None and other[0] == place[0] for _, other in others):
            weighs = loss.node is whole and not others and inputs[name].batch_dim is not None
            inputs[name] = replace(inputs[name], ignore_index=place[0], skipped=place[1], weighs=weighs)
    found: dict[str, list[Lookup]] = {}
    for lookup in find_lookups(program):
        if info(number := strip(lookup.numbers, MOVING)).role == "input":
            found.setdefault(str(number.target), []).append(lookup)
    for name, lookups in found.items():
        if not inputs[name].dtype.is_floating_point:
            ignored = {lookup.ignored for lookup in lookups}
            exempt = ignored.pop() if len(ignored) == 1 else None
            inputs[name] = replace(inputs[name], rows=min(lookup.rows for lookup in lookups), exempt=exempt)
    return tuple(inputs.values())


def find_lookups(program: Program) -> Iterator[Lookup]:
    """Yield the lookups of rows and the losses over classes in a program."""
    for node in (node for stage in program.stages for node in stage.graph.nodes):
        args: Any = node.args
        if (loss := read_loss(node)) is not None:
            yield loss
        elif node.target is kernels.embedding:
            yield Lookup(node, *args[1:4])
        elif node.target in (aten.embedding.default, kernels.lookup):
            yield Lookup(node, args[0], args[1], shape_of(args[0])[0])


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


def _find_places(program: Program) -> dict[str, list[tuple[Lookup, tuple[int, int] | None]]]:
    """Return the losses that read each input, each with the result of `_place`."""
    found: dict[str, list[tuple[Lookup, tuple[int, int] | None]]] = {}
    for loss in find_lookups(program):
        if loss.ignored is None or loss.numbers.meta["val"].is_floating_point():
            continue  # a mean over probabilities ignores no row
        for name, source in find_sources(loss.numbers):
            place = _place(source, loss.numbers, loss.ignored) if loss.mean and not loss.weighted else None
            found.setdefault(name, []).append((loss, place))
    return found


def find_loss(program: Program) -> fx.Node:
    """Return the loss that the model returns."""
    ((loss,), _) = split_results(program.stages[-1].graph)
    return loss


def read_loss(node: fx.Node) -> Lookup | None:
    """Read a cross-entropy; return None for any other node."""
    ours = node.target in (kernels.cross_entropy, kernels.nll_loss)
    if not ours and node.target not in (aten.cross_entropy_loss.default, aten.nll_loss_nd.default):
        return None
    args: Any = node.args[1:] if ours else node.args
    rows, ignored = args[2] if ours else shape_of(args[0])[:2][-1], argument(node, "ignore_index")
    mean, weighted = argument(node, "reduction") in ("mean", 1), argument(node, "weight") is not None
    return Lookup(node, args[0], args[1], rows, ignored, mean, weighted) if isinstance(args[1], fx.Node) else None


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


# Losses whose mean over microbatches differs from the loss of the whole batch. The graph tells sums of cross-entropies,
# and means over an unknown number of labels; of any other loss `verify` compares two microbatches with the plain model.


def describe_means(program: Program, divided: Program) -> Iterator[str]:
    """Yield a warning for a loss of which the mean over microbatches is known to differ from that of the whole batch.

    `divided` is the `program` before operators are fused.
    """
    # Labels that reach a mean cross-entropy changed or weighted.
    read = _find_places(program).items()
    changed = (name for name, by in read if any(loss.mean and place is None for loss, place in by))
    if uncounted := tuple(dict.fromkeys((*changed, *find_counts(divided)))):
        yield (
            f"{' and '.join(uncounted)} {'reach' if len(uncounted) > 1 else 'reaches'} the loss changed, with class "
            "weights, or in a count that the model divides by, so autoptd does not know which labels count: a step's "
            "loss is the plain mean of the microbatches' losses, not that of the whole batch where their numbers of "
            "labels differ. Change labels in the data, and let cross_entropy take the mean over those not ignored"
        )
    if is_sum(divided):
        yield (
            "the loss is a sum over its batch, and a step's loss is the mean of the losses of all microbatches and "
            "replicas: it and the gradients are smaller than the sum over the whole batch by their number. Return a "
            "mean, or scale the loss that the call returns"
        )


def is_sum(program: Program) -> bool:
    """Return whether the loss is the sum of a cross-entropy's rows, which grows with the microbatch."""
    node = find_loss(program)
    while len(node.all_input_nodes) == 1 and (has_trait(node, Trait.REARRANGES) or aten_name(node.target) == "sum"):
        (node,) = node.all_input_nodes
    loss = read_loss(node)
    return loss is not None and not loss.mean
