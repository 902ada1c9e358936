"""Models of transformers whose embedding and head weigh as much as many layers, or whose layers differ; no weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    MT5Config,
    MT5ForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
    XGLMConfig,
    XGLMForCausalLM,
)


@dataclass(frozen=True)
class Case:
    """A model of `sizes`; `scaled` are those that one part in `parts` of makes it small, in the same proportions."""

    name: str
    model: Callable[[Any], nn.Module]
    config: Callable[..., Any]
    sizes: Mapping[str, Any]
    scaled: tuple[str, ...]
    inputs: tuple[str, ...] = ("input_ids", "labels")
    frozen_layers: int = 0

    def make(self, parts: int = 1) -> nn.Module:
        """The model, with its vocabulary and widths divided by `parts`: a head then weighs as many layers as before."""
        sizes = {name: size // parts if name in self.scaled else size for name, size in self.sizes.items()}
        model: Any = self.model(self.config(use_cache=False, **sizes))
        if self.frozen_layers:
            model.get_input_embeddings().requires_grad_(False)
            for layer in model.transformer.h[: self.frozen_layers]:
                layer.requires_grad_(False)
        found: nn.Module = model
        return found

    def vocabulary(self, parts: int = 1) -> int:
        return int(self.sizes["vocab_size"]) // parts

    def batch(self, rows: int, tokens: int, parts: int = 1) -> dict[str, Tensor]:
        """`rows` random sequences; on the default device."""
        return {name: torch.randint(self.vocabulary(parts), (rows, tokens)) for name in self.inputs}


BLOOM = {"vocab_size": 250_880, "hidden_size": 1024, "n_layer": 24, "n_head": 16}
BLOOM_SCALED = ("vocab_size", "hidden_size", "n_head")
CASES = (
    Case("BLOOM 560M", BloomForCausalLM, BloomConfig, BLOOM, BLOOM_SCALED),
    Case(
        "XGLM 564M", XGLMForCausalLM, XGLMConfig,
        {"vocab_size": 256_008, "d_model": 1024, "ffn_dim": 4096, "num_layers": 24, "attention_heads": 16},
        ("vocab_size", "d_model", "ffn_dim", "attention_heads"),
    ),
    Case(
        "Gemma 3 1B", Gemma3ForCausalLM, Gemma3TextConfig,
        {"vocab_size": 262_144, "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26,
         "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256},
        ("vocab_size", "hidden_size", "intermediate_size", "head_dim"),
    ),
    Case(
        "Gemma 2 2B", Gemma2ForCausalLM, Gemma2Config,
        {"vocab_size": 256_000, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
         "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256},
        ("vocab_size", "hidden_size", "intermediate_size", "head_dim"),
    ),
    Case(
        "Qwen2 0.5B", Qwen2ForCausalLM, Qwen2Config,
        {"vocab_size": 151_936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
         "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True},
        ("vocab_size", "hidden_size", "intermediate_size"),
    ),
    Case(
        "mT5 small", MT5ForConditionalGeneration, MT5Config,
        {"vocab_size": 250_112, "d_model": 512, "d_kv": 64, "d_ff": 1024, "num_layers": 8, "num_heads": 6},
        ("vocab_size", "d_model", "d_kv", "d_ff"),
        ("input_ids", "decoder_input_ids", "labels"),
    ),
    Case("BLOOM 560M, 12 layers frozen", BloomForCausalLM, BloomConfig, BLOOM, BLOOM_SCALED, frozen_layers=12),
)  # fmt: skip
