"""What passes know about a node: one frozen record under one key."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from autoptd.loss import read_loss
from autoptd.passes.ir.nodes import NodeInfo, argument, arguments, change_info, describe, info, require_info
from autoptd.runtime import aten, kernels


def test_a_change_of_one_node_leaves_another_with_the_same_facts_alone() -> None:
    graph = fx.Graph()
    one, other = graph.placeholder("one"), graph.placeholder("other")
    describe(one, torch.empty(2), NodeInfo("h.0", "gpt.py:3", role="input"))
    other.meta = dict(one.meta)
    change_info(other, role="boundary", recompute="h0")
    assert info(one) == NodeInfo("h.0", "gpt.py:3", role="input")
    assert info(other) == NodeInfo("h.0", "gpt.py:3", role="boundary", recompute="h0")
    assert info(other).place == NodeInfo("h.0", "gpt.py:3")


def test_a_node_that_no_pass_described_is_found() -> None:
    graph = fx.Graph()
    describe(graph.placeholder("x"), None, NodeInfo())
    require_info(graph, "stage 0")
    left_out = graph.placeholder("left_out")
    with pytest.raises(ValueError, match=r"stage 0: nothing is known about .*left_out"):
        require_info(graph, "stage 0")
    with pytest.raises(KeyError):
        info(left_out)


def test_an_argument_is_read_alike_by_position_and_by_keyword_and_has_its_default() -> None:
    graph = fx.Graph()
    q, k, v = (graph.placeholder(name) for name in "qkv")
    sdpa = aten.scaled_dot_product_attention.default
    spread = graph.call_function(sdpa, (q, k, v, None, 0.0, True), {"scale": 0.5})
    short = graph.call_function(sdpa, (q, k, v), {"is_causal": True, "scale": 0.5})
    assert arguments(spread) == arguments(short)
    assert arguments(short)["attn_mask"] is None
    assert arguments(short)["enable_gqa"] is False
    softmax = [graph.call_function(kernels.scaled_softmax, *call) for call in (((q, k, v),), ((q, k), {"mask": v}))]
    assert [argument(node, "mask") for node in softmax] == [v, v]
    assert argument(softmax[0], "scale") == 1.0
    assert argument(short, "dim", "none") == "none"


def test_class_weights_of_a_loss_are_found_in_a_program_that_was_read_back() -> None:
    """There they stand by position: labels that are left out count as none, and so must a weight."""
    graph = fx.Graph()
    rank, logits, labels, weight = (graph.placeholder(name) for name in ("rank", "logits", "labels", "weight"))
    loss = graph.call_function(kernels.cross_entropy, (rank, logits, labels, 64, -100, "mean", None, weight))
    found = read_loss(loss)
    assert found is not None
    assert found.weighted
    assert found.rows == 64
