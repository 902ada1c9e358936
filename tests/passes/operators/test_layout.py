"""The order of dimensions: where batch and sequence are, by the axes of a value."""

from __future__ import annotations

from math import prod

import pytest
import torch
from torch import fx

from autoptd.passes.operators.axes import Axes, Axis, product
from autoptd.passes.operators.axis_map import AxisMap
from autoptd.passes.operators.layout import DimOrder, LayoutWriter

SIZES = {"b": 2, "s": 3, "h": 12}


@pytest.mark.parametrize(
    ("dims", "pair"),
    [
        ("b s h", (-3, False)),
        ("h b s", (-2, False)),
        ("bs h", (-2, True)),
        ("bsh", (-1, True)),
        ("b h s", None),
        ("s b h", None),
        ("b sh", None),
        ("bh s", None),
        ("h", None),
    ],
)
def test_batch_and_sequence_pairs_that_may_be_exchanged(dims: str, pair: tuple[int, bool] | None) -> None:
    axes = {name: Axis(size) for name, size in SIZES.items()}
    graph = fx.Graph()
    tokens, value = graph.placeholder("tokens"), graph.placeholder("value")
    shape = tuple(prod(SIZES[name] for name in dim) for dim in dims.split())
    value.meta["val"] = torch.empty(shape)
    found: dict[fx.Node, tuple[Axes, ...]] = {
        tokens: ((axes["b"], axes["s"]),),
        value: (tuple(product([axes[name] for name in dim]) for dim in dims.split()),),
    }
    axis_map = AxisMap(1, axes=found, inputs=[tokens])
    order = LayoutWriter(lambda node: None, axis_map, [tokens]).order(value)
    assert order == DimOrder(shape, pair, (2, 3) if pair else (1, 1))


def test_permutation_of_the_transposed() -> None:
    order = DimOrder((12, 2, 3), (-2, False), (2, 3), transposed=True)
    assert order.permutation == [0, 2, 1]
    assert order.arranged == [12, 3, 2]
    assert [order.place(d) for d in (0, 1, 2, -1)] == [0, 2, 1, 1]
    assert [order.holds(d) for d in (0, 1, -1)] == [False, True, True]
    assert DimOrder((6, 12), (-2, True), (2, 3), transposed=True).permutation == [0, 1]
