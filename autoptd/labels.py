"""Which batch inputs are labels of a mean loss, and which of their elements it leaves out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from autoptd.passes.calls import argument
from autoptd.passes.program import Program
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
SCALING = frozenset(["mul", "div"])


def describe_labels(program: Program) -> tuple[Input, ...]:
    """The inputs of `program`, labels with their loss's ``ignore_index`` and the leading elements that it skips.

    An input is marked where one cross-entropy of the mean over unweighted labels reads it, moved only: a loss that is
    written out, or labels that are changed on their way, leave it as it is. It weighs where that cross-entropy, at most
    scaled, is the whole loss.
    """
    found: dict[str, list[tuple[int, int, bool] | None]] = {}
    whole = _find_whole_loss(program)
    for stage in program.stages:
        for node in stage.graph.nodes:
            for target, ignored in _read_loss(node):
                for name, source in _sources(target):
                    place = _place(source, target, ignored)
                    found.setdefault(name, []).append(place and (*place, node is whole))
    marks = {name: places[0] for name, places in found.items() if len(places) == 1}
    return tuple(
        replace(value, ignore_index=mark[0], skipped=mark[1], weighs=mark[2] and value.batch_dim is not None)
        if (mark := marks.get(value.name))
        else value
        for value in program.inputs
    )


def _find_whole_loss(program: Program) -> fx.Node | None:
    """The node that the model's loss is, but for factors, casts and moves."""
    node: Any = next(n for n in program.stages[-1].graph.nodes if n.op == "output").args[0]
    while isinstance(node, fx.Node) and isinstance(node.target, OpOverload):
        name = node.target._schema.name.removeprefix("aten::")
        scaled = name in SCALING and not isinstance(node.args[1], fx.Node)
        if not scaled and name not in MOVING:
            break
        node = node.args[0]
    return node if isinstance(node, fx.Node) else None


def _read_loss(node: fx.Node) -> Iterator[tuple[fx.Node, int | None]]:
    """The target of a cross-entropy and what it leaves out; None where that says nothing of the labels' weights."""
    if node.target is kernels.cross_entropy:
        ignored, mean = (
            argument(node, 4, "ignore_index", -100),
            argument(node, 5, "reduction", "mean") == "mean",
        )
        target = node.args[2]
    elif node.target is aten.cross_entropy_loss.default:
        ignored, mean = argument(node, 4, "ignore_index", -100), argument(node, 3, "reduction", 1) == 1
        mean = mean and argument(node, 2, "weight") is None
        target = node.args[1]
    else:
        return
    if isinstance(target, fx.Node):
        yield target, ignored if mean else None


def _sources(target: fx.Node) -> Iterator[tuple[str, fx.Node]]:
    pending, seen = [target], {target}
    while pending:
        node = pending.pop()
        if node.meta.get("role") == "input":
            yield str(node.target), node
        fresh = [source for source in node.all_input_nodes if source not in seen]
        seen.update(fresh)
        pending += fresh


def _place(source: fx.Node, target: fx.Node, ignored: int | None) -> tuple[int, int] | None:
    """`ignored`, and how many elements at the begin of the labels' last dimension do not come to the loss."""
    shape = source.meta["val"].shape
    if ignored is None or not shape:
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
