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


def describe_labels(program: Program) -> tuple[Input, ...]:
    """The inputs of `program`, labels with their loss's ``ignore_index`` and the leading elements that it skips.

    An input is marked where one cross-entropy of the mean over unweighted labels reads it, moved only: a loss that is
    written out, or labels that are changed on their way, leave it as it is.
    """
    found: dict[str, list[tuple[int, int] | None]] = {}
    for stage in program.stages:
        for node in stage.graph.nodes:
            for target, ignored in _read_loss(node):
                for name, source in _sources(target):
                    found.setdefault(name, []).append(_place(source, target, ignored))
    marks = {name: places[0] for name, places in found.items() if len(places) == 1}
    return tuple(
        replace(value, ignore_index=mark[0], skipped=mark[1]) if (mark := marks.get(value.name)) else value
        for value in program.inputs
    )


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
