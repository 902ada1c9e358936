"""Hugging Face models of the sample's sizes, and the names of their tensors in files."""

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
    """Return a Llama with two query heads for each key and value head."""
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
    """Return the renaming of `model`'s files: ``autoptd.SafetensorsFolder(folder, rename=read_names(model))``.

    It renames as ``from_pretrained`` does: names of other versions, and the prefix that the inner class lacks. Tensors
    that transformers computes from several others (experts saved one by one) are not renamed.
    """
    conversions = get_model_conversion_mapping(model)
    renamings = [x for x in conversions if isinstance(x, WeightRenaming)]
    known = model.state_dict()
    below: str = model.base_model_prefix

    def rename(name: str) -> str:
        renamed, _ = rename_source_key(name, renamings, [], below, known)
        return renamed

    return rename
