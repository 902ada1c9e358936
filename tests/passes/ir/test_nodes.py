"""What passes know about a node: one frozen record under one key."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from autoptd.passes.ir.nodes import NodeInfo, change_info, describe, info, require_info


def test_a_change_of_one_node_leaves_another_with_the_same_facts_alone() -> None:
    graph = fx.Graph()
    one, other = graph.placeholder("one"), graph.placeholder("other")
    describe(one, torch.empty(2), NodeInfo("h.0", "gpt.py:3", role="input"))
    other.meta = dict(one.meta)
    change_info(other, role="boundary", recompute="h0")
    assert info(one) == NodeInfo("h.0", "gpt.py:3", role="input")
    assert info(other).at(NodeInfo("h.1")) == NodeInfo("h.1", role="boundary", recompute="h0")
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
