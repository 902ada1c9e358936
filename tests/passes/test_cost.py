"""Costs of nodes: FLOPs and bytes by the book, times in sensible proportion."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import fx

from autoptd.passes.cost import REFERENCE, node_bytes, node_flops, node_nanoseconds, transfer_nanoseconds
from autoptd.runtime import aten, collectives, kernels


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def call(target: Any, *args: Any, result: Any) -> fx.Node:
    """A node that calls `target`; tensors among `args` become placeholders, None the rank."""
    graph = fx.Graph()

    def place(value: Any) -> Any:
        if isinstance(value, list):
            return [place(item) for item in value]
        if not isinstance(value, torch.Tensor):
            return value
        node = graph.placeholder("x")
        node.meta["val"] = value
        return node

    rank = graph.placeholder("rank")
    rank.meta["role"] = "rank"
    node = graph.call_function(target, tuple(rank if a is None else place(a) for a in args))
    node.meta["val"] = result
    return node


X = tensor(2, 128, 64)
HEADS = tensor(2, 4, 128, 16)
SCORES = tensor(2, 4, 128, 128)


@pytest.mark.parametrize(
    ("node", "flops"),
    [
        (call(aten.linear.default, X, tensor(192, 64), result=tensor(2, 128, 192)), 2 * 256 * 64 * 192),
        (call(aten.mm.default, tensor(8, 64), tensor(64, 3), result=tensor(8, 3)), 2 * 8 * 64 * 3),
        (
            call(aten.addmm.default, tensor(3), tensor(8, 64), tensor(64, 3), result=tensor(8, 3)),
            2 * 8 * 64 * 3,
        ),
        (
            call(aten.bmm.default, tensor(5, 8, 64), tensor(5, 64, 3), result=tensor(5, 8, 3)),
            2 * 5 * 8 * 64 * 3,
        ),
        (
            call(aten.baddbmm.default, X, tensor(5, 8, 64), tensor(5, 64, 3), result=tensor(5, 8, 3)),
            2 * 5 * 8 * 64 * 3,
        ),
        (call(aten.matmul.default, X, tensor(64, 3), result=tensor(2, 128, 3)), 2 * 256 * 64 * 3),
        (
            call(aten.scaled_dot_product_attention.default, HEADS, HEADS, HEADS, result=HEADS),
            2 * (2 * 2 * 4 * 128 * 128 * 16),
        ),
        (call(kernels.scaled_softmax, None, SCORES, result=SCORES), 2 * 4 * 128 * 128),
        (
            call(aten.einsum.default, "bhqd,bhkd->bhqk", [HEADS, HEADS], result=tensor(2, 4, 128, 128)),
            2 * 2 * 4 * 128 * 128 * 16,
        ),
        (
            call(aten.einsum.default, "...h, fh -> ...f", [X, tensor(3, 64)], result=tensor(2, 128, 3)),
            2 * 256 * 64 * 3,
        ),
        (call(aten.gelu.default, X, result=X), 2 * 128 * 64),
        (call(aten.view.default, X, [256, 64], result=tensor(256, 64)), 0),
        (call(operator.getitem, X, 0, result=tensor(128, 64)), 0),
        (call(collectives.reduce_from_tensor, None, X, result=X), 0),
    ],
    ids=lambda value: str(value.target) if isinstance(value, fx.Node) else "",
)
def test_flops(node: fx.Node, flops: int) -> None:
    assert node_flops(node) == flops


def test_grouped_queries_cost_what_their_heads_cost() -> None:
    shared = tensor(2, 1, 128, 16)
    sdpa = aten.scaled_dot_product_attention.default
    assert node_flops(call(sdpa, HEADS, shared, shared, result=HEADS)) == node_flops(
        call(sdpa, HEADS, HEADS, HEADS, result=HEADS)
    )


def test_bytes_are_arguments_and_result() -> None:
    assert node_bytes(call(aten.add.Tensor, X, X, result=X)) == 3 * X.numel() * 2
    assert node_bytes(call(aten.transpose.int, X, 1, 2, result=X.transpose(1, 2))) == 0


def test_a_lookup_reads_only_its_rows() -> None:
    table, ids = tensor(50_000, 64), tensor(2, 128, dtype=torch.int64)
    assert node_bytes(call(aten.embedding.default, table, ids, result=X)) == 2 * X.numel() * 2
    # ... but its gradient is as large as the table.
    time = node_nanoseconds(call(kernels.embedding, None, table, ids, 50_000, result=X), tensor=1)
    assert time >= 3 * table.numel() * 2 / REFERENCE.memory * 1e9


def test_a_large_gemm_takes_three_times_its_forward() -> None:
    node = call(aten.linear.default, tensor(2048, 8192), tensor(8192, 8192), result=tensor(2048, 8192))
    assert node_nanoseconds(node, tensor=1) == pytest.approx(3 * 2 * 2048 * 8192**2 / 156e12 * 1e9, rel=1e-6)


def test_a_pointwise_operator_takes_its_memory_traffic() -> None:
    large = tensor(2048, 8192)
    node = call(aten.gelu.default, large, result=large)
    assert node_nanoseconds(node, tensor=1) == pytest.approx(5 * large.numel() * 2 / 1.5e12 * 1e9, rel=1e-3)


def test_collectives_cost_their_ring() -> None:
    large = tensor(2048, 8192)
    node = call(collectives.reduce_from_tensor, None, large, result=large)
    alone, eight = (node_nanoseconds(node, tensor=t) for t in (1, 8))
    assert eight - alone == pytest.approx(2 * 7 / 8 * large.numel() * 2 / 300e9 * 1e9, rel=1e-3)


def test_views_are_free_and_copies_are_not() -> None:
    assert node_nanoseconds(call(aten.to.dtype, X, torch.bfloat16, result=X), tensor=1) == 0
    assert node_nanoseconds(call(aten.to.dtype, X, torch.float32, result=X.float()), tensor=1) > 0
    assert node_nanoseconds(call(aten.split.Tensor, X, 32, 2, result=X.split(32, 2)), tensor=1) == 0
    assert node_nanoseconds(call(aten.contiguous.default, X, result=X), tensor=1) > 0
    assert node_nanoseconds(call(aten.relu.default, tensor(1), result=tensor(1)), tensor=1) >= 1


def test_an_undivided_tensor_is_scattered_over_the_links() -> None:
    def size(divided: bool, gradient: bool, t: int) -> int:
        return transfer_nanoseconds(tensor(2**24), divided=divided, gradient=gradient, tensor=t)

    assert size(True, True, 8) == 2 * size(True, False, 8)
    assert size(False, False, 1) == size(True, False, 8)
    assert size(False, False, 8) < 0.25 * size(False, False, 1)
