"""Make the Markdown table of transformers' classes, the rule that finds their attention, and their logits' error.

Tiny models (two layers), captured in training mode, once with each attention implementation that transformers has for
the class. Logits are computed in float64, as ``program.verify`` computes: casts to float32 in the class (norms,
softmax, rotary angles) are promoted in the model and in the program alike. Run ``python -m
samples.attention_coverage``.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, fx, nn

from autoptd.capture.export import capture
from autoptd.passes.attention.recognition import Finding, find_attentions, recognize_attention
from autoptd.passes.ir.program import Program, copy_graph
from autoptd.passes.normal_form.constants import fold_constants
from autoptd.passes.normal_form.normalize import normalize
from autoptd.runtime.comm.rank import Rank
from autoptd.runtime.program.mesh import Mesh
from autoptd.verification.float64 import Promotion, promote

VOCABULARY, LENGTH = 61, 16
IMPLEMENTATIONS = ("eager", "sdpa")

_SIZES: dict[str, Any] = {
    **{"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": LENGTH},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False},
    **{"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None},
}
_GPT2 = {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": LENGTH}
_PDROP = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
_NEO = {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "num_heads": 4, "window_size": 4}
_LATENT = {
    **{"num_key_value_heads": 4, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "kv_lora_rank": 8},
    **{"q_lora_rank": 12, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2},
    **{"first_k_dense_replace": 1, "moe_intermediate_size": 16},
}
_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
_IMAGE = {"image_size": 16, "patch_size": 4, "num_labels": 10}
_DROPPED = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

# What each class needs beside `_SIZES`; dropout is off.
CLASSES: Mapping[str, dict[str, Any]] = {
    "GPT2LMHeadModel": {**_GPT2, **_PDROP},
    "GPTNeoForCausalLM": {**_NEO, "attention_dropout": 0.0, "embed_dropout": 0.0, "resid_dropout": 0.0},
    "GPTNeoXForCausalLM": {"hidden_dropout": 0.0, "attention_dropout": 0.0},
    "GPTJForCausalLM": {**_GPT2, **_PDROP, "rotary_dim": 4, "tie_word_embeddings": False},
    "OPTForCausalLM": {"ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.0},
    "BloomForCausalLM": {"n_layer": 2, "n_head": 4, "hidden_dropout": 0.0, "attention_dropout": 0.0},
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {"sliding_window": 4},
    "Qwen2ForCausalLM": {},
    "Qwen3ForCausalLM": {"head_dim": 8},
    "Phi3ForCausalLM": {"resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "Gemma2ForCausalLM": {"head_dim": 8, "sliding_window": 4},
    "FalconForCausalLM": {"multi_query": True, "hidden_dropout": 0.0, "attention_dropout": 0.0},
    "StableLmForCausalLM": {},
    "Olmo2ForCausalLM": {},
    "MixtralForCausalLM": {"num_local_experts": 4},
    "DeepseekV3ForCausalLM": _LATENT,
    "BertForMaskedLM": _DROPPED,
    "T5ForConditionalGeneration": {**_T5, "dropout_rate": 0.0, "decoder_start_token_id": 0, "pad_token_id": 0},
    "ViTForImageClassification": {**_DROPPED, **_IMAGE},
}

# transformers' default, grouped_mm, takes no float64 in torch: the models' own logits are those of batched_mm.
EXPERTS = ("MixtralForCausalLM", "DeepseekV3ForCausalLM")


def make_model(name: str, implementation: str, **options: Any) -> nn.Module | None:
    """Return the class with its tiny sizes; None if transformers has no such implementation of its attention."""
    cls = getattr(transformers, name)
    known = {key: value for key, value in _SIZES.items() if key not in CLASSES[name]}
    config = cls.config_class(**known, **{**CLASSES[name], **options})
    config._attn_implementation = implementation
    try:
        model: nn.Module = cls(config)
    except ValueError as error:
        if "does not support an attention implementation" in str(error):
            return None
        raise
    if name in EXPERTS:
        model.set_experts_implementation("batched_mm")  # type: ignore[operator]
    return model


def randomize(model: nn.Module) -> nn.Module:
    """Draw weights that leave no gradient zero and no softmax even."""
    torch.manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p + 0.2 * torch.randn(p.shape))
    return model


def make_inputs(name: str) -> dict[str, Tensor]:
    """Return one microbatch of two samples."""
    if name == "ViTForImageClassification":
        return {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.randint(0, 10, (2,))}
    ids = torch.randint(0, VOCABULARY, (2, LENGTH))
    return {"input_ids": ids, "labels": ids.clone()}


def fold_model(model: nn.Module, inputs: Mapping[str, Tensor]) -> Program:
    """Return the program as `recognize_attention` gets it."""
    return fold_constants(normalize(capture(model, mesh=Mesh(1, 1, 1), example_inputs=dict(inputs))))


def measure_error(program: Program, model: nn.Module, inputs: Mapping[str, Tensor]) -> float:
    """Return the error of a one-stage `program`'s logits against `model`'s, relative to the largest, in float64."""
    wide = {name: x.to(promote(x.dtype)) for name, x in inputs.items()}
    with torch.no_grad(), Promotion():
        own = copy.deepcopy(model).double()(**wide).logits
        found = _compute_logits(program, model, wide)
    return float((found.reshape(own.shape) - own).abs().max() / own.abs().max())


def _compute_logits(program: Program, model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    """Compute the program's logits with `model`'s weights in float64."""
    (stage,) = program.stages
    graph = copy_graph(stage.graph)
    (output,) = (node for node in graph.nodes if node.op == "output")
    output.args = (output.args[0].args[0],)
    tensors = {**program.buffers, **dict(model.named_parameters())}
    tensors = {name: x.detach().to(promote(x.dtype)) for name, x in tensors.items()}
    if len(stage.constants.nodes):
        tensors |= fx.GraphModule(tensors, stage.constants)()
    names = [str(node.target) for node in graph.nodes if node.op == "placeholder"]
    given = {**inputs, "rank": Rank.local(program.mesh)}
    logits: Tensor = fx.GraphModule(tensors, graph)(*(given[name] for name in names))
    return logits


def write_rule(finding: Finding) -> str:
    mask = "" if finding.mask == "no mask" else f", {finding.mask}"
    return {"sdpa": "fused attention", "softmax": "softmax kernel", "": "as it is"}[finding.rule] + mask


def list_rows() -> Iterator[tuple[str, ...]]:
    for name in CLASSES:
        for implementation in IMPLEMENTATIONS:
            model = make_model(name, implementation)
            if model is None:
                yield name, implementation, "(transformers has none)", "", ""
                continue
            inputs = make_inputs(name)
            program = fold_model(randomize(model), inputs)
            findings = find_attentions(program)[1]
            error = measure_error(recognize_attention(program), model, inputs)
            for rule, reason in dict.fromkeys((write_rule(f), f.reason) for f in findings):
                count = sum((write_rule(f), f.reason) == (rule, reason) for f in findings)
                yield name, implementation, f"{count} x {rule}", f"{error:.1g}", reason


def main() -> None:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    print("| model | attention implementation | rule that fired | logits differ by | why not fused whole |")
    print("| --- | --- | --- | --- | --- |")
    for row in list_rows():
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
