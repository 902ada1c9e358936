"""Operators that make tensors filled with one value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from autoptd.passes.ir.nodes import shape_of
from autoptd.passes.operators.axes import Axes, Axis
from autoptd.passes.operators.axis_map import AxisMap
from autoptd.passes.operators.record import OperatorRules
from autoptd.passes.operators.shares import WHOLE, Share, Shares
from autoptd.passes.operators.views import sized_local
from autoptd.runtime import aten


def _make_axes(axis_map: AxisMap, node: fx.Node) -> Axes:
    """The dimensions are whatever meets them."""
    return tuple(Axis(size) for size in shape_of(node))


def _make_placed(node: fx.Node, shares: Shares) -> Share:
    return WHOLE


_LIKE = OperatorRules(axes=_make_axes, local=sized_local(1), placed=_make_placed)

RULES: Mapping[Any, OperatorRules] = {
    **dict.fromkeys((aten.new_zeros, aten.new_ones, aten.new_full, aten.new_empty), _LIKE),
    **dict.fromkeys((aten.zeros, aten.ones, aten.full), OperatorRules(axes=_make_axes, local=sized_local(0))),
}
