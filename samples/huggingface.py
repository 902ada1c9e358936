"""Hugging Face models of the sample's sizes, as transformers defines them, and the names in files of theirs."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key

from samples.gpt import GPTConfig


def make_gpt2(sizes: GPTConfig) -> nn.Module:
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=sizes.vocab_size,
            n_positions=sizes.block_size,
            n_layer=sizes.n_layer,
            n_head=sizes.n_head,
            n_embd=sizes.n_embd,
            embd_pdrop=sizes.dropout,
            attn_pdrop=sizes.dropout,
            resid_pdrop=sizes.dropout,
            bos_token_id=0,
            eos_token_id=0,
            use_cache=False,
        )
    )


def make_llama(sizes: GPTConfig) -> nn.Module:
    """Grouped queries: two query heads to each key and value head."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=sizes.vocab_size,
            max_position_embeddings=sizes.block_size,
            num_hidden_layers=sizes.n_layer,
            num_attention_heads=sizes.n_head,
            num_key_value_heads=max(sizes.n_head // 2, 1),
            hidden_size=sizes.n_embd,
            intermediate_size=sizes.n_embd * 8 // 3 // 32 * 32,
            attention_dropout=sizes.dropout,
            bos_token_id=0,
            eos_token_id=0,
            use_cache=False,
        )
    )


def read_names(model: PreTrainedModel) -> Callable[[str], str]:
    """What `model` calls a tensor of its files: ``autoptd.SafetensorsFolder(folder, rename=read_names(model))``.

    As ``from_pretrained`` does: names of other versions, and the prefix that the class below has not. What it computes
    from several tensors (experts saved one by one) is not renamed.
    """
    conversions = get_model_conversion_mapping(model)
    renamings = [x for x in conversions if isinstance(x, WeightRenaming)]
    known = model.state_dict()
    below: str = model.base_model_prefix

    def rename(name: str) -> str:
        renamed, _ = rename_source_key(name, renamings, [], below, known)
        return renamed

    return rename
