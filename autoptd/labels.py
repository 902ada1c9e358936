"""Which batch inputs are labels of a mean loss, and which of their elements it leaves out."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from autoptd.passes.calls import argument
from autoptd.passes.program import Program
from autoptd.passes.work import find_trained
from autoptd.runtime import aten, kernels
from autoptd.runtime.manifest import Input

# Operators that only move elements, or add constant ones.
MOVING = frozenset(
    [
        *("view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze"),
        *("transpose", "permute", "t", "contiguous", "clone", "alias", "detach", "to", "_to_copy"),
        *("slice", "narrow", "select", "pad", "constant_pad_nd"),
    ]
)
SIGNS = frozenset(["neg"])
SCALING = SIGNS | {"mul", "div"}


class Loss(NamedTuple):
    """A cross-entropy of labels: what it leaves out, and whether it is the mean over the others, all alike."""

    target: fx.Node
    ignored: int
    mean: bool
    weighted: bool


def describe_labels(program: Program) -> tuple[Input, ...]:
    """The inputs of `program`, labels with their loss's ``ignore_index`` and the leading elements that it skips.

    An input is marked where cross-entropies of the mean over unweighted labels read it, moved only, and leave out the
    same: a loss that is written out, or labels that are changed on their way, leave it as it is. It weighs where one
    such cross-entropy, at most scaled, is the whole loss.
    """
    whole = _find_whole_loss(program)
    marks: dict[str, tuple[int, int, bool]] = {}
    for name, places in _find_places(program).items():
        (node, place), *others = places
        if place is not None and all(other is not None and other[0] == place[0] for _, other in others):
            marks[name] = (*place, node is whole and not others)
    return tuple(
        replace(value, ignore_index=mark[0], skipped=mark[1], weighs=mark[2] and value.batch_dim is not None)
        if (mark := marks.get(value.name))
        else value
        for value in program.inputs
    )


def describe_means(program: Program, divided: Program) -> Iterator[str]:
    """What is said of a loss that is another one as the mean of microbatches' losses than over the whole batch.

    `divided` is the `program` before operators are fused.
    """
    if uncounted := tuple(dict.fromkeys((*find_uncounted(program), *find_counts(divided)))):
        yield (
            f"{' and '.join(uncounted)} comes to its loss changed, with class weights, or counted by the model for "
            "a mean of its own, so that which labels count is not known: a step's loss is the mean of the "
            "microbatches' losses, each of which counts alike. That is another one than over the whole batch where "
            "they have unequal counts; change labels in the data, before the call, and leave the mean to "
            "cross_entropy, which leaves out its ignore_index"
        )
    if is_sum(program):
        yield (
            "the loss is a sum over its batch, and a step's loss is the mean of the microbatches' losses over all "
            "replicas: their number times smaller than the sum over the whole batch, and the gradients with it. Return "
            "a mean, or scale the loss that the call returns"
        )


def find_uncounted(program: Program) -> tuple[str, ...]:
    """Inputs that come to the mean of a cross-entropy changed, or weighted: which of them count is not known."""
    places = _find_places(program, means=True)
    return tuple(name for name, found in places.items() if any(place is None for _, place in found))


def find_counts(program: Program) -> tuple[str, ...]:
    """Inputs that a count is made of, by which something trained is divided: a mean over them that is written out.

    Or multiplied, by what is one over the count.
    """
    found: dict[str, None] = {}
    for stage in program.stages:
        trained = find_trained(stage)
        for node in stage.graph.nodes:
            if node.target in (aten.div.Tensor, aten.mul.Tensor) and node in trained:
                counts = [x for x in node.all_input_nodes if not x.meta["val"].shape and x not in trained]
                for count in filter(_is_summed, counts):
                    found |= dict.fromkeys(name for name, _ in _sources(count))
    return tuple(found)


def is_sum(program: Program) -> bool:
    """Whether the loss is a sum over the microbatch, by which it grows: nothing divides it."""
    node = _find_whole_loss(program, SIGNS)
    if node is None:
        return False
    if getattr(node.target, "overloadpacket", None) is aten.sum:
        return not _holds_scalars(node.all_input_nodes[0])
    loss = _read_loss(node)
    return loss is not None and not loss.mean


def _holds_scalars(node: fx.Node) -> bool:
    """Whether `node` is one number, or put together from such, as losses of several kinds are."""
    joins = (aten.stack.default, aten.cat.default, aten.unsqueeze.default)
    joined = node.target in joins and all(map(_holds_scalars, node.all_input_nodes))
    return joined or node.meta["val"].dim() == 0


def _is_summed(count: fx.Node) -> bool:
    """Whether a sum is taken on the way to `count`, as of labels that are counted."""
    pending, seen = [count], {count}
    while pending:
        node = pending.pop()
        if getattr(node.target, "overloadpacket", None) in (aten.sum, aten.count_nonzero, aten.mean):
            return True
        fresh = [source for source in node.all_input_nodes if source not in seen]
        seen.update(fresh)
        pending += fresh
    return False


def _find_places(
    program: Program, *, means: bool = False
) -> dict[str, list[tuple[fx.Node, tuple[int, int] | None]]]:
    """The losses that each input comes to, or the `means` among them, with what `_place` says of it."""
    found: dict[str, list[tuple[fx.Node, tuple[int, int] | None]]] = {}
    for stage in program.stages:
        for node in stage.graph.nodes:
            loss = _read_loss(node)
            if loss is None or (means and not loss.mean):
                continue
            for name, source in _sources(loss.target):
                counts = loss.mean and not loss.weighted
                place = _place(source, loss.target, loss.ignored) if counts else None
                found.setdefault(name, []).append((node, place))
    return found


def _find_whole_loss(program: Program, scaling: Container[str] = SCALING) -> fx.Node | None:
    """The node that the model's loss is, but for factors by operators of `scaling`, casts and moves."""
    node: Any = next(n for n in program.stages[-1].graph.nodes if n.op == "output").args[0]
    while isinstance(node, fx.Node) and isinstance(node.target, OpOverload):
        name = node.target._schema.name.removeprefix("aten::")
        scaled = name in scaling and len(node.all_input_nodes) == 1
        if not scaled and name not in MOVING:
            break
        node = node.args[0]
    return node if isinstance(node, fx.Node) else None


