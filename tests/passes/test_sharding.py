"""Tensor parallelism found in the graph: its numbers, its shape, its refusals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from autoptd.capture import capture
from autoptd.passes.constants import fold_constants
from autoptd.passes.normalize import normalize
from autoptd.passes.program import Program
from autoptd.passes.sharding import shard_tensors
from autoptd.runtime import collectives
from autoptd.runtime.mesh import Mesh
from autoptd.runtime.placement import Segment
from autoptd.runtime.rank import Rank, thread_ranks
from autoptd.runtime.threads import ThreadWorld
from samples.gpt import GPT, GPTConfig
from tests.interpret import run_stage

SIZES = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 67}
LLAMA = {**SIZES, "intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 16, "pad_token_id": None}
GPT2 = {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 67, "n_positions": 16, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", {**GPT2, "attn_pdrop": 0.0}),
    "opt": ("OPTForCausalLM", {**SIZES, "ffn_dim": 48, "max_position_embeddings": 16, "word_embed_proj_dim": 32, "dropout": 0.0}),
    "neox": ("GPTNeoXForCausalLM", {**SIZES, "intermediate_size": 48, "max_position_embeddings": 16}),
    "llama": ("LlamaForCausalLM", LLAMA),
    "mistral": ("MistralForCausalLM", {**LLAMA, "sliding_window": 5, "head_dim": 8}),
    "qwen2": ("Qwen2ForCausalLM", LLAMA),
    "qwen3": ("Qwen3ForCausalLM", {**LLAMA, "head_dim": 8}),
    "phi3": ("Phi3ForCausalLM", {**LLAMA, "resid_pdrop": 0.0}),
    "gptj": ("GPTJForCausalLM", {**GPT2, "rotary_dim": 4, "attn_pdrop": 0.0}),
    "neo": ("GPTNeoForCausalLM", {**SIZES, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 16, "attention_types": [[["global", "local"], 1]], "window_size": 4, "intermediate_size": 48, "resid_dropout": 0.0, "embed_dropout": 0.0, "attention_dropout": 0.0}),
    "bloom": ("BloomForCausalLM", {**SIZES, "n_layer": 2, "n_head": 4, "hidden_dropout": 0.0, "attention_dropout": 0.0}),
    "gemma2": ("Gemma2ForCausalLM", {**LLAMA, "head_dim": 8, "sliding_window": 5}),
    "falcon": ("FalconForCausalLM", {**SIZES, "multi_query": True, "max_position_embeddings": 16}),
    "stablelm": ("StableLmForCausalLM", LLAMA),
    "olmo2": ("Olmo2ForCausalLM", LLAMA),
}  # fmt: skip


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    cls, options = MODELS[name]
    config = getattr(transformers, cls).config_class(**options)
    config.use_cache = False
    model: nn.Module = getattr(transformers, cls)(config).double()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms start at 0 and 1: too special to show a mistake
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def prepare(model: nn.Module, tensor: int, inputs: Mapping[str, Tensor], **options: Any) -> Program:
    program = capture(model, mesh=Mesh(tensor, 1, 1), example_inputs=dict(inputs))
    return shard_tensors(fold_constants(normalize(program)), **options)


def run_plain(model: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    output = model(**inputs)
    loss: Tensor = output[1] if isinstance(output, tuple) else output.loss
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def run_sharded(
    program: Program, weights: Mapping[str, Tensor], inputs: Mapping[str, Tensor]
) -> tuple[list[Tensor], dict[str, list[Tensor]]]:
    """Losses and every parameter's gradients of all tensor ranks."""
    (stage,) = program.stages
    mesh = program.mesh
    whole = {**program.buffers, **weights}
    constants = run_stage(stage.constants, whole, {}) if len(stage.constants.nodes) else {}
    size = mesh.tensor

    def body(rank: Rank) -> tuple[Tensor, dict[str, Tensor]]:
        local = {}
        for name, parameter in stage.parameters.items():
            own = parameter.placement.take({**whole, **constants}[name].detach(), size, rank.tensor.index).clone()
            local[name] = own.requires_grad_(parameter.requires_grad and own.is_floating_point())
        loss = run_stage(stage.graph, local, {"rank": rank, **inputs})
        loss.backward()
        return loss.detach(), {n: t.grad for n, t in local.items() if t.grad is not None}

    world = ThreadWorld()
    results = world.run(body, thread_ranks(mesh, world))
    return [r[0] for r in results], {n: [r[1][n] for r in results] for n in results[0][1]}


def join_gradients(program: Program, shards: Mapping[str, list[Tensor]]) -> dict[str, Tensor]:
    """Whole gradients; undivided rows must agree between ranks, or add up where they are partial."""
    joined = {}
    for name, parts in shards.items():
        parameter = program.stages[0].parameters[name]
        placement = parameter.placement
        if parameter.partial_gradient and placement.dim is None:
            joined[name] = torch.stack(parts).sum(0)
            continue
        if parameter.partial_gradient:
            parts = sum_undivided(parts, placement.dim or 0, placement.segments)
        elif placement.dim is None:
            for part in parts[1:]:
                torch.testing.assert_close(part, parts[0], rtol=1e-12, atol=1e-14)
        joined[name] = placement.join(parts)
    return joined


def sum_undivided(parts: list[Tensor], dim: int, segments: tuple[Segment, ...]) -> list[Tensor]:
    widths = [s.rows // len(parts) if s.divided else s.rows for s in segments]
    columns = [part.split(widths, dim) for part in parts]
    sums = [sum(column[i] for column in columns) for i in range(len(segments))]
    return [
        torch.cat([rows if s.divided else torch.as_tensor(sums[i]) for i, (rows, s) in enumerate(zip(column, segments, strict=True))], dim)
        for column in columns
    ]


def largest_error(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """The largest element of any difference over that tensor's largest element.

    A gradient that is zero but for rounding (a key's bias shifts all scores alike) is measured against the others.
    """
    assert found.keys() == wanted.keys()
    floor = 1e-6 * max(float(g.abs().max()) for g in wanted.values())
    return max(float((found[n] - g).abs().max()) / max(float(g.abs().max()), floor) for n, g in wanted.items())


def check_equal(model: nn.Module, tensor: int, inputs: Mapping[str, Tensor], tolerance: float = 1e-12) -> Program:
    program = prepare(model, tensor, inputs)
    loss, gradients = run_plain(model, inputs)
    losses, shards = run_sharded(program, dict(model.named_parameters()), inputs)
    for own in losses:
        assert float((own - loss).abs() / loss.abs()) <= tolerance
    assert largest_error(join_gradients(program, shards), gradients) <= tolerance
    return program


def tokens(batch: int = 2, length: int = 16, vocabulary: int = 67) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "input_ids": torch.randint(vocabulary, (batch, length), generator=generator),
        "labels": torch.randint(vocabulary, (batch, length), generator=generator),
    }


def all_reduces(program: Program) -> tuple[int, int]:
    targets = [n.target for n in program.stages[0].graph.nodes]
    return targets.count(collectives.reduce_from_tensor), targets.count(collectives.copy_to_tensor)


@pytest.mark.parametrize("tensor", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_a_divided_model_has_the_plain_models_loss_and_gradients(name: str, tensor: int) -> None:
    # Hugging Face computes the loss in float32 even of a float64 model, whence the tolerance.
    check_equal(build(name), tensor, tokens(), tolerance=2e-6)
