"""Tensor parallelism found in the graph: its numbers, its shape, its refusals."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from autoptd.passes.attention.recognition import recognize_attention
from autoptd.passes.ir.program import Program
from autoptd.passes.normal_form.constants import fold_constants
from autoptd.passes.normal_form.normalize import normalize
from autoptd.passes.tensor_parallel.sharding import shard_tensors
from autoptd.runtime import collectives
from autoptd.runtime.comm.rank import Rank, thread_ranks
from autoptd.runtime.comm.threads import ThreadWorld
from autoptd.runtime.program.mesh import Mesh
from autoptd.runtime.program.placement import Segment
from samples.gpt import GPT, GPTConfig, SelfAttention
from tests.captures import shared_capture
from tests.interpret import run_stage

SIZES: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 67}
POSITIONS = {"max_position_embeddings": 16}
LLAMA: dict[str, Any] = {**SIZES, **POSITIONS, "intermediate_size": 48, "num_key_value_heads": 2, "pad_token_id": None}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
GPT2 = {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 67, "n_positions": 16, **NO_DROPOUT}
NEO = {
    **{"num_layers": 2, "num_heads": 4, "intermediate_size": 48, "window_size": 4},
    **{"resid_dropout": 0.0, "embed_dropout": 0.0, "attention_dropout": 0.0},
    "attention_types": [[["global", "local"], 1]],
}
BLOOM = {**SIZES, "n_layer": 2, "n_head": 4, "hidden_dropout": 0.0, "attention_dropout": 0.0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "opt": ("OPTForCausalLM", {**SIZES, **POSITIONS, "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0}),
    "neox": ("GPTNeoXForCausalLM", {**SIZES, **POSITIONS, "intermediate_size": 48}),
    "llama": ("LlamaForCausalLM", LLAMA),
    "mistral": ("MistralForCausalLM", {**LLAMA, "sliding_window": 5, "head_dim": 8}),
    "qwen2": ("Qwen2ForCausalLM", LLAMA),
    "qwen3": ("Qwen3ForCausalLM", {**LLAMA, "head_dim": 8}),
    "phi3": ("Phi3ForCausalLM", {**LLAMA, "resid_pdrop": 0.0}),
    "gptj": ("GPTJForCausalLM", {**GPT2, "rotary_dim": 4}),
    "neo": ("GPTNeoForCausalLM", {**SIZES, **POSITIONS, **NEO}),
    "bloom": ("BloomForCausalLM", BLOOM),
    "gemma2": ("Gemma2ForCausalLM", {**LLAMA, "head_dim": 8, "sliding_window": 5}),
    "falcon": ("FalconForCausalLM", {**SIZES, **POSITIONS, "multi_query": True}),
    "stablelm": ("StableLmForCausalLM", LLAMA),
    "olmo2": ("Olmo2ForCausalLM", LLAMA),
}


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
    program = shared_capture(model, mesh=Mesh(tensor, 1, 1), example_inputs=dict(inputs))
    return shard_tensors(recognize_attention(fold_constants(normalize(program))), **options)


def run_plain(model: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    output = model(**inputs)
    loss: Tensor = output[1] if isinstance(output, tuple) else getattr(output, "loss", output)
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
            own = (
                parameter.placement["tensor"]
                .take({**whole, **constants}[name].detach(), size, rank.group("tensor").index)
                .clone()
            )
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
        placement = parameter.placement["tensor"]
        if parameter.placement.has_partial_gradient and placement.dim is None:
            joined[name] = torch.stack(parts).sum(0)
            continue
        if parameter.placement.has_partial_gradient:
            parts = sum_undivided(parts, placement.dim or 0, placement.segments)
        elif placement.dim is None:
            for part in parts[1:]:
                torch.testing.assert_close(part, parts[0], rtol=1e-12, atol=1e-14)
        joined[name] = placement.join(parts)
    return joined


def sum_undivided(parts: list[Tensor], dim: int, segments: tuple[Segment, ...]) -> list[Tensor]:
    widths = [s.rows // len(parts) if s.divided else s.rows for s in segments]
    columns = [list(part.split(widths, dim)) for part in parts]
    for i, segment in enumerate(segments):
        if not segment.divided:
            total = torch.stack([column[i] for column in columns]).sum(0)
            for column in columns:
                column[i] = total
    return [torch.cat(column, dim) for column in columns]


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


@pytest.mark.parametrize("tensor", [2, 4])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_the_sample_gpt_in_float64(tensor: int, tied: bool, bias: bool) -> None:
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=67, block_size=8, n_layer=2, n_head=4, n_embd=32, bias=bias, tie_weights=tied)
    ids = {"idx": torch.randint(67, (2, 8)), "targets": torch.randint(67, (2, 8))}
    program = check_equal(GPT(config).double(), tensor, ids)
    # Two per layer (SC21 §2.3), and one for the embedding forward, one before the head backward.
    assert all_reduces(program) == (2 * 2 + 1, 2 * 2 + 1)


def segments(program: Program, name: str) -> tuple[int | None, list[tuple[int, int, int, bool]]]:
    placement = program.stages[0].parameters[name].placement["tensor"]
    return placement.dim, [(s.outer, s.size, s.inner, s.divided) for s in placement.segments]


def test_packed_weights_are_divided_per_head_inside_each_block() -> None:
    program = prepare(build("gpt2"), 2, tokens())
    assert segments(program, "transformer.h.0.attn.c_attn.weight") == (1, [(3, 4, 8, True)])  # stored in x out
    assert segments(program, "transformer.h.0.attn.c_proj.weight") == (0, [(1, 4, 8, True)])
    program = prepare(build("bloom"), 2, tokens())
    name = "transformer.h.0.self_attention.query_key_value.weight"
    assert segments(program, name) == (0, [(1, 4, 24, True)])  # interleaved per head
    program = prepare(build("phi3"), 2, tokens())
    name = "model.layers.0.self_attn.qkv_proj.weight"
    assert segments(program, name) == (0, [(1, 2, 16, True), (1, 2, 8, True), (1, 2, 8, True)])
    assert segments(program, "model.layers.0.mlp.gate_up_proj.weight") == (0, [(2, 48, 1, True)])


def test_key_value_heads_fewer_than_t_are_replicated_and_reported() -> None:
    program = prepare(build("phi3"), 4, tokens())
    name = "model.layers.0.self_attn.qkv_proj.weight"
    dim, found = segments(program, name)
    assert (dim, [row[-1] for row in found]) == (0, [True, False, False])
    assert program.stages[0].parameters[name].placement.has_partial_gradient
    assert any(line.startswith("2 key-value heads replicated over tensor=4") for line in program.log)
    assert all_reduces(program) == (5, 5)  # no further all-reduce: gradients of k and v are summed with x's


def test_an_odd_vocabulary_is_padded_in_memory_only() -> None:
    program = prepare(build("llama"), 2, tokens())
    placement = program.stages[0].parameters["lm_head.weight"].placement["tensor"]
    assert (placement.dim, placement.padding) == (0, 1)
    assert any(line.startswith("an axis of 67 padded by 1 in memory") for line in program.log)


@pytest.mark.parametrize("name", ["gptj", "neox"])
def test_a_parallel_residual_is_reduced_once_each_way(name: str) -> None:
    # Forward, attention and MLP are partial sums that add up. Backward, GPT-J's share the layer's norm; NeoX has two
    # norms, and their gradients are summed once, before them.
    assert all_reduces(prepare(build(name), 2, tokens())) == (2 + 1, 2 + 1)


class Accumulated(SelfAttention):
    """Attention whose queries run over all heads before these are told apart."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.c_attn(x).split(self.n_embd, -1)
        q, k, v = (part.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for part in (q.cumsum(-1), k, v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.c_proj(mixed.transpose(1, 2).flatten(-2))
        return out


class Joined(SelfAttention):
    """Attention whose heads and head sizes are summed in one product with a weight of three dimensions."""

    def forward(self, x: Tensor) -> Tensor:
        parts = self.c_attn(x).split(self.n_embd, -1)
        q, k, v = (part.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for part in parts)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        weight = self.c_proj.weight.view(-1, self.n_head, self.n_embd // self.n_head)
        return torch.einsum("basd,had->bsh", mixed, weight) + self.c_proj.bias


def test_a_sum_over_two_dimensions_of_a_weight_is_no_product_of_activations() -> None:
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=64, block_size=8, n_layer=1, n_head=4, n_embd=32)
    model = GPT(config).double()
    model.h[0].attn = Joined(config).double()
    ids = {"idx": torch.randint(64, (2, 8)), "targets": torch.randint(64, (2, 8))}
    (line,) = (e for e in check_equal(model, 2, ids).log if e.startswith("attention replicated"))
    assert re.search(r"because aten.einsum \(test_sharding.py:\d+\) sums over it and 1 more at once: h.0", line)


def test_attention_that_cannot_be_divided_is_replicated_with_its_cost_and_its_cause() -> None:
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=64, block_size=8, n_layer=2, n_head=4, n_embd=32)
    model = GPT(config).double()
    for block in model.h:
        block.attn = Accumulated(config).double()
    ids = {"idx": torch.randint(64, (2, 8)), "targets": torch.randint(64, (2, 8))}
    program = check_equal(model, 2, ids)
    (line,) = (line for line in program.log if line.startswith("attention replicated"))
    # Two products of [b a s hd] with s columns, and the exponentials of half the scores.
    flops = 2 * 2 * (2 * 4 * 8 * 8) * 8 + 2 * 4 * 8 * 8 // 2
    assert f"(aten.scaled_dot_product_attention, {flops:,} FLOPs a forward on each of 2 ranks)" in line
    assert re.search(r"because aten.cumsum \(test_sharding.py:\d+\) runs over it: h.0.attn", line)
    assert line.endswith("and 1 more")


def test_heads_that_do_not_divide_are_refused_with_the_place_and_the_divisors() -> None:
    config = GPTConfig(vocab_size=64, block_size=8, n_layer=1, n_head=4, n_embd=32)
    ids = {"idx": torch.zeros(1, 8, dtype=torch.long), "targets": torch.zeros(1, 8, dtype=torch.long)}
    message = r"4 heads do not divide over tensor=3 at h.0.attn \(gpt.py:\d+\); use tensor=1, 2 or 4"
    with pytest.raises(ValueError, match=message):
        prepare(GPT(config), 3, ids)


def test_a_way_out_is_one_for_all_layers() -> None:
    config = GPTConfig(vocab_size=64, block_size=8, n_layer=2, n_head=4, n_embd=48)
    model, ids = GPT(config), {name: torch.zeros(1, 8, dtype=torch.long) for name in ("idx", "targets")}
    model.h[1].attn.n_head = 6  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"4 heads do not divide over tensor=3 .*; use tensor=1 or 2$"):
        prepare(model, 3, ids)