def _read_loss(node: fx.Node) -> Loss | None:
    """The cross-entropy that `node` is; None for all else."""
    if node.target is kernels.cross_entropy:
        target, weight = node.args[2], None
        ignored, mean = (
            argument(node, 4, "ignore_index", -100),
            argument(node, 5, "reduction", "mean") == "mean",
        )
    elif node.target is aten.cross_entropy_loss.default or node.target is aten.nll_loss_nd.default:
        target, weight = node.args[1], argument(node, 2, "weight")
        ignored, mean = argument(node, 4, "ignore_index", -100), argument(node, 3, "reduction", 1) == 1
    else:
        return None
    return Loss(target, ignored, mean, weight is not None) if isinstance(target, fx.Node) else None


def _sources(target: fx.Node) -> Iterator[tuple[str, fx.Node]]:
    pending, seen = [target], {target}
    while pending:
        node = pending.pop()
        if node.meta.get("role") == "input":
            yield str(node.target), node
        fresh = [source for source in node.all_input_nodes if source not in seen]
        seen.update(fresh)
        pending += fresh


def _place(source: fx.Node, target: fx.Node, ignored: int) -> tuple[int, int] | None:
    """`ignored`, and how many elements at the begin of the labels' last dimension do not come to the loss."""
    shape = source.meta["val"].shape
    if not shape:
        return None
    # Every label another number, to see where each is in the target.
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
    """What `target` holds where `source` is `numbers`; None where more happens on the way than moving."""
    way = [target]
    while way[-1] is not source:
        node = way[-1]
        moving = (
            isinstance(node.target, OpOverload) and node.target._schema.name.removeprefix("aten::") in MOVING
        )
        if not moving or len(node.all_input_nodes) != 1:
            return None
        way.append(node.all_input_nodes[0])
    value: Any = numbers
    for node in reversed(way[:-1]):
        run: Any = node.target
        value = run(*(value if isinstance(x, fx.Node) else x for x in node.args), **node.kwargs)
    return value if isinstance(value, Tensor) else None
