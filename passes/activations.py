"""Activations that a model writes out: found by computing them, whatever form they have.

A chain of analytic operators on one value is evaluated in float64 beside each known activation, over its
bulk and its tails; where the two agree to the last bits, it is that activation. What is piecewise never
enters a chain, so agreement at the points is agreement between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional

from autoptd.passes.calls import shape_of
from autoptd.passes.patterns import Call, Match
from autoptd.runtime import aten

ANALYTIC = frozenset(
    {
        aten.add.Tensor,
        aten.sub.Tensor,
        aten.mul.Tensor,
        aten.div.Tensor,
        aten.neg.default,
        aten.pow.Tensor_Scalar,
        aten.tanh.default,
        aten.sigmoid.default,
        aten.erf.default,
        aten.exp.default,
        aten.square.default,
    }
)
LONGEST = 12  # operators of a chain; BLOOM's tanh-GELU has ten
POINTS = torch.cat([torch.linspace(-6, 6, 2001), torch.linspace(-40, 40, 400)]).double()
KNOWN: tuple[tuple[Any, dict[str, Any], Callable[[Tensor], Tensor]], ...] = (
    (aten.gelu.default, {"approximate": "tanh"}, partial(functional.gelu, approximate="tanh")),
    (aten.gelu.default, {}, functional.gelu),
    (aten.silu.default, {}, functional.silu),
)


class ActivationJudge:
    """Says which activation a chain is; equal chains of repeated layers are computed once."""

    def __init__(self) -> None:
        self.verdicts: dict[Any, int | None] = {}

    def match(self, node: fx.Node) -> Match | None:
        """The written-out activation that ends in `node`, if there is one."""
        if node.target not in ANALYTIC or not node.meta["val"].is_floating_point():
            return None
        for source, members in _chains(node):
            key = tuple(_signature(source, members))
            if key not in self.verdicts:
                self.verdicts[key] = _recognize(source, members)
            verdict = self.verdicts[key]
            if verdict is not None:
                target, kwargs, _ = KNOWN[verdict]
                return Match(Call(target, (source,), node, kwargs), (node,), frozenset(members))
        return None


def _chains(end: fx.Node) -> Iterator[tuple[fx.Node, list[fx.Node]]]:
    """Each value that `end` is a function of alone, nearest first, with the operators in between in order."""
    members: list[fx.Node] = []
    frontier = {end}
    while frontier and len(members) <= LONGEST:
        node = max(frontier)  # the last in graph order
        if len(frontier) == 1 and node is not end:
            yield node, members[::-1]
        inside = node is end or all(user in members for user in node.users)
        if node.target not in ANALYTIC or not inside or not _is_elementwise(node, end):
            return
        frontier.remove(node)
        members.append(node)
        frontier.update(node.all_input_nodes)


def _is_elementwise(node: fx.Node, end: fx.Node) -> bool:
    """Whether the operator works element by element on tensors of `end`'s shape and dtype, and on numbers."""
    val, wanted = node.meta["val"], end.meta["val"]
    same = all(shape_of(n) == tuple(wanted.shape) for n in node.all_input_nodes)
    return bool(
        val.dtype == wanted.dtype and tuple(val.shape) == tuple(wanted.shape) and same and not node.kwargs
    )


def _signature(source: fx.Node, members: list[fx.Node]) -> Iterator[Any]:
    number = {source: 0, **{node: i + 1 for i, node in enumerate(members)}}
    for node in members:
        yield node.target, tuple(("node", number[a]) if isinstance(a, fx.Node) else a for a in node.args)


def _recognize(source: fx.Node, members: list[fx.Node]) -> int | None:
    values: dict[fx.Node, Tensor] = {source: POINTS}
    for node in members:
        args = fx.map_arg(node.args, values.__getitem__)
        values[node] = node.target(*args)  # type: ignore[operator]
    found = values[members[-1]]
    bound = (
        8 * torch.finfo(torch.float64).eps * (POINTS.abs() + 1)
    )  # BLOOM's 0.79788456 for sqrt(2 / pi) is beyond
    for index, (_, _, function) in enumerate(KNOWN):
        if bool(((found - function(POINTS)).abs() <= bound).all()):
            return index
    return None