class Chunked(SelfAttention):
    """Each chunk of a sequence attends to itself: of short sequences there is one."""

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        q, k, v = (y.view(b, s // 8, 8, self.n_head, -1).permute(0, 3, 1, 2, 4) for y in self.c_attn(x).split(h, 2))
        mixed = (q @ k.transpose(-1, -2)).tanh() @ v
        out: Tensor = self.c_proj(mixed.permute(0, 2, 3, 1, 4).reshape(b, s, h))
        return out


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_chunks_are_not_taken_for_heads(chunks: int) -> None:
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=64, block_size=8 * chunks, n_layer=1, n_head=4, n_embd=32)
    model = GPT(config).double()
    model.h[0].attn = Chunked(config).double()
    ids = {name: torch.randint(64, (2, 8 * chunks)) for name in ("idx", "targets")}
    program = check_equal(model, 2, ids)
    assert segments(program, "h.0.attn.c_proj.weight") == (1, [(1, 4, 8, True)])
    assert not any("attention replicated" in line for line in program.log)


def test_key_value_heads_that_do_not_fit_are_refused() -> None:
    options = {**LLAMA, "hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 6}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**options, use_cache=False))
    with pytest.raises(ValueError, match=r"6 key-value heads do not divide over tensor=4 .* use tensor=1, 2, 3 or 6"):
        prepare(model, 4, tokens())


def test_groups_of_queries_divide_where_their_key_value_heads_do_not() -> None:
    torch.manual_seed(0)
    options = {**LLAMA, "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**options, use_cache=False)).double()
    program = check_equal(model, 2, tokens(), tolerance=2e-6)
    assert segments(program, "model.layers.0.self_attn.q_proj.weight") == (0, [(3, 2, 8, True)])
    assert segments(program, "model.layers.0.self_attn.k_proj.weight") == (None, [])


@torch.library.custom_op("autoptd_test::scale_rows", mutates_args=())
def scale_rows(x: Tensor, scale: Tensor) -> Tensor:
    return x * scale


scale_rows.register_fake(lambda x, scale: torch.empty_like(x))
scale_rows.register_autograd(
    lambda ctx, g: (g * ctx.saved_tensors[1], (g * ctx.saved_tensors[0]).sum((0, 1))),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


class Scaled(nn.Module):
    """A gated MLP with a custom operator inside the divided region, and one parameter for all."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        self.up = nn.Linear(16, 32)
        self.scale = nn.Parameter(torch.linspace(0.5, 2, 32))
        self.down = nn.Linear(32, 16)
        self.head = nn.Linear(16, 64)

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(idx)
        x = torch.nn.functional.layer_norm(x + self.down(scale_rows(self.up(x), self.scale)), [16])
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


SCALED_INPUTS = {"idx": torch.arange(16).view(2, 8), "targets": torch.arange(16).view(2, 8) + 3}


def test_an_operator_without_a_rule_is_refused_with_the_way_to_give_one() -> None:
    message = r"no sharding rule for autoptd_test.scale_rows at .*test_sharding.py:\d+.*rules=\{"
    with pytest.raises(ValueError, match=message):
        prepare(Scaled(), 2, SCALED_INPUTS)


@pytest.mark.parametrize("key", [torch.ops.autoptd_test.scale_rows, scale_rows, "autoptd_test::scale_rows"])
def test_a_users_rule_divides_a_custom_operator(key: Any) -> None:
    torch.manual_seed(0)
    model = Scaled().double()
    program = prepare(model, 2, SCALED_INPUTS, rules={key: "b s f, f -> b s f"})
    assert segments(program, "scale") == (0, [(1, 32, 1, True)])
    loss, gradients = run_plain(model, SCALED_INPUTS)
    losses, shards = run_sharded(program, dict(model.named_parameters()), SCALED_INPUTS)
    assert all(abs(float(own - loss)) < 1e-14 for own in losses)
    assert largest_error(join_gradients(program, shards), gradients) < 1e-12


@torch.library.custom_op("autoptd_test::multiply", mutates_args=())
def multiply(x: Tensor, y: Tensor) -> Tensor:
    return x * y


multiply.register_fake(lambda x, y: torch.empty_like(x))
multiply.register_autograd(
    lambda ctx, g: (g * ctx.saved_tensors[1], g * ctx.saved_tensors[0]),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def test_a_rule_has_a_group_for_a_tensor_that_is_given_twice() -> None:
    class Squared(Scaled):
        def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
            x = self.up(self.embed(idx)) * self.scale
            return nn.functional.cross_entropy(self.head(self.down(multiply(x, x))).flatten(0, 1), targets.flatten())

    torch.manual_seed(0)
    model = Squared().double()
    program = prepare(model, 2, SCALED_INPUTS, rules={"autoptd_test::multiply": "b s f, b s f -> b s f"})
    assert segments(program, "scale") == (0, [(1, 32, 1, True)])
    _, gradients = run_plain(model, SCALED_INPUTS)
    _, shards = run_sharded(program, dict(model.named_parameters()), SCALED_INPUTS)
    assert largest_error(join_gradients(program, shards), gradients) < 1e-12


def test_a_rule_that_keeps_an_axis_whole_is_obeyed() -> None:
    program = prepare(Scaled(), 2, SCALED_INPUTS, rules={"autoptd_test::scale_rows": "b s f!, f! -> b s f"})
    assert segments(program, "up.weight") == (None, [])
    assert any(line.startswith("weight of shape [32, 16]") and "replicated" in line for line in program.log)


@pytest.mark.parametrize(
    ("rules", "error", "message"),
    [
        ({"autoptd_test::scale_rows": "b s f"}, ValueError, "found 'b s f', without one \"->\""),
        ({"autoptd_test::scale_rows": "b f, f -> b f"}, ValueError, "does not fit the call at"),
        ({"autoptd_test::scale_rows": 3}, TypeError, "must be a text such as"),
        (["b s f, f -> b s f"], TypeError, "expected a dict from an operator, or its name, to a text"),
    ],
)
def test_a_rule_that_is_no_rule_is_refused(rules: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        prepare(Scaled(), 2, SCALED_INPUTS, rules=rules)


class SequenceFirst(nn.Module):
    """Attention over [s, b, h]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        self.qkv = nn.Linear(16, 48)
        self.out = nn.Linear(16, 16)
        self.head = nn.Linear(16, 64)

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        s, b = idx.shape
        x = self.embed(idx)
        q, k, v = (y.view(s, b, 4, 4).permute(1, 2, 0, 3) for y in self.qkv(x).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = nn.functional.layer_norm(x + self.out(y.permute(2, 0, 1, 3).reshape(s, b, 16)), [16])
        return nn.functional.cross_entropy(self.head(x).view(-1, 64), targets.view(-1))


@pytest.mark.parametrize(("shape", "dim"), [((8, 2), 1), ((8, 1), 1), ((3, 8), 1), ((8, 8), 1)])
def test_the_batch_of_a_sequence_first_model_is_dimension_one(shape: tuple[int, int], dim: int) -> None:
    ids = {name: torch.zeros(shape, dtype=torch.long) for name in ("idx", "targets")}
    program = prepare(SequenceFirst(), 2, ids)
    assert [i.batch_dim for i in program.inputs] == [dim, dim]


@pytest.mark.parametrize("batch", [1, 3, 16])
def test_the_batch_is_dimension_zero_elsewhere(batch: int) -> None:
    program = prepare(build("llama"), 1, tokens(batch=batch))
    assert [i.batch_dim for i in program.inputs] == [0, 0]


class Shifted(nn.Module):
    """Attention of torch's own, which folds the batch into its heads, to the tokens before."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attend = nn.Embedding(64, 16), nn.MultiheadAttention(16, 4, batch_first=True)

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        before = self.embed(idx).roll(1, 1)
        x = self.attend(self.embed(idx), before, before, need_weights=False)[0]
        return nn.functional.cross_entropy((x @ self.embed.weight.t()).view(-1, 64), targets.view(-1))


def test_one_sequence_is_a_batch_whatever_attention_folds_it_into() -> None:
    ids = {name: torch.zeros(1, 8, dtype=torch.long) for name in ("idx", "targets")}
    assert [i.batch_dim for i in prepare(Shifted(), 2, ids).inputs] == [0, 0]


def test_an_input_without_the_batch_is_not_split() -> None:
    inputs = {**tokens(batch=3), "position_ids": torch.arange(16).view(1, 16)}
    program = prepare(build("llama"), 1, inputs)
    found = {i.name: i.batch_dim for i in program.inputs}
    assert found == {"input_ids": 0, "labels": 0, "position_ids": None}


def test_sharding_is_deterministic() -> None:
    first, second = (prepare(build("phi3"), 4, tokens()) for _ in range(2))
    assert str(first.stages[0].graph) == str(second.stages[0].graph)
    assert first.log == second.log


class Loss(nn.Module):
    """An embedding and a head, with one of many ways to write the loss, and an extra input."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embed = nn.Embedding(64, 16)
        self.head = nn.Linear(16, 64)

    def forward(self, idx: Tensor, targets: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.embed.weight[idx] if self.kind == "indexed" else self.embed(idx)
        x = torch.roll(x, 1, 1) if self.kind == "rolled" else x
        logits = torch.einsum("bsh,vh->bsv", x, self.head.weight) if self.kind == "einsum" else self.head(x)
        if self.kind == "smooth":
            return nn.functional.cross_entropy(logits.view(-1, 64), targets.view(-1), label_smoothing=0.1)
        if self.kind == "none":
            losses = nn.functional.cross_entropy(logits.view(-1, 64), targets.view(-1), reduction="none")
            return losses.mean() if mask is None else (losses * mask.view(-1)).mean()
        if self.kind == "spatial":
            return nn.functional.cross_entropy(logits.transpose(1, 2), targets)
        if self.kind == "nll":
            return nn.functional.nll_loss(logits.log_softmax(-1).view(-1, 64), targets.view(-1))
        if self.kind == "gather":
            return -logits.log_softmax(-1).gather(2, targets.unsqueeze(2)).mean()
        return nn.functional.cross_entropy(logits.view(-1, 64), targets.view(-1))


LOSSES = ["plain", "smooth", "none", "spatial", "nll", "gather", "indexed", "einsum", "rolled"]


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("kind", LOSSES)
def test_every_way_to_write_the_loss_keeps_the_batch_and_the_numbers(kind: str, tensor: int) -> None:
    torch.manual_seed(0)
    model = Loss(kind).double()
    ids = {name: torch.randint(64, (2, 8)) for name in ("idx", "targets")}
    program = prepare(model, tensor, ids)
    assert [i.batch_dim for i in program.inputs] == [0, 0]
    loss, gradients = run_plain(model, ids)
    losses, shards = run_sharded(program, dict(model.named_parameters()), ids)
    assert all(abs(float((own - loss).detach())) < 1e-13 for own in losses)
    assert largest_error(join_gradients(program, shards), gradients) < 1e-12


def test_flat_targets_are_split_by_the_batch_outside_them() -> None:
    ids = {"idx": torch.zeros(2, 8, dtype=torch.long), "targets": torch.zeros(16, dtype=torch.long)}
    assert [i.batch_dim for i in prepare(Loss("plain"), 1, ids).inputs] == [0, 0]


@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom"])
def test_an_attention_mask_is_split_with_the_batch(name: str) -> None:
    inputs = {**tokens(), "attention_mask": torch.ones(2, 16, dtype=torch.long)}
    assert {i.name: i.batch_dim for i in prepare(build(name), 2, inputs).inputs} == dict.fromkeys(inputs, 0)


def test_a_square_mask_is_not_split_though_it_has_the_batchs_size() -> None:
    ids = {name: torch.zeros(8, 8, dtype=torch.long) for name in ("idx", "targets")}
    inputs = {**ids, "mask": torch.zeros(8, 8)}
    found = {i.name: i.batch_dim for i in prepare(WithMask(), 1, inputs).inputs}
    assert found == {"idx": 0, "targets": 0, "mask": None}


class WithMask(SequenceFirst):
    def forward(self, idx: Tensor, targets: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        b, s = idx.shape
        x = self.embed(idx)
        q, k, v = (y.view(b, s, 4, 4).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(y.transpose(1, 2).reshape(b, s, 16))
        return nn.functional.cross_entropy(self.head(x).view(-1, 64), targets.view(-1))


def test_a_padded_vocabulary_is_not_divided_by() -> None:
    class Temperature(Loss):
        def __init__(self) -> None:
            super().__init__("plain")
            self.head = nn.Linear(16, 65)
            self.temperature = nn.Parameter(torch.ones(65))

        def forward(self, idx: Tensor, targets: Tensor, mask: Tensor | None = None) -> Tensor:
            logits = self.head(self.embed(idx)) / self.temperature
            return nn.functional.cross_entropy(logits.view(-1, 65), targets.view(-1))

    torch.manual_seed(0)
    model = Temperature().double()
    ids = {name: torch.randint(64, (2, 8)) for name in ("idx", "targets")}
    program = check_equal(model, 2, ids)
    assert segments(program, "head.weight")[0] != 0


def test_packed_rows_inside_key_value_groups_are_divided_by_group_or_refused() -> None:
    options: dict[str, Any] = {"new_decoder_architecture": True, "num_attention_heads": 6, "hidden_size": 48}
    config = transformers.FalconConfig(
        **SIZES | POSITIONS | options, num_kv_heads=3, num_ln_in_parallel_attn=1, use_cache=False
    )
    model = transformers.FalconForCausalLM(config).double()
    check_equal(model, 3, tokens(), tolerance=2e-6)
    with pytest.raises(ValueError, match=r"6 heads in 3 groups do not .* tensor=2 at .*; use tensor=1 or 3"):
        prepare(model, 2, tokens())


def test_an_axis_is_not_divided_where_a_buffer_picks_from_or_by_it() -> None:
    class Permuted(Loss):
        def __init__(self) -> None:
            super().__init__("plain")
            self.register_buffer("order", torch.arange(15, -1, -1))

        def forward(self, idx: Tensor, targets: Tensor, mask: Tensor | None = None) -> Tensor:
            x = self.embed(idx)[..., self.order]
            return nn.functional.cross_entropy(self.head(x).view(-1, 64), targets.view(-1))

    torch.manual_seed(0)
    model = Permuted().double()
    ids = {name: torch.randint(64, (2, 8)) for name in ("idx", "targets")}
    program = prepare(model, 2, ids)
    loss, _ = run_plain(model, ids)
    losses, _ = run_sharded(program, {**dict(model.named_parameters()), **dict(model.named_buffers())}, ids)
    assert all(abs(float((own - loss).detach())) < 1e-13 for own in losses)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"autoptd_test::scale_row": "b s f, f -> b s f"}, "did you mean 'autoptd_test.scale_rows'"),
        ({"autoptd_test::scale_rows": "b s f, s -> b s f"}, "calls dimensions of sizes 8 and 32 both 's'"),
        ({"autoptd_test::scale_rows": "b s f, f -> b f s"}, "both 'f' at|both 's' at"),
    ],
)
def test_a_rule_that_fits_nothing_is_refused(rules: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prepare(Scaled(), 1, SCALED_INPUTS, rules=rules)
