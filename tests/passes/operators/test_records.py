"""Records of operators: each of ours has one."""

from __future__ import annotations

import torch
from torch import fx
from torch._ops import OpOverloadPacket

from autoptd.passes.operators.pointwise import POINTWISE
from autoptd.passes.operators.table import OPERATORS, rules_of
from autoptd.passes.operators.unfamiliar import UNFAMILIAR
from autoptd.runtime import collectives, kernels

OURS = [
    # An autograd function of the user's is its own operator, which the texts alone write as a call of ours.
    *(getattr(kernels, name) for name in kernels.__all__ if name != "autograd_function"),
    *(collectives.copy_to_tensor, collectives.reduce_from_tensor, collectives.take_own),
    *(collectives.reduce_scatter, collectives.gather_to_tensor, collectives.all_gather),
    collectives.scattered_linear,
    *(collectives.send_to_experts, collectives.return_from_experts),
    *collectives.COPIED,
]


def test_every_function_of_ours_has_a_record_with_its_place_in_the_proof() -> None:
    assert [function for function in OURS if OPERATORS[function].placed is None] == []
    public = {
        value
        for name, value in vars(collectives).items()
        if not name.startswith("_") and getattr(value, "__module__", "") == collectives.__name__
    }
    assert public <= set(OURS)


def test_operators_of_torch_are_known_by_their_packets() -> None:
    packets = [key for key in OPERATORS if isinstance(key, OpOverloadPacket)]
    assert len(packets) > 120
    graph = fx.Graph()
    for packet in packets:
        for overload in packet.overloads():
            assert rules_of(graph.call_function(getattr(packet, overload))) is OPERATORS[packet]
    assert rules_of(graph.call_function(torch.ops.aten.bincount.default)) is UNFAMILIAR
    for packet in (torch.ops.aten.logaddexp, torch.ops.aten.special_entr, torch.ops.aten.nextafter):
        assert rules_of(graph.call_function(packet.default)) is POINTWISE  # as torch tags them
    assert rules_of(graph.call_function(torch.ops.aten.frexp.Tensor)) is UNFAMILIAR  # two results
