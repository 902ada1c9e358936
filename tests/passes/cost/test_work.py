"""What operators compute, move and communicate, by the book."""

from __future__ import annotations

import operator
from collections import Counter
from typing import Any

import pytest
import torch
from torch import fx, nn

import autoptd
from autoptd.passes.cost.cluster import Cluster
from autoptd.passes.cost.work import Product, backward_work, forward_work
from autoptd.passes.ir.nodes import NodeInfo, describe
from autoptd.passes.operators.unfamiliar import bound_hidden
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
        describe(node, value, NodeInfo(role="boundary"))
        return node

    rank = graph.placeholder("rank")
    describe(rank, None, NodeInfo(role="rank"))
    node = graph.call_function(target, tuple(rank if a is None else place(a) for a in args))
    describe(node, result, NodeInfo())
    return node


X = tensor(2, 128, 64)
HEADS = tensor(2, 4, 128, 16)
SCORES = tensor(2, 4, 128, 128)
IMAGE = tensor(2, 3, 16, 16)
ROWS = tensor(8, 64)
SQUARE = tensor(8, 8, dtype=torch.float32)
OFFSETS = tensor(5, dtype=torch.int32)

LIBRARY = torch.library.Library("losses_test", "FRAGMENT")
LIBRARY.define("hidden(Tensor x, Tensor y) -> Tensor")
torch.library.impl(LIBRARY, "hidden", "Meta")(lambda x, y: x.new_empty(len(x), y.shape[1]))


@pytest.mark.parametrize(
    ("node", "flops"),
    [
        (call(aten.linear.default, X, tensor(192, 64), result=tensor(2, 128, 192)), 2 * 256 * 64 * 192),
        (call(aten.mm.default, tensor(8, 64), tensor(64, 3), result=tensor(8, 3)), 2 * 8 * 64 * 3),
        (call(aten.addmm.default, tensor(3), tensor(8, 64), tensor(64, 3), result=tensor(8, 3)), 2 * 8 * 64 * 3),
        (call(aten.bmm.default, tensor(5, 8, 64), tensor(5, 64, 3), result=tensor(5, 8, 3)), 2 * 5 * 8 * 64 * 3),
        (call(aten.baddbmm.default, X, tensor(5, 8, 64), tensor(5, 64, 3), result=tensor(5, 8, 3)), 2 * 5 * 8 * 64 * 3),
        (call(aten.matmul.default, X, tensor(64, 3), result=tensor(2, 128, 3)), 2 * 256 * 64 * 3),
        (
            call(aten.scaled_dot_product_attention.default, HEADS, HEADS, HEADS, result=HEADS),
            2 * (2 * 2 * 4 * 128 * 128 * 16) + 2 * 4 * 128 * 128,
        ),
        (call(kernels.scaled_softmax, None, SCORES, result=SCORES), 2 * 4 * 128 * 128),
        (
            call(aten.einsum.default, "bhqd,bhkd->bhqk", [HEADS, HEADS], result=tensor(2, 4, 128, 128)),
            2 * 2 * 4 * 128 * 128 * 16,
        ),
        (  # e is summed first
            call(aten.einsum.default, "bsh,ehf->bsf", [X, tensor(5, 64, 3)], result=tensor(2, 128, 3)),
            2 * 256 * 64 * 3,
        ),
        (
            call(torch.ops.losses_test.hidden.default, ROWS, tensor(64, 3), result=tensor(8, 3)),
            8 * 64,  # elementwise
        ),
        # Products that torch's own counter finds; and an element each.
        (call(aten.linalg_multi_dot.default, [ROWS, ROWS.t(), ROWS], result=ROWS), 2 * (2 * 8 * 64 * 8) + 8 * 64),
        (
            call(aten.einsum.default, "...h, fh -> ...f", [X, tensor(3, 64)], result=tensor(2, 128, 3)),
            2 * 256 * 64 * 3 + 256 * 64,
        ),
        (
            call(aten.conv2d.default, IMAGE, tensor(8, 3, 4, 4), None, [4, 4], result=tensor(2, 8, 4, 4)),
            2 * (2 * 4 * 4) * 8 * (3 * 4 * 4) + 2 * 3 * 16 * 16,
        ),
        (
            call(
                aten.conv2d.padding,
                IMAGE[0],
                tensor(6, 1, 5, 5),
                None,
                [1, 1],
                "same",
                [1, 1],
                3,
                result=tensor(6, 16, 16),
            ),
            2 * (16 * 16) * 6 * (1 * 5 * 5) + 6 * 16 * 16,
        ),
        (
            call(aten.conv_transpose1d.default, tensor(2, 64, 9), tensor(64, 32, 3), result=tensor(2, 32, 11)),
            2 * (2 * 9) * 64 * (32 * 3) + 64 * 32 * 3,
        ),
        (call(aten.gelu.default, X, result=X), 2 * 128 * 64),
        (call(aten.view.default, X, [256, 64], result=tensor(256, 64)), 0),
        (call(operator.getitem, X, 0, result=tensor(128, 64)), 0),
        (call(collectives.reduce_from_tensor, None, X, result=X), 0),
    ],
    ids=lambda value: getattr(value.target, "__name__", "") if isinstance(value, fx.Node) else "",
)
def test_flops(node: fx.Node, flops: int) -> None:
    assert forward_work(node).flops == pytest.approx(flops, rel=1e-12)


