"""Every causal language model that transformers has: it compiles and is right, or is refused with a reason.

Built from its config in tiny sizes. What cannot be built so, or does not run by itself, is skipped.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import autoptd

VOCABULARY, LENGTH = 96, 16
MOST_PARAMETERS = 20_000_000
SIZES = {
    **dict.fromkeys(["hidden_size", "n_embd", "d_model", "emb_dim"], 32),
    **dict.fromkeys(["num_hidden_layers", "n_layer", "num_layers", "n_layers"], 4),
    **dict.fromkeys(["encoder_layers", "decoder_layers", "num_key_value_heads"], 2),
    **dict.fromkeys(["num_attention_heads", "n_head", "n_heads", "rotary_dim"], 4),
    **dict.fromkeys(["encoder_attention_heads", "decoder_attention_heads"], 4),
    **dict.fromkeys(["encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim", "intermediate_size"], 64),
    **dict.fromkeys(["max_position_embeddings", "n_positions", "moe_intermediate_size"], 32),
    **dict.fromkeys(["num_heads", "mamba_n_heads"], 8),  # of state space models, twice as wide
    **dict.fromkeys(["q_lora_rank", "kv_lora_rank"], 32),
    **{"attention_types": [[["global", "local"], 2]], "n_group": 1, "topk_group": 1, "index_n_heads": 4},
    **{"ffn_hidden_size": 64, "expert_ffn_hidden_size": 64, "vocab_size_per_layer_input": VOCABULARY},
    **dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts"], 4),
    **dict.fromkeys(["num_experts_per_tok", "moe_topk", "num_experts_per_token", "moe_top_k"], 2),
    **dict.fromkeys(["resid_pdrop", "embd_pdrop", "attn_pdrop", "attention_dropout", "layerdrop"], 0.0),
    **dict.fromkeys(["hidden_dropout", "dropout", "activation_dropout", "hidden_dropout_prob"], 0.0),
    **{"attention_probs_dropout_prob": 0.0, "head_dim": 8, "vocab_size": VOCABULARY, "use_cache": False},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "layer_types": None, "mlp_layer_types": None},
}
# Of classes whose layers must be of certain kinds, or whose sizes hang together in other ways.
OWN: dict[str, dict[str, Any]] = {
    "BailingHybridForCausalLM": {"num_expert_group": 2},
    "DeepseekV2ForCausalLM": {"topk_group": 1, "num_experts_per_tok": 2},
    "Dots1ForCausalLM": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "Gemma3nForCausalLM": {"num_kv_shared_layers": 0},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"] * 2},
    "MptForCausalLM": {"attn_config": {}},
    "NemotronForCausalLM": {"num_key_value_heads": 4},
    "Qwen4ExpForCausalLM": {"layer_types": ["linear_attention"] * 4},
    "ReformerModelWithLMHead": {"is_decoder": True, "axial_pos_embds": False},
    "XmodForCausalLM": {"default_language": "en_XX", "is_decoder": True},
    "Zamba2ForCausalLM": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "ZambaForCausalLM": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "ZayaForCausalLM": {"num_experts_per_tok": 1},
}
CLASSES = sorted({name if isinstance(name, str) else name[0] for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()})
# What a refusal must say: where in somebody's code, or in which module, it stopped.
PLACE = re.compile(r"\.py:\d+|^forward leaves \S+,")


def find_sizes(config_class: Any) -> dict[str, Any]:
    """The sizes that a class of configurations knows, and those of the configurations inside it."""
    known = config_class().to_dict()
    sizes = {key: value for key, value in SIZES.items() if known.get(key) is not None or key == "head_dim"}
    if "kv_lora_rank" in known:  # its heads have sizes of their own, and as many keys as queries
        sizes["num_key_value_heads"] = SIZES["num_attention_heads"]
    if "kv_lora_rank" in known or "head_dim" not in known:
        del sizes["head_dim"]
    inner = {key: of for key, of in config_class.sub_configs.items() if isinstance(known.get(key), dict)}
    return sizes | {key: find_sizes(type(getattr(config_class(), key))) for key in inner}


def build(name: str) -> nn.Module:
    """The model in float64, its attention fused where it can be."""
    cls: Any = getattr(transformers, name)
    config = cls.config_class(**find_sizes(cls.config_class) | OWN.get(name, {}))
    config._attn_implementation = "sdpa" if getattr(cls, "_supports_sdpa", False) else "eager"
    with torch.device("meta"):
        size = sum(x.numel() for x in cls(config).parameters())
    if size > MOST_PARAMETERS:  # such as those of a configuration inside it
        raise ValueError(f"{size} parameters: its sizes have other names")
    torch.manual_seed(0)
    model: Any = cls(config).double()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("batched_mm")
    return model  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", CLASSES)
def test_every_language_model_is_right_or_refused(name: str, record_property: Callable[[str, object], None]) -> None:
    ids = torch.randint(3, VOCABULARY, (1, LENGTH))
    example = {"input_ids": ids, "labels": ids}
    try:
        model = build(name)
        loss = model(**example).loss
    except Exception as error:  # its own, whatever that is
        pytest.skip(f"not built so: {type(error).__name__}: {str(error)[:100]}")
    if loss is None or not loss.isfinite():
        pytest.skip("it has no finite loss by itself")
    try:
        program = autoptd.compile(model, (2, 2, 1), example_inputs=example, num_microbatches=2)
    except ValueError as error:
        refusal = str(error)
    else:
        refusal = ""
    if refusal:
        record_property("refused", refusal)  # which the page on coverage lists
        assert PLACE.search(refusal), refusal
    else:
        report = program.verify()
        assert report.passed, report
