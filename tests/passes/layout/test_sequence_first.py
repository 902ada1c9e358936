"""The sequence-first layout: the same numbers, no transposes in memory, and left alone where it would not help."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import wraps
from typing import Any, cast

import pytest
import torch
import transformers
from torch import Tensor, fx, nn
from torch.nn import functional

import autoptd
from autoptd.passes.ir.nodes import info
from autoptd.passes.ir.program import Program
from autoptd.passes.layout.copies import Strides, find_copies
from autoptd.passes.layout.sequence_first import rewrite_layout
from autoptd.passes.normal_form.constants import fold_constants
from autoptd.passes.normal_form.normalize import normalize
from autoptd.passes.operators.table import OPERATORS
from autoptd.passes.tensor_parallel.sharding import shard_tensors
from autoptd.runtime import aten, kernels
from autoptd.runtime.program.mesh import Mesh
from autoptd.verification.float64 import Promotion
from samples.gpt import GPT, GPTConfig
from tests.captures import shared_capture
from tests.generated_models import Attention, Grouping, ModelConfig, Projection, make_batch, make_model
from tests.interpret import run_graph
from tests.marks import cover_pairs, name_case, slow, slow_but
from tests.parity import GRADIENT_TOLERANCE, gradient_errors
from tests.plain_models import HIDDEN, HUGGING_FACE, LAYERS, LENGTH, PLAIN, VOCABULARY, PlainGPT

ONE = Mesh(1, 1, 1)
TWO = Mesh(2, 1, 1)  # one tensor rank wants the layout only where it saves copies
Inputs = Mapping[str, Tensor]
Result = tuple[Tensor, dict[str, Tensor]]


def prepare(model: nn.Module, inputs: Inputs) -> Program:
    return fold_constants(normalize(shared_capture(model, mesh=TWO, example_inputs=inputs)))


def run(program: Program, model: nn.Module, inputs: Inputs) -> Result:
    """The loss and every gradient, with keyed dropout."""
    weights = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    loss = run_graph(program, {**dict(model.named_buffers()), **weights}, inputs)
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in weights.items() if p.grad is not None}


def error(found: Result, expected: Result) -> float:
    """The largest error: of the loss relative to itself, of the gradients to the largest of all.

    A gradient that is small because terms cancel has no 14 digits of its own: that is held to 12, as in all of parity.
    """
    largest = max(float(g.abs().max()) for g in expected[1].values())
    errors = [float((found[0] - expected[0]).abs() / expected[0].abs())]
    errors += [float((found[1][n] - g).abs().max()) / largest for n, g in expected[1].items()]
    if max(errors) <= 1e-14:
        assert max(gradient_errors(found[1], expected[1]).values()) <= GRADIENT_TOLERANCE
    return max(errors)


def is_same(found: Result, expected: Result) -> bool:
    return torch.equal(found[0], expected[0]) and all(
        torch.equal(found[1][name], gradient) for name, gradient in expected[1].items()
    )


def is_moved(program: Program) -> bool:
    assert program.log[-1].startswith("rewrite_layout")
    return "->" in program.log[-1]


def tokens(batch: int, first: str = "input_ids", second: str = "labels") -> dict[str, Tensor]:
    ids, labels = torch.randint(1, VOCABULARY, (2, batch, LENGTH))
    return {first: ids, second: labels}


def sample_gpt(dropout: float = 0.0) -> nn.Module:
    return GPT(
        GPTConfig(vocab_size=VOCABULARY, block_size=LENGTH, n_layer=LAYERS, n_head=4, n_embd=HIDDEN, dropout=dropout)
    )


def gpt2(dropout: float = 0.0, **options: Any) -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=HIDDEN,
        n_layer=LAYERS,
        n_head=4,
        n_positions=LENGTH,
        attn_pdrop=dropout,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
        **options,
    )
    return transformers.GPT2LMHeadModel(config)


# What it makes of the sample


def describe(program: Program) -> str:
    lines = [program.log[-1]]
    for node in program.stages[0].graph.nodes:
        if node.op == "call_function":
            val = node.meta["val"]
            shapes = [list(v.shape) for v in (val if isinstance(val, (tuple, list)) else [val])]
            name = str(getattr(node.target, "__name__", node.target))
            given = ", ".join(map(str, [*node.args, *(f"{k}={v}" for k, v in node.kwargs.items())]))
            lines.append(f"{node.name} = {name}({given})  {' '.join(map(str, shapes))}")
    return "\n".join(lines) + "\n"


def test_golden(golden: Callable[[str, str], None]) -> None:
    program = prepare(sample_gpt(), tokens(2, "idx", "targets"))
    golden("layout_gpt.txt", describe(program) + "\n" + describe(rewrite_layout(program)))


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("make", [sample_gpt, gpt2])
def test_nothing_is_copied_without_dropout(make: Callable[[], nn.Module], batch: int) -> None:
    inputs = tokens(batch, "idx", "targets") if make is sample_gpt else tokens(batch)
    program = rewrite_layout(prepare(make(), inputs))
    assert program.log[-1] == "rewrite_layout [b, s, h] -> [s, b, h]: 0 -> 0 bytes copied per microbatch"
    graph = program.stages[0].graph
    assert find_copies(graph, Strides(TWO)) == {}
    norms = [n for n in graph.nodes if n.target is aten.layer_norm.default]
    assert [list(n.meta["val"].shape) for n in norms] == [[LENGTH, batch, HIDDEN]] * (2 * LAYERS + 1)
    graph.lint()
    assert all(node.users for node in graph.nodes if node.op == "call_function")


@pytest.mark.parametrize("make", [sample_gpt, gpt2])
def test_decomposed_attention_copies_its_context_only(make: Callable[[float], nn.Module]) -> None:
    inputs = tokens(2, "idx", "targets") if make is sample_gpt else tokens(2)
    program = prepare(make(0.1), inputs)
    context = 2 * LENGTH * HIDDEN * 4
    before, after = 4 * LAYERS * context, LAYERS * context
    moved = rewrite_layout(program)
    assert moved.log[-1].endswith(f"{before:,} -> {after:,} bytes copied per microbatch")
    assert sum(find_copies(program.stages[0].graph, Strides(TWO)).values()) == before
    copies = find_copies(moved.stages[0].graph, Strides(TWO))
    assert all(node.target is aten.reshape.default or "contiguous" in node.name for node in copies)


@pytest.mark.parametrize(
    ("make", "dropout", "mesh"),
    cover_pairs([sample_gpt, gpt2], [0.0, 0.1], [(1, 1, 1), (2, 1, 1), (2, 2, 1)]),
    ids=name_case,
)
def test_emitted_programs_copy_no_more(
    make: Callable[[float], nn.Module], dropout: float, mesh: tuple[int, int, int]
) -> None:
    """After division and fusion too: with dropout a layer's context, out of attention, and nothing else."""
    inputs = tokens(2, "idx", "targets") if make is sample_gpt else tokens(2)
    program = autoptd.compile(make(dropout), mesh, example_inputs=inputs)
    copies = [node for s in program.stages for node in find_copies(s.graph, Strides(program.mesh))]
    places = [f"{node.target}, {info(node).path}" for node in copies]
    layers = ("h" if make is sample_gpt else "transformer.h", range(LAYERS if dropout else 0))
    assert places == [f"aten.contiguous.default, {layers[0]}.{i}.attn" for i in layers[1]]


