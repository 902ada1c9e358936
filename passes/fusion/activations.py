"""Recognise activations that a model writes out, in any form, by computing them.

A chain of analytic operators on one value is evaluated in float64 beside each known activation, over its bulk and its
tails; if the two agree to the last bits, it is that activation. Piecewise operators never enter a chain, so agreement
at the points is agreement between them. Our kernels take the sqrt(2 / pi) of a tanh-GELU as the chain rounds it.
"""

import math
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional

from autoptd.passes.fusion.patterns import Call, Match, alike, split_bias
from autoptd.passes.ir.nodes import shape_of
from autoptd.runtime import aten, kernels
from autoptd.runtime.kernels.activation import SQRT_2_OVER_PI

ANALYTIC = {
    *(aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.neg.default),
    *(aten.pow.Tensor_Scalar, aten.square.default, aten.exp.default),
    *(aten.tanh.default, aten.sigmoid.default, aten.erf.default),
}
LONGEST = 12  # operators of a chain; BLOOM's tanh-GELU has ten
SPANS = ((6, 2001), (40, 400))  # each to either side of 0, with so many points
POINTS = torch.cat([torch.linspace(-x, x, n, dtype=torch.float64, device="cpu") for x, n in SPANS])
KNOWN: tuple[tuple[Any, dict[str, Any], Callable[[Tensor], Tensor]], ...] = (
    (aten.silu.default, {}, functional.silu),
    (aten.gelu.default, {}, functional.gelu),
    (aten.gelu.default, {"approximate": "tanh"}, partial(functional.gelu, approximate="tanh")),
)


def match_activation(node: fx.Node) -> Match | None:
    """Match the written-out activation that ends in `node`."""
    if not node.meta["val"].is_floating_point():
        return None
    for source, members in _chains(node):
        target, kwargs = _recognize(tuple(_signature(source, members)))
        if target is not None and target is not kernels.bias_gelu:
            return Match(Call(target, (source,), node, kwargs), members)
        biased = split_bias(source, members, of_linear=True) if target else None
        if biased is not None:
            x, bias, added = biased
            return Match(Call(target, (x, bias), node, kwargs), (*members, *added))
    return None


def _chains(end: fx.Node) -> Iterator[tuple[fx.Node, list[fx.Node]]]:
    """Yield each value that `end` is a function of alone, nearest first, with the operators in between in order."""
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
    """Return whether the operator is elementwise on numbers and tensors of `end`'s shape and dtype."""
    same = all(shape_of(n) == shape_of(end) for n in node.all_input_nodes)
    return same and alike(node.meta["val"], end.meta["val"]) and not node.kwargs


def _signature(source: fx.Node, members: list[fx.Node]) -> Iterator[Any]:
    number = {source: 0, **{node: i + 1 for i, node in enumerate(members)}}
    for node in members:
        yield node.target, tuple(("node", number[a]) if isinstance(a, fx.Node) else a for a in node.args)


@cache
def _recognize(chain: tuple[Any, ...]) -> tuple[Any, dict[str, Any]]:
    """Return the operator and keywords of a chain; equal chains of repeated layers are computed once."""
    known, values = list(KNOWN), [POINTS]
    for target, args in chain:
        values.append(target(*(values[a[1]] if isinstance(a, tuple) else a for a in args)))
    bound = 8 * torch.finfo(torch.float64).eps * (POINTS.abs() + 1)
    # BLOOM's sqrt(2 / pi) has eight digits, transformers' fast GELU's ten: beyond the bound of torch's.
    for number in (a for _, args in chain for a in args if isinstance(a, float)):
        if math.isclose(number, SQRT_2_OVER_PI, rel_tol=1e-3):
            kwargs: Any = {"approximate": "tanh", "coefficient": number}
            rounded = partial(kernels.bias_gelu, bias=torch.zeros_like(POINTS), **kwargs)
            known.append((kernels.bias_gelu, kwargs, rounded))
    for target, kwargs, function in known:
        if bool(((values[-1] - function(POINTS)).abs() <= bound).all()):
            return target, kwargs
    return None, {}
