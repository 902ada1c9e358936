"""Copies counted from strides: what a CPU would have to move before it can compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from autoptd.passes.ir.nodes import NodeInfo, describe
from autoptd.passes.layout.copies import Strides, find_copies
from autoptd.runtime import aten
from autoptd.runtime.program.mesh import Mesh

ONE = Mesh(1, 1, 1)
B, S, A, SIZE = 2, 4, 3, 5
Made = Callable[[Any, fx.Node], Any]


def graph_of(make: Made, dtype: torch.dtype = torch.float32) -> fx.Graph:
    """A graph of [s, b, heads * size], and what `make` appends to it."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    describe(x, torch.empty(S, B, A * SIZE, dtype=dtype, device="meta"), NodeInfo())

    def call(target: Any, *args: Any) -> fx.Node:
        node = graph.call_function(target, args)
        describe(node, target(*fx.map_arg(args, lambda n: n.meta["val"])), NodeInfo())
        return node

    describe(graph.output(make(call, x)), None, NodeInfo())
    return graph


def heads(call: Any, x: fx.Node) -> fx.Node:
    """[b, heads, s, size], a view."""
    node: fx.Node = call(aten.permute.default, call(aten.reshape.default, x, [S, B, A, SIZE]), [1, 2, 0, 3])
    return node


def attend(call: Any, q: fx.Node) -> fx.Node:
    node: fx.Node = call(aten.scaled_dot_product_attention.default, q, q, q)
    return node


def back(call: Any, y: fx.Node) -> fx.Node:
    node: fx.Node = call(aten.reshape.default, call(aten.permute.default, y, [2, 0, 1, 3]), [S, B, A * SIZE])
    return node


WHOLE = 4 * S * B * A * SIZE
SQUARE = 4 * B * A * S * S


@pytest.mark.parametrize(
    ("make", "copied"),
    [
        (heads, 0),
        (lambda c, x: c(aten.reshape.default, heads(c, x), [B * A, S, SIZE]), 0),
        (lambda c, x: c(aten.reshape.default, heads(c, x), [B, A, S * SIZE]), WHOLE),
        (lambda c, x: back(c, attend(c, heads(c, x))), 0),
        (lambda c, x: back(c, attend(c, c(aten.contiguous.default, heads(c, x)))), 2 * WHOLE),
        (lambda c, x: c(aten.contiguous.default, x), 0),
        (lambda c, x: c(aten.contiguous.default, c(aten.transpose.int, x, 0, 1)), WHOLE),
        (lambda c, x: c(aten.matmul.default, heads(c, x), c(aten.transpose.int, heads(c, x), 2, 3)), 0),
        (lambda c, x: c(aten.matmul.default, x, c(aten.select.int, c(aten.select.int, x, 0, 0), 0, 0)), 0),
        (
            lambda c, x: c(
                aten.matmul.default,
                c(aten.transpose.int, x, 0, 1),
                c(aten.select.int, c(aten.select.int, x, 0, 0), 0, 0),
            ),
            WHOLE,
        ),
        (
            lambda c, x: c(
                aten.matmul.default,
                c(aten.select.int, c(aten.select.int, x, 0, 0), 0, 0),
                c(aten.transpose.int, x, 1, 2),
            ),
            0,
        ),
        (lambda c, x: c(aten.softmax.int, c(aten.transpose.int, x, 0, 1), -1), WHOLE),
        (lambda c, x: c(aten.add.Tensor, c(aten.transpose.int, x, 0, 1), 1), 0),
        (lambda c, x: c(aten.cat.default, [x, x], 0), 0),
    ],
)
def test_copied_bytes_follow_from_strides(make: Made, copied: int) -> None:
    assert sum(find_copies(graph_of(make), Strides(ONE)).values()) == copied


def test_packed_heads_of_several_sequences_are_no_batch() -> None:
    """Parts of one packed projection are no even steps apart, and a product copies both of its operands."""

    def packed(call: Any, x: fx.Node) -> fx.Node:
        half = [call(aten.slice.Tensor, x, 2, start, start + 6) for start in (0, 6)]
        q, k = (call(aten.permute.default, call(aten.reshape.default, y, [S, B, 2, 3]), [1, 2, 0, 3]) for y in half)
        node: fx.Node = call(aten.matmul.default, q, call(aten.transpose.int, k, 2, 3))
        return node

    graph = graph_of(packed)
    ((node, copied),) = find_copies(graph, Strides(ONE)).items()
    assert node.target is aten.matmul.default
    assert copied == 2 * 4 * S * B * 6


def test_integers_do_not_count() -> None:
    def flat(call: Any, x: fx.Node) -> fx.Node:
        node: fx.Node = call(aten.reshape.default, call(aten.transpose.int, x, 0, 1), [-1])
        return node

    assert sum(find_copies(graph_of(flat, torch.int64), Strides(ONE)).values()) == 0
    assert sum(find_copies(graph_of(flat), Strides(ONE)).values()) == WHOLE


def test_operators_without_meta_kernels_keep_what_capture_saw() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    describe(x, torch.empty(3, device="meta"), NodeInfo())

    def refuse(x: Tensor) -> Tensor:
        raise NotImplementedError("no meta kernel")

    node = graph.call_function(refuse, (x,))
    describe(node, torch.empty(5, device="meta"), NodeInfo())
    describe(graph.output(node), None, NodeInfo())
    assert sum(find_copies(graph, Strides(ONE)).values()) == 0