# Meaning


def sample_config(seed: int) -> ModelConfig:
    r = random.Random(seed)
    heads = r.choice([2, 3, 4])
    projection = cast(Projection, r.choice(["three", "packed", "per_head", "unequal"]))
    grouped = projection in ("three", "unequal")
    tied, gated = r.random() < 0.4, r.random() < 0.5
    return ModelConfig(
        layers=r.choice([1, 2]),
        heads=heads,
        kv_heads=r.choice([n for n in (1, 2, 3, 4) if heads % n == 0]) if grouped else heads,
        head_size=r.choice([2, 4, 6]),
        vocabulary=r.choice([11, 16]),
        length=r.choice([2, 3, 5]),  # sometimes the batch's own size
        width=12,
        projection=projection,
        attention=cast(Attention, r.choice(["fused", "written"])),
        grouping=cast(Grouping, r.choice(["repeat", "expand", "native"])),
        bias=r.random() < 0.6,
        tied=tied,
        head_bias=not tied and r.random() < 0.3,
        gated=gated,
        packed_gate=gated and r.random() < 0.5,
        parallel_residual=r.random() < 0.25,
        rms_norm=r.random() < 0.4,
        query_key_norm=r.random() < 0.2,
        rotary=r.random() < 0.4,
        sequence_first=r.random() < 0.15,
    )


