"""Plans for well-known models on 64 H100: the order of the answers is what experts choose, whatever the seconds."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import autoptd
from autoptd.planning.plan import Plan
from tests.autoptd.planning.test_compiled_plans import GROUPED, LARGE, from_config
from tests.marks import slow

LLAMA_8B = from_config("Llama", vocab_size=128256, num_hidden_layers=32, **GROUPED)
LLAMA_70B = from_config("Llama", vocab_size=128256, num_hidden_layers=80, **LARGE)
MIXTRAL = from_config("Mixtral", num_hidden_layers=32, **GROUPED)
LONG = 2**17


def plan(make: Callable[[], nn.Module], tokens: int, batch: int = 512, **options: Any) -> tuple[Plan, ...]:
    with torch.device("meta"):
        model = make().to(torch.bfloat16)
    ids = torch.zeros(1, tokens, dtype=torch.long)
    given: Any = {"example_inputs": {"input_ids": ids, "labels": ids}, "cluster": "dgx-h100"}
    return autoptd.plan(model, world_size=64, global_batch=batch, **given, **options)


@pytest.mark.parametrize(("tokens", "most"), [(4096, 1), slow(2048, 1), slow(8192, 2)])
def test_an_8b_is_data_parallel(tokens: int, most: int) -> None:
    """With the optimizer's states divided no pipeline is worth its bubble.

    What long sequences keep for the backward fits on two tensor ranks, which recomputes nothing.
    """
    best, *_ = plan(LLAMA_8B, tokens, zero=1)
    assert best.pipeline == 1
    assert best.tensor <= most
    assert best.recompute == "none"


@pytest.mark.parametrize("zero", [1, slow(0)])
def test_a_70b_has_four_or_eight_tensor_ranks(zero: int) -> None:
    best, *_ = plan(LLAMA_70B, 8192, zero=zero)
    assert best.tensor in (4, 8)
    assert best.pipeline > 1


def test_a_mixtures_experts_are_divided() -> None:
    """Over ranks of a node, and over more of them than attention is; plans simulated for comparison change nothing."""
    best, *_ = plan(MIXTRAL, 4096, zero=1)
    assert best.tensor < best.mesh.expert <= 8
    assert plan(MIXTRAL, 4096, zero=1, top=12)[0].step_seconds == best.step_seconds


def test_the_longest_sequences_say_what_is_missing() -> None:
    with pytest.raises(ValueError, match="no plan fits in memory") as refusal:
        plan(LLAMA_70B, LONG, batch=64, zero=1)
    assert "shorter sequences (there is no context parallelism here" in str(refusal.value)
    share = re.search(r"(\d+)% are weights", str(refusal.value))
    assert share is not None
    assert int(share[1]) < 10  # sequences, not states, are what does not fit