@pytest.mark.parametrize(
    ("node", "flops"),
    [
        (call(torch.ops.losses_test.hidden.default, ROWS, tensor(64, 3), result=tensor(8, 3)), 2 * 8 * 64 * 3),
        (call(aten.linalg_inv.default, SQUARE, result=SQUARE), 2 * 8 * 8 * 8),
        (call(aten.mv.default, ROWS, tensor(64), result=tensor(8)), 2 * 8 * 64),
        (call(aten.cdist.default, ROWS, tensor(6, 64), result=tensor(8, 6)), 2 * 8 * 6 * 64),
        (call(aten.linalg_multi_dot.default, [ROWS, ROWS.t(), ROWS], result=ROWS), 0),  # which is counted
        (call(aten.logaddexp.default, ROWS, ROWS, result=ROWS), 0),
        (call(aten.topk.default, ROWS, 2, result=(tensor(8, 2), tensor(8, 2, dtype=torch.int64))), 0),
        (call(aten.index_add.default, ROWS, 0, OFFSETS, tensor(5, 64), result=ROWS), 0),
    ],
    ids=lambda value: getattr(value.target, "__name__", "") if isinstance(value, fx.Node) else "",
)
def test_a_product_that_no_rule_counts_has_a_bound(node: fx.Node, flops: int) -> None:
    assert bound_hidden(node) == flops


def test_grouped_queries_cost_what_their_heads_cost() -> None:
    shared = tensor(2, 1, 128, 16)
    sdpa = aten.scaled_dot_product_attention.default
    grouped = forward_work(call(sdpa, HEADS, shared, shared, result=HEADS))
    assert grouped.products == forward_work(call(sdpa, HEADS, HEADS, HEADS, result=HEADS)).products


def test_bytes_are_arguments_and_result() -> None:
    assert forward_work(call(aten.add.Tensor, X, X, result=X)).moved == 3 * X.numel() * 2
    assert not forward_work(call(aten.transpose.int, X, 1, 2, result=X.transpose(1, 2)))


def test_a_lookup_reads_only_its_rows() -> None:
    table, ids = tensor(50_000, 64), tensor(2, 128, dtype=torch.int64)
    node = call(kernels.embedding, None, table, ids, 50_000, result=X)
    assert forward_work(node).moved == 4 * X.numel() * 2 + ids.numel() * 8
    # ... but its gradient is as large as the table.
    assert backward_work(node).written >= table.numel() * 2


def test_the_backward_of_a_product_is_two_products() -> None:
    """[256, 64] by [64, 192]: the gradients of the input and of the weight, of as many FLOPs each."""
    node = call(aten.linear.default, X, tensor(192, 64), result=tensor(2, 128, 192))
    of_input, of_weight = Product(1, 256, 64, 192, dtype="bf16"), Product(1, 64, 192, 256, dtype="bf16")
    assert forward_work(node).products == (Product(1, 256, 192, 64, dtype="bf16"),)
    assert backward_work(node).products == (of_input, of_weight)
    assert backward_work(node, trained=[*node.all_input_nodes[1:], node]).products == (of_weight,)
    assert not backward_work(node, trained=[])


def test_fused_attention_multiplies_twice_forward_and_five_times_backward() -> None:
    """One of the five computes the scores again, which the paper's count does not have."""
    keys, values = tensor(2, 2, 64, 16), tensor(2, 2, 64, 8)
    sdpa = aten.scaled_dot_product_attention.default
    node = call(sdpa, HEADS, keys, values, result=tensor(2, 4, 128, 8))
    scores, context = 2 * 8 * 128 * 64 * 16, 2 * 8 * 128 * 64 * 8
    assert [p.flops for p in forward_work(node).products] == [scores, context]
    assert [p.flops for p in backward_work(node).products] == [scores, context, context, scores, scores]
    assert [p.repeated for p in backward_work(node).products] == [True, False, False, False, False]
    assert forward_work(node).written == 8 * 128 * (8 * 2 + 4)  # no scores; a statistic for each row