@pytest.mark.parametrize("seeds", [range(10), *(slow(range(n, n + 20)) for n in range(0, 200, 20))], ids=str)
def test_generated_models_mean_the_same(seeds: range) -> None:
    moved = 0
    for seed in seeds:
        config = sample_config(seed)
        model = make_model(config, seed)
        batch = make_batch(config, 1 + seed % 3, seed, ignored=0.2)
        program = prepare(model, batch)
        rewritten = rewrite_layout(program)
        found, expected = run(rewritten, model, batch), run(program, model, batch)
        assert error(found, expected) <= 1e-14, (seed, config)
        assert seed % 3 or is_same(found, expected), (seed, config)
        assert not (config.sequence_first and seed % 3 and is_moved(rewritten) and config.length > 3)
        moved += is_moved(rewritten)
    assert moved >= len(seeds) // 2


def encoder(name: str) -> tuple[nn.Module, Inputs]:
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    inputs = tokens(2)
    if name == "bert":
        model: nn.Module = transformers.BertForMaskedLM(transformers.BertConfig(**sizes))
    elif name == "vit":
        images = transformers.ViTConfig(**sizes, image_size=8, patch_size=4)
        model = transformers.ViTForImageClassification(images)
        inputs = {"pixel_values": torch.randn(2, 3, 8, 8).double(), "labels": torch.tensor([1, 0])}
    else:
        sizes = {"vocab_size": VOCABULARY, "d_model": HIDDEN, "d_kv": 8, "num_heads": 4, "d_ff": 48}
        sizes |= {"num_layers": LAYERS, "dropout_rate": 0.0, "decoder_start_token_id": 0}
        model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))
        labels = inputs["labels"][:, :6].contiguous()
        inputs = inputs | {"decoder_input_ids": labels.roll(1), "labels": labels}
    return model, inputs


def more(name: str) -> nn.Module:
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": LENGTH,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
    model: nn.Module = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**sizes))
    return model


@pytest.mark.parametrize("batch", [slow(1), 2])
@pytest.mark.parametrize(
    "name",
    slow_but(["gpt2", "bloom", "gpt-neox", "falcon", "nanogpt-slow"], [*HUGGING_FACE, "StableLm", "Olmo2", *PLAIN]),
)
def test_known_models_mean_the_same(name: str, batch: int) -> None:
    torch.manual_seed(0)
    makers = {**HUGGING_FACE, **PLAIN}
    model = (makers[name]() if name in makers else more(name)).double()
    inputs = tokens(batch, "idx", "targets") if name in PLAIN else tokens(batch)
    program = prepare(model, inputs)
    rewritten = rewrite_layout(program)
    with Promotion():  # of what they compute in float32, whatever their weights are
        found, expected = run(rewritten, model, inputs), run(program, model, inputs)
    assert error(found, expected) <= 1e-14
    assert batch > 1 or is_same(found, expected)
    assert is_moved(rewritten)


@pytest.mark.parametrize(("name", "words"), [("bert", "->"), ("t5", "->"), ("vit", "no input holds token")])
def test_other_models_are_right(name: str, words: str) -> None:
    torch.manual_seed(0)
    model, inputs = encoder(name)
    program = prepare(model.double(), inputs)
    rewritten = rewrite_layout(program)
    assert words in rewritten.log[-1]
    with Promotion():
        assert error(run(rewritten, model, inputs), run(program, model, inputs)) <= 1e-14


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_without_products_the_bits_are_the_same(batch: int) -> None:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(11, 6)
            self.norm = nn.LayerNorm(6)

        def forward(self, idx: Tensor) -> Tensor:
            x = functional.gelu(self.norm(self.table(idx)).view(-1, 6)).view(*idx.shape, 2, 3)
            x = torch.cat((-x[..., :1], x[..., 1:]), -1).transpose(1, 2).softmax(-1)
            loss: Tensor = x.cumsum(2)[0, 0, 0, 0] + x[:, 1, 2, 1].amax()
            return loss

    model, inputs = Rows().double(), {"idx": torch.arange(batch * 5).view(batch, 5) % 11}
    program = prepare(model, inputs)
    rewritten = rewrite_layout(program)
    assert is_moved(rewritten)
    assert is_same(run(rewritten, model, inputs), run(program, model, inputs))


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("make", [lambda: sample_gpt(0.5), lambda: gpt2(0.5), lambda: gpt2_eager()])
def test_dropout_masks_stay_the_same(make: Callable[[], nn.Module], batch: int) -> None:
    model = make().double()
    inputs = tokens(batch, "idx", "targets") if isinstance(model, GPT) else tokens(batch)
    program = prepare(model, inputs)
    moved = rewrite_layout(program)
    assert is_moved(moved)
    moved, plain = (shard_tensors(replace(p, mesh=ONE)) for p in (moved, program))
    with Promotion():
        found, expected = (run(p, model, inputs) for p in (moved, plain))
    assert error(found, expected) <= 1e-14
    without = run_graph(moved, dict(model.named_parameters()), inputs, training=False)
    assert abs(float(without.detach() - found[0])) > 1e-4


