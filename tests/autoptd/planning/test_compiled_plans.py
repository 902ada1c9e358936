"""A plan is what compiling it gives: its time and memory are those of the program, for ten models on three clusters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import autoptd
from samples.gpt import GPT, GPTConfig
from tests.marks import slow_rows_but

CLOSE = 0.03  # of the program's time and memory, which the plan has from four layers and sums over all
WIDE: dict[str, Any] = {"hidden_size": 4096, "num_attention_heads": 32}
GROUPED: dict[str, Any] = {**WIDE, "num_key_value_heads": 8, "intermediate_size": 14336}
LARGE: dict[str, Any] = {
    **{"hidden_size": 8192, "num_attention_heads": 64},
    **{"num_key_value_heads": 8, "intermediate_size": 28672},
}


def from_config(name: str, **sizes: Any) -> Callable[[], nn.Module]:
    """A model of transformers in its published width, with few layers."""
    config = getattr(transformers, f"{name}Config")(**sizes)
    return lambda: getattr(transformers, f"{name}ForCausalLM")(config)


MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "Megatron GPT": lambda: GPT(GPTConfig(51200, 2048, 12, 48, 6144, 0.1)),
    "GPT-2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=1600, n_layer=24, n_head=25)),
    "Llama-3 8B": from_config("Llama", vocab_size=128256, num_hidden_layers=16, **GROUPED),
    "Llama-3 70B": from_config("Llama", vocab_size=128256, num_hidden_layers=12, **LARGE),
    "Mistral": from_config("Mistral", num_hidden_layers=20, **GROUPED),
    "Mixtral": from_config("Mixtral", num_hidden_layers=20, **GROUPED),
    "Qwen2": from_config("Qwen2", num_hidden_layers=9, **GROUPED),
    "Gemma": from_config("Gemma", num_hidden_layers=18, hidden_size=2048, num_attention_heads=8, num_key_value_heads=1),
    "Phi": from_config("Phi", num_hidden_layers=24),
    "GPT-NeoX": from_config("GPTNeoX", num_hidden_layers=8, hidden_size=6144, num_attention_heads=64),
}
CASES = [
    ("Megatron GPT", "dgx-a100", 16, 64, 0),
    ("GPT-2", "dgx-1-v100", 8, 64, 0),
    ("Llama-3 8B", "dgx-h100", 16, 64, 0),
    ("Llama-3 70B", "dgx-h100", 16, 128, 1),
    ("Mistral", "dgx-a100", 8, 64, 0),
    ("Mixtral", "dgx-h100", 16, 64, 0),
    ("Qwen2", "dgx-1-v100", 32, 64, 0),
    ("Gemma", "dgx-1-v100", 8, 128, 1),
    ("Phi", "dgx-1-v100", 16, 64, 0),
    ("GPT-NeoX", "dgx-a100", 8, 64, 1),
]
QUICK = [row for row in CASES if row[0] in ("Megatron GPT", "Llama-3 70B", "Mistral", "Mixtral")]


@pytest.mark.parametrize(("name", "cluster", "world_size", "batch", "zero"), slow_rows_but(QUICK, CASES))
def test_a_plan_is_what_compiling_it_gives(name: str, cluster: str, world_size: int, batch: int, zero: int) -> None:
    with torch.device("meta"):
        model = MODELS[name]().to(torch.float16 if "v100" in cluster else torch.bfloat16)
        ids = torch.zeros(1, 2048 if name != "GPT-2" else 1024, dtype=torch.long)
    given: Any = {"example_inputs": (ids, ids) if name == "Megatron GPT" else {"input_ids": ids, "labels": ids}}
    (plan, *_) = autoptd.plan(model, world_size=world_size, global_batch=batch, cluster=cluster, zero=zero, **given)
    step = autoptd.compile(model, **plan.options, **given).simulate(cluster, zero=zero)
    assert step.fits
    assert step.step_seconds == pytest.approx(plan.step_seconds, rel=CLOSE)
    assert step.mfu * step.step_seconds == pytest.approx(plan.mfu * plan.step_seconds, rel=1e-6)
    assert max(step.memory_bytes) == pytest.approx(plan.memory_bytes, rel=CLOSE)