@pytest.mark.parametrize(
    ("heads", "length", "seconds", "bound"),
    [(128, 2048, 1.402e-3, 0.15), (32, 8192, 3.650e-3, 0.07), (8, 32768, 13.746e-3, 0.07)],
)
def test_causal_attention_takes_what_it_took_on_a_card(heads: int, length: int, seconds: float, bound: float) -> None:
    """On an H100 in bfloat16, forward and backward, head size 128: half the scores, and their exponentials."""
    device = Cluster.load("dgx-h100").device
    x = tensor(1, heads, length, 128)
    taken = []
    for causal in (True, False):
        node = call(aten.scaled_dot_product_attention.default, x, x, x, None, 0.0, causal, result=x)
        works = forward_work(node), backward_work(node)
        assert sum(p.flops for p in works[0].products) == 4 * heads * length**2 * 128  # SC21's count, in full
        taken.append(sum(device.seconds(work, "bf16") for work in works))
    assert taken[0] == pytest.approx(seconds, rel=bound)
    assert taken[0] < 0.6 * taken[1]


def test_gradients_of_several_readers_are_summed() -> None:
    def backward(readers: int) -> int:
        node = call(aten.gelu.default, X, result=X)
        for _ in range(readers):
            node.graph.call_function(aten.relu.default, (node,)).meta["val"] = X
        return int(backward_work(node).moved)

    assert backward(2) - backward(1) == backward(3) - backward(2) == 3 * X.numel() * 2


def test_a_sum_hands_its_gradient_on() -> None:
    assert not backward_work(call(aten.add.Tensor, X, X, result=X))
    biased = backward_work(call(aten.add.Tensor, X, tensor(64), result=X))
    assert (biased.read, biased.written) == (X.numel() * 2, 64 * 2)


def test_a_divided_region_reduces_in_one_direction() -> None:
    forward = call(collectives.reduce_from_tensor, None, X, result=X)
    backward = call(collectives.copy_to_tensor, None, X, result=X)
    assert [forward_work(forward).reduced, backward_work(forward).reduced] == [X.numel() * 2, 0]
    assert [forward_work(backward).reduced, backward_work(backward).reduced] == [0, X.numel() * 2]


def test_an_all_reduce_beside_the_gradients_of_weights() -> None:
    """What is beside it is work like the rest; all of it together is f's and its reader's, without a copy."""
    weight, bias = tensor(32, 64), tensor(32)
    made = tensor(*X.shape[:-1], 32)
    copy = call(collectives.copy_to_tensor, None, X, result=X)
    linear = call(aten.linear.default, X, weight, bias, result=made)
    joined = call(collectives.copied_linear, None, X, weight, bias, result=made)
    apart = backward_work(copy) + backward_work(linear)
    assert forward_work(joined) == forward_work(linear)
    work, size = backward_work(joined), X.numel() * 2
    assert Counter(work.products) == Counter(apart.products)
    assert (work.elementwise, work.reduced) == (apart.elementwise, size)
    assert (apart.moved - work.moved, apart.launches - work.launches) == (2 * size, 1)
    assert work.overlapped is not None
    assert [p.flops for p in work.overlapped.products] == [p.flops for p in work.products[1:]]
    assert work.overlapped.elementwise == made.numel()
    assert apart.overlapped is None


def test_several_linears_of_one_input_add_their_gradients_in_their_products() -> None:
    weights, made = [tensor(32, 64), tensor(16, 64)], (tensor(*X.shape[:-1], 32), tensor(*X.shape[:-1], 16))
    joined = call(collectives.copied_linears, None, X, weights, result=made)
    singles = [
        call(collectives.copied_linear, None, X, weight, result=result)
        for weight, result in zip(weights, made, strict=True)
    ]
    forward, backward = ([each(node) for node in (joined, *singles)] for each in (forward_work, backward_work))
    assert forward[0] == forward[1] + forward[2]
    assert Counter(backward[0].products) == Counter(backward[1].products + backward[2].products)
    assert backward[0].reduced == backward[1].reduced == X.numel() * 2
    assert backward[0].overlapped is not None
    assert len(backward[0].overlapped.products) == 2
    assert backward[0].read == backward[1].read + backward[2].read + X.numel() * 2  # the sum so far


class Mixture(nn.Module):
    """Four experts by torch's grouped product, a row to each in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 16), nn.Linear(16, 10, bias=False)
        self.experts = nn.Parameter(torch.randn(4, 16, 16))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        rows = self.embed(ids).flatten(0, 1).bfloat16()
        ends = torch.tensor([2, 4, 6, 8], dtype=torch.int32)
        for _ in range(3):
            rows = nn.functional.grouped_mm(rows, self.experts.bfloat16(), offs=ends)
        return nn.functional.cross_entropy(self.head(rows.float()), labels.flatten())


def test_experts_count_in_a_program() -> None:
    ids = torch.zeros(1, 8, dtype=torch.int64)
    program = autoptd.compile(Mixture(), (1, 1, 1), example_inputs={"ids": ids, "labels": ids})
    assert program.manifest.model_flops == 3 * 2 * 8 * 16 * (3 * 16 + 10)