def gpt2_eager() -> nn.Module:
    return gpt2(0.5, attn_implementation="eager")


def test_strides_are_the_cpus() -> None:
    """What is counted copies is what a CPU does: every value's strides are those of the run."""
    for make in (sample_gpt, gpt2, HUGGING_FACE["opt"], HUGGING_FACE["gpt-neox"], HUGGING_FACE["bloom"]):
        model = make()
        inputs = tokens(2, "idx", "targets") if make is sample_gpt else tokens(2)
        program = rewrite_layout(prepare(model, inputs))
        strides = Strides(TWO)
        find_copies(program.stages[0].graph, strides)
        seen: dict[str, Any] = {}
        run_watched(program, model, inputs, seen)
        for node, value in strides.values.items():
            if isinstance(value, Tensor) and node.op == "call_function" and value.numel():
                kept = [d for d, size in enumerate(value.shape) if size > 1]
                assert [value.stride(d) for d in kept] == [seen[node.name].stride(d) for d in kept], node


def run_watched(program: Program, model: nn.Module, inputs: Inputs, seen: dict[str, Any]) -> None:
    weights = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    (stage,) = program.stages
    watched = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    for node in stage.graph.nodes:
        values[node] = watched.node_copy(node, values.__getitem__)
        if node.op == "call_function":

            def keep(value: Any, name: str = node.name) -> Any:
                seen[name] = value
                return value

            values[node] = watched.call_function(keep, (values[node],))
    copied = program.replace_stages((type(stage)(watched, stage.parameters, stage.constants),), "watched")
    run_graph(copied, weights, inputs)


def test_one_tensor_rank_keeps_its_order_where_nothing_is_copied() -> None:
    program = replace(prepare(sample_gpt(), tokens(2, "idx", "targets")), mesh=ONE)
    left = rewrite_layout(program)
    assert left.stages == program.stages
    assert (
        left.log[-1] == "rewrite_layout: left as it is, [s, b, h] would copy as much, 0 bytes, and no tensor ranks "
        "exchange its rows"
    )
    program = replace(prepare(sample_gpt(0.1), tokens(2, "idx", "targets")), mesh=ONE)
    assert is_moved(rewrite_layout(program)), "attention in products copies less"


# Divided


@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("name", ["sample", "gpt2", "llama", "opt", "bloom", "gpt-neox", "phi3", "nanogpt-slow"])
def test_megatrons_structure_is_found_as_before(name: str, batch: int) -> None:
    make = {**HUGGING_FACE, **PLAIN, "sample": sample_gpt}[name]
    inputs = tokens(batch) if name in HUGGING_FACE else tokens(batch, "idx", "targets")
    model = make()
    entries = []
    for layout in ("bsh", "sbh"):
        program = autoptd.compile(model, (2, 1, 1), example_inputs=inputs, layout=layout)
        entries.append([line for line in program.log if line.startswith(("shard_tensors", "weight", "an axis"))])
        assert any(line.startswith("rewrite_layout [b, s, h]") for line in program.log) == (layout == "sbh")
        assert all(i.batch_dim == 0 for i in program.manifest.inputs)
    assert entries[0] == entries[1]


@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("name", ["sample", "llama", "bloom"])
def test_divided_programs_are_right(name: str, batch: int) -> None:
    """Four ranks have a head each; llama's two key and value heads are replicated."""
    make = {**HUGGING_FACE, "sample": sample_gpt}[name]
    inputs = tokens(batch) if name in HUGGING_FACE else tokens(batch, "idx", "targets")
    program = autoptd.compile(make(), (4, 1, 1), example_inputs=inputs, num_microbatches=2)
    assert any(line.startswith("rewrite_layout [b, s, h]") for line in program.log)
    assert "passed" in str(program.verify())


