"""Records of operators: each of ours has one, and none is missed in silence."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torch._ops import OpOverloadPacket

from autoptd.passes.cost.work import forward_work
from autoptd.passes.operators.record import OperatorRules
from autoptd.passes.operators.table import OPERATORS, rules_of
from autoptd.runtime import collectives, kernels

OURS = [
    *(getattr(kernels, name) for name in kernels.__all__),
    *(collectives.copy_to_tensor, collectives.reduce_from_tensor, collectives.take_own),
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


def test_a_function_of_ours_without_a_record_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(OPERATORS, kernels.bias_gelu)
    node = fx.Graph().call_function(kernels.bias_gelu)
    with pytest.raises(LookupError, match=r"activation\.bias_gelu has no record in autoptd/passes/operators"):
        forward_work(node)


def test_operators_of_torch_are_known_by_their_packets() -> None:
    packets = [key for key in OPERATORS if isinstance(key, OpOverloadPacket)]
    assert len(packets) > 200
    graph = fx.Graph()
    for packet in packets:
        for overload in packet.overloads():
            assert rules_of(graph.call_function(getattr(packet, overload))) is OPERATORS[packet]
    assert rules_of(graph.call_function(torch.ops.aten.histc.default)) == OperatorRules()
