"""The states of torch's optimizers are taken and given by name; what is not divided as its parameter is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoptd
from autoptd.runtime.checkpoint.optimizer_state import NamedOptimizer
from autoptd.runtime.program.tagged_json import decode_value

KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "Momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1)),
    "AdamW fused": lambda p: torch.optim.AdamW(p, fused=True),
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Adamax": torch.optim.Adamax,
    "Adagrad": torch.optim.Adagrad,
    "Adadelta": torch.optim.Adadelta,
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.5),
    "Rprop": torch.optim.Rprop,
    "ASGD": torch.optim.ASGD,
}


def make_names() -> dict[str, Tensor]:
    return {"a": nn.Parameter(torch.ones(3, 2)), "b": nn.Parameter(torch.ones(4)), "c": torch.ones(2)}


def step(names: dict[str, Tensor], optimizer: torch.optim.Optimizer, times: int) -> list[Tensor]:
    for turn in range(times):
        for name in ("a", "b"):
            names[name].grad = torch.full_like(names[name], 0.5 + turn)
        optimizer.step()
    return [names[name].detach().clone() for name in ("a", "b")]


@pytest.mark.parametrize("kind", KINDS)
def test_a_taken_state_goes_on(kind: str) -> None:
    names, others = make_names(), make_names()
    own = KINDS[kind]([{"params": [names["b"]]}, {"params": [names["a"]], "lr": 0.05}])
    new = KINDS[kind]([{"params": [others["b"]]}, {"params": [others["a"]], "lr": 1.0}])
    half = step(names, own, 3)
    named = NamedOptimizer(own, names)
    states, groups = copy.deepcopy((named.states(), named.groups()))
    assert [group.params for group in groups] == [("b",), ("a",)]
    target = NamedOptimizer(new, others)
    target.put(target.join(states), [decode_value(group.options, "") for group in groups])
    with torch.no_grad():
        for name, value in zip(("a", "b"), half, strict=True):
            others[name].copy_(value)
    for found, expected in zip(step(others, new, 3), step(names, own, 3), strict=True):
        assert torch.equal(found, expected)


def test_rows_of_adafactor_are_refused() -> None:
    names = make_names()
    optimizer = torch.optim.Adafactor([names["a"]])
    names["a"].grad = torch.ones(3, 2)
    optimizer.step()
    with pytest.raises(autoptd.CheckpointError, match=r"state 'row_var' of a has shape \[3, 1\].*leave optimizer="):
        NamedOptimizer(optimizer, names).states()


def test_a_foreign_parameter_is_refused() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(7))])
    with pytest.raises(autoptd.CheckpointError, match=r"shape \[7\] that is not of this model"):
        NamedOptimizer(optimizer, make_names()).states()