def test_boundaries_are_sequence_first() -> None:
    inputs = tokens(2, "idx", "targets")
    program = autoptd.compile(sample_gpt(), (2, 2, 1), example_inputs=inputs, num_model_chunks=1)
    assert {b.shape for b in program.manifest.stages[0].sends} == {(LENGTH, 2, HIDDEN)}
    strides = Strides(program.mesh)
    find_copies(program.stages[0].graph, strides)
    (output,) = (node for node in program.stages[0].graph.nodes if node.op == "output")
    for sent in output.all_input_nodes:
        assert strides.values[sent].is_contiguous(), "so that sending it, or a slice of its rows, copies nothing"
    assert "passed" in str(program.verify())


# Left alone


def test_sequence_first_models_are_left_alone() -> None:
    config = ModelConfig(length=5, sequence_first=True)
    for batch in (1, 2):
        program = prepare(make_model(config), make_batch(config, batch))
        rewritten = rewrite_layout(program)
        assert rewritten.log[-1] == "rewrite_layout: left as it is, it is [s, b, h] already"
        assert rewritten.stages is program.stages


class Odd(nn.Module):
    """An embedding, and what `body` makes of it [b, s, h]."""

    def __init__(self, body: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.linear = nn.Linear(8, 8)
        self.body = body

    def forward(self, idx: Tensor) -> Tensor:
        x = self.linear(self.table(idx))
        result: Tensor = self.linear(self.body(self, x)).square().mean()
        return result


@torch.library.custom_op("autoptd_layout_test::shifted", mutates_args=())
def shifted(x: Tensor) -> Tensor:
    """Reads its argument's memory: [b, s, h] as it was."""
    assert x.is_contiguous()
    return x.view(-1).roll(1).view(x.shape)


shifted.register_fake(torch.empty_like)
shifted.register_autograd(lambda ctx, g: g.contiguous().view(-1).roll(-1).view(g.shape))


def join_tokens(m: Any, x: Tensor) -> Tensor:
    return x.reshape(x.shape[0], -1, 4).tanh().reshape(x.shape)


def cut_sequence(m: Any, x: Tensor) -> Tensor:
    b, s, h = x.shape
    return x.view(b, 2, s // 2, h).sum(2).repeat_interleave(s // 2, 1)


def over_batch(m: Any, x: Tensor) -> Tensor:
    return x + x.mean(0, keepdim=True) * x.amax(1, keepdim=True) + x.mean((0, 1)) + x.mean()


def pick(m: Any, x: Tensor) -> Tensor:
    best = x.detach().sum(-1).topk(2, dim=1).indices
    return x + x.gather(1, best[..., None].expand(-1, -1, 8)).sum(1, keepdim=True) + x[:, -1:, :] + x[1, 2]


def roll(m: Any, x: Tensor) -> Tensor:
    return x.roll(1, 1) + x.flip(1) + x.cumsum(1) + functional.pad(x, (0, 0, 1, 0))[:, :-1]


def stack_up(m: Any, x: Tensor) -> Tensor:
    y = torch.stack((x, x * 2, x.tanh()), 1)
    z = torch.stack((x, x * 3), 2).select(2, 1)
    return torch.cat((y.unbind(1)[2], z), 1).chunk(2, 1)[0] + y[:, 0] * x.unsqueeze(1).squeeze(1)


def own_operator(m: Any, x: Tensor) -> Tensor:
    result: Tensor = torch.ops.autoptd_layout_test.shifted(x)
    return result


def one_head(m: Any, x: Tensor) -> Tensor:
    scores = torch.baddbmm(torch.zeros(1, 4, 4).double(), x, x.transpose(1, 2)) + x @ x.mT
    return scores.softmax(-1) @ x + torch.einsum("bsh,bth->bst", x, x) @ x


def flat_heads(m: Any, x: Tensor) -> Tensor:
    y = x.view(-1, 2, 4).transpose(0, 1).reshape(2, -1, 4)
    return y.transpose(0, 1).reshape(x.shape)


@pytest.mark.parametrize("batch", [1, 2, 4])
@pytest.mark.parametrize(
    "body", [join_tokens, cut_sequence, over_batch, roll, stack_up, own_operator, one_head, flat_heads, pick]
)
def test_operators_that_need_batch_first_get_it_back(body: Callable[[Any, Tensor], Tensor], batch: int) -> None:
    if body is pick and batch == 1:
        pytest.skip("it reads the second sequence")
    torch.manual_seed(0)
    model = Odd(body).double()
    inputs = {"idx": torch.randint(0, 11, (batch, 4))}
    program = prepare(model, inputs)
    rewritten = rewrite_layout(program)
    expected = model(**inputs)
    assert float((run(program, model, inputs)[0] - expected).abs()) < 1e-14
    assert error(run(rewritten, model, inputs), run(program, model, inputs)) <= 1e-14
    if body in (join_tokens, own_operator) and batch > 1:
        assert not is_moved(rewritten)
        assert "would copy" in rewritten.log[-1]
        assert "undone for 1 " in rewritten.log[-1]


def test_memory_that_is_read_as_it_lies() -> None:
    model = Odd(lambda m, x: x + torch.as_strided(x * 1.5, (2, 4, 8), (32, 8, 1)))
    program = prepare(model, {"idx": torch.randint(0, 11, (2, 4))})
    assert rewrite_layout(program).log[-1] == "rewrite_layout: left as it is, as_strided reads its memory as it is"


def test_masks_of_their_own_keep_the_batch_apart() -> None:
    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.heads = nn.Embedding(11, 8), nn.Linear(8, 24)

        def forward(self, idx: Tensor) -> Tensor:
            q, k, v = (y.view(*idx.shape, 2, 4).transpose(1, 2) for y in self.heads(self.table(idx)).split(8, 2))
            mask = (idx != 0)[:, None, None, :] | torch.eye(4, dtype=torch.bool)
            y = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            loss: Tensor = y.transpose(1, 2).reshape(*idx.shape, 8).square().mean()
            return loss

    model, inputs = Padded().double(), {"idx": torch.tensor([[1, 2, 0, 0], [3, 4, 5, 0]])}
    program = prepare(model, inputs)
    rewritten = rewrite_layout(program)
    assert error(run(rewritten, model, inputs), run(program, model, inputs)) <= 1e-14
    shapes = [
        n.meta["val"].shape[0]
        for n in rewritten.stages[0].graph.nodes
        if n.target is aten.scaled_dot_product_attention.default
    ]
    assert shapes == [2]


# The pass itself


def test_deterministic_and_pure() -> None:
    program = prepare(gpt2(), tokens(2))
    before = describe(program)
    first, second = describe(rewrite_layout(program)), describe(rewrite_layout(program))
    assert first == second
    assert describe(program) == before


def test_equal_layers_are_propagated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of the pass must not be that of running each layer on meta tensors."""
    program = prepare(PlainGPT(dropout=0.1), tokens(2, "idx", "targets"))
    calls = []
    dropout = kernels.dropout

    @wraps(dropout)
    def counted(*given: Any) -> Tensor:
        calls.append(given)
        return dropout(*given)

    for node in program.stages[0].graph.nodes:
        if node.target is dropout:
            node.target = counted
    monkeypatch.setattr(kernels, "dropout", counted)
    monkeypatch.setitem(OPERATORS, counted, OPERATORS[dropout])
    rewrite_layout(program)
    assert len(calls) == 2  # of [b, s, h] and of [s, b, h]


class Chunks(nn.Module):
    """Pieces of the sequence, of which one dimension goes."""

    def __init__(self, pieces: int, drop: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(11, 4), nn.Linear(4, 4)
        self.pieces, self.drop = pieces, drop

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.linear(self.table(input_ids))
        b, s, h = x.shape
        kept = self.drop(x.view(b, self.pieces, s // self.pieces, h).transpose(1, 2))
        return (kept.square() * torch.linspace(0.5, 1.5, kept.numel(), dtype=x.dtype).view(kept.shape)).mean()


@pytest.mark.parametrize("pieces", [2, 4])
@pytest.mark.parametrize("drop", [lambda x: x.mean(1), lambda x: x[:, 0], lambda x: x.mean(2), lambda x: x.amax(1)])
def test_a_piece_of_the_sequence_is_no_sequence(pieces: int, drop: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model, inputs = Chunks(pieces, drop).double(), {"input_ids": torch.randint(0, 11, (2, 8))}
    program = prepare(model, inputs)
    assert error(run(rewrite_layout(program), model, inputs), run(program, model, inputs)) < 1e-14
