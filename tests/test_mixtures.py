"""Mixtures of experts: each is exact, and its experts are divided over the tensor ranks."""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

import autoptd
from autoptd.check.program import ProgramError
from autoptd.compiled import CompiledProgram
from autoptd.passes.cost.work import backward_work, forward_work
from autoptd.runtime import kernels
from autoptd.text.recorder import RecordingError
from autoptd.verification import float64
from autoptd.verification.step import widen
from samples.attention_coverage import randomize
from samples.wild import habits
from samples.wild.decoder import HIDDEN
from samples.wild.habits import EXPERTS, Mixture, vary
from samples.wrong_gradients import rewrite
from tests.parity import GRADIENT_TOLERANCE, Training, compare, compare_states, train_compiled, train_plain

VOCABULARY, LENGTH = 61, 8
SIZES: dict[str, Any] = {
    **{"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 24},
    **{"max_position_embeddings": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"head_dim": 8, "attention_dropout": 0.0, "use_cache": False},
    **{"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None},
}
_LOSS = {"num_experts_per_tok": 2, "output_router_logits": True}
_DEEPSEEK = {
    **{"num_key_value_heads": 4, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "kv_lora_rank": 8},
    **{"q_lora_rank": 12, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2},
    **{"first_k_dense_replace": 1, "head_dim": 4},
}
CLASSES: dict[str, dict[str, Any]] = {
    "MixtralForCausalLM": {"num_local_experts": 4, **_LOSS},
    "Qwen2MoeForCausalLM": {"num_experts": 8, "shared_expert_intermediate_size": 24, **_LOSS},
    "Qwen3MoeForCausalLM": {"num_experts": 8, "norm_topk_prob": True, **_LOSS},
    "DeepseekV2ForCausalLM": {"topk_method": "group_limited_greedy", **_DEEPSEEK},
    "DeepseekV3ForCausalLM": _DEEPSEEK,
    "OlmoeForCausalLM": {"num_experts": 8, **_LOSS},
    "GptOssForCausalLM": {"num_local_experts": 4, "sliding_window": 4, **_LOSS},
    "Llama4ForCausalLM": {"num_local_experts": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1},
    "PhimoeForCausalLM": {"num_local_experts": 4, **_LOSS},
    "GraniteMoeForCausalLM": {"num_local_experts": 4, **_LOSS},
    "Glm4MoeForCausalLM": {"n_routed_experts": 8, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
}
QUICK = ("MixtralForCausalLM", "DeepseekV3ForCausalLM", "GptOssForCausalLM", "Llama4ForCausalLM")
MESHES = ((2, 1, 1), (2, 2, 1))


def build(name: str, **options: Any) -> nn.Module:
    """The class with its tiny sizes and weights that leave no gradient zero."""
    cls = getattr(transformers, name)
    config_class = transformers.Llama4TextConfig if name == "Llama4ForCausalLM" else cls.config_class
    config = config_class(**{**SIZES, **CLASSES[name], **options})
    config._attn_implementation = "eager" if name == "GptOssForCausalLM" else "sdpa"
    return randomize(cls(config))


def compile_tokens(model: nn.Module, mesh: tuple[int, int, int], **options: Any) -> CompiledProgram:
    """Compile a class of transformers, or a variation of the samples' decoder."""
    torch.manual_seed(1)
    ids = torch.randint(1, VOCABULARY, (2, LENGTH))
    names = ("input_ids", "labels") if isinstance(model, transformers.PreTrainedModel) else ("idx", "targets")
    return autoptd.compile(model, mesh=mesh, example_inputs=dict.fromkeys(names, ids), **options)


def verify_exactly(program: CompiledProgram) -> None:
    program.check()
    report = program.verify()
    assert report.passed, report
    assert max(report.errors.values()) <= 1e-12, report


def divided_dims(program: CompiledProgram, word: str = "experts.") -> set[int | None]:
    """The dimensions along which the weights of experts are divided."""
    parameters = program.manifest.parameters.items()
    return {p.placement["tensor"].dim for n, p in parameters if word in n and "shared" not in n and p.is_trained}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in QUICK)) for n in CLASSES])
def test_experts_of_transformers_are_divided_and_exact(name: str, mesh: tuple[int, int, int]) -> None:
    """Whatever implementation the config names: the plain model loops over its experts, as they are written."""
    program = compile_tokens(build(name), mesh)
    assert divided_dims(program) == {0}
    assert not any("experts" in line for line in program.log if "replicated" in line)
    verify_exactly(program)


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("MixtralForCausalLM", (2, 1, 1)),
        pytest.param("Qwen3MoeForCausalLM", (2, 2, 1), marks=pytest.mark.slow),
        pytest.param("GptOssForCausalLM", (2, 1, 2), marks=pytest.mark.slow),
        pytest.param("Llama4ForCausalLM", (2, 2, 1), marks=pytest.mark.slow),
    ],
)
def test_twenty_steps_on_processes_are_those_of_the_loop_over_experts(name: str, mesh: tuple[int, int, int]) -> None:
    """In float64, clipped, with the auxiliary loss of each microbatch."""
    model: Any = build(name)
    if hasattr(model.config, "_experts_implementation"):
        model.set_experts_implementation("eager")
    torch.manual_seed(1)
    ids = torch.randint(1, VOCABULARY, (20, 4, LENGTH))
    batches = [{"input_ids": x, "labels": x.clone()} for x in ids]
    example = {name: x[:1] for name, x in batches[0].items()}
    program = autoptd.compile(model, mesh=mesh, example_inputs=example, num_microbatches=4 // mesh[2])
    training, double = Training(lr=0.05, max_norm=1.0), copy.deepcopy(model).double()
    wide = replace(program, manifest=widen(program.manifest), model=double)
    with float64.Promotion():
        plain = train_plain(double, batches, 4, training)
    found = train_compiled(wide, batches, training, prepare=lambda: float64.Promotion().__enter__())  # type: ignore[no-untyped-call]
    for own, true in zip(found.steps, plain.steps, strict=True):
        compare(own, true, loss_tolerance=1e-12)
    compare_states(found.state, plain.state, tolerance=GRADIENT_TOLERANCE)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["MixtralForCausalLM", "GraniteMoeForCausalLM"])
def test_experts_that_the_ranks_do_not_divide_are_divided_in_width(name: str) -> None:
    """Their rows are summed over the ranks as those of any row-parallel linear: once for a token."""
    program = compile_tokens(build(name, num_local_experts=3), (2, 1, 1))
    names = {n: p for n, p in program.manifest.parameters.items() if n.endswith(("gate_up_proj", "down_proj"))}
    dims = {n.split(".")[-1]: p.placement["tensor"].dim for n, p in names.items()}
    assert dims == {"gate_up_proj": 1, "down_proj": 2}
    assert any("5 all-reduces forward" in line for line in program.log)
    verify_exactly(program)


def test_experts_of_other_shapes_are_whole_with_the_reason() -> None:
    """Biases are added once to a product; gates of every second column are not taken from a part of them."""
    program = compile_tokens(build("GptOssForCausalLM", num_local_experts=3), (2, 1, 1))
    assert divided_dims(program) == {None}
    assert any(
        "replicated because 2 does not divide 3" in line and "experts.gate_up_proj" in line for line in program.log
    )
    verify_exactly(program)


@pytest.mark.timeout(120)
def test_four_ranks_with_an_expert_each_need_room_for_a_row_of_each_token() -> None:
    program = compile_tokens(build("MixtralForCausalLM"), (4, 1, 2))
    assert f"f32[<={2 * LENGTH}, 96]" in program.rank(0).code
    verify_exactly(program)


class Balanced(nn.Module):
    """The auxiliary loss of transformers 5.18 to 5.23, which counts the tokens of each expert with bincount."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.router = nn.Embedding(VOCABULARY, 32), nn.Linear(32, 4)
        self.up, self.head = nn.Linear(32, 64), nn.Linear(64, VOCABULARY)

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        x = self.table(idx)
        weights = self.router(x).flatten(0, 1).softmax(-1)
        chosen = weights.topk(2).indices.reshape(-1)
        count = (torch.bincount(chosen, minlength=4) + torch.bincount(input=chosen, minlength=4)).double() / 2
        loss = functional.cross_entropy(self.head(self.up(x).tanh()).flatten(0, 1), targets.flatten())
        total: Tensor = loss + (count * weights.sum(0)).sum() / len(weights) ** 2
        return total


@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 1, 1)])
def test_counts_of_experts_are_those_of_the_plain_model(mesh: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    verify_exactly(compile_tokens(Balanced().double(), mesh))


def test_a_rank_is_expected_to_multiply_its_part_of_the_rows() -> None:
    """And keeps room for all: as many FLOPs and bytes as the text says, and the same as expressions."""
    program = compile_tokens(build("MixtralForCausalLM"), (2, 1, 1))
    (stage,) = program.stages
    products = [node for node in stage.graph.nodes if node.target is kernels.grouped_linear]
    rows, width = 2 * LENGTH * 2 // 2, 48
    flops = [forward_work(node).flops for node in products]
    assert flops == 2 * [2 * rows * 32 * 2 * width, 2 * rows * width * 32]
    gradients = [sum(product.flops for product in backward_work(node).products) for node in products]
    assert gradients == [2 * forward for forward in flops]
    symbols = program.symbols
    assert symbols is not None
    shown = [forward_work(node, symbols.shape).flops for node in products]
    assert [int(expression.subs(symbols.values)) for expression in shown] == flops
    assert {str(s) for s in shown[0].free_symbols} == {"b", "s", "f", "h", "t"}


class Summed(nn.Module):
    """Two of four experts for each token, one module for each."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        wide = 2 * HIDDEN
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(HIDDEN, wide), nn.GELU(), nn.Linear(wide, HIDDEN)) for _ in range(EXPERTS)
        )

    def forward(self, x: Tensor) -> Any:
        probabilities = self.router(x).softmax(-1)
        gates, chosen = probabilities.topk(2, dim=-1)
        weights = torch.zeros_like(probabilities).scatter(-1, chosen, gates)
        return sum(weights[..., e, None] * expert(x) for e, expert in enumerate(self.experts))


class Batched(Mixture):
    """A product with a matrix for each expert, of all tokens."""

    def forward(self, x: Tensor) -> Tensor:
        weights, rows = self.route(x).flatten(0, 1), x.flatten(0, 1)
        y = functional.gelu(rows.expand(EXPERTS, -1, -1) @ self.up) @ self.down
        sums: Tensor = (y * weights.t()[..., None]).sum(0)
        return sums.view(x.shape)


class Gathered(Mixture):
    """A matrix for each row, gathered by the expert's number."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        gates, chosen = self.router(rows).softmax(-1).topk(2, dim=-1)
        picks = chosen.flatten()
        y = torch.bmm(rows.repeat_interleave(2, 0).unsqueeze(1), self.up[picks]).squeeze(1)
        y = torch.bmm(self.down.mT[picks], functional.gelu(y).unsqueeze(-1)).squeeze(-1)
        sums: Tensor = (y * gates.reshape(-1, 1)).view(len(rows), 2, -1).sum(1)
        return sums.view(x.shape)


class OneHot(Mixture):
    """One expert for each token, found by one-hot dispatch with a capacity, as in GShard and Switch."""

    def forward(self, x: Tensor) -> Tensor:
        rows, capacity = x.flatten(0, 1), 5
        gates, chosen = self.router(rows).softmax(-1).max(-1)
        hot = functional.one_hot(chosen, EXPERTS)
        place = (hot.cumsum(0) * hot).sum(-1) - 1
        kept = (place < capacity).to(x.dtype)[:, None, None]
        slots = functional.one_hot(place.clamp(max=capacity - 1), capacity)
        dispatch = (hot[:, :, None] * slots[:, None, :]).to(x.dtype) * kept
        y = torch.einsum("th,tec->ech", rows, dispatch)
        y = functional.gelu(torch.einsum("ech,ehf->ecf", y, self.up))
        y = torch.einsum("ecf,efh->ech", y, self.down)
        sums: Tensor = torch.einsum("ech,tec->th", y, dispatch * gates[:, None, None])
        return sums.view(x.shape)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize(
    ("mixture", "dims"),
    [(Summed, {0, 1, None}), (Batched, {0}), (Gathered, {1, 2}), (OneHot, {1, 2}), (Mixture, {1, 2})],
)
def test_mixtures_that_compute_all_rows_are_divided_and_exact(
    mixture: type[nn.Module], dims: set[int | None], mesh: tuple[int, int, int]
) -> None:
    """By experts or in width; only the biases that are added once are whole."""
    torch.manual_seed(0)
    program = compile_tokens(vary(mixture)(), mesh)
    weights = {n: p.placement["tensor"].dim for n, p in program.manifest.parameters.items() if ".mlp." in n}
    assert {dim for name, dim in weights.items() if "router" not in name} == dims
    verify_exactly(program)


@pytest.mark.timeout(120)
def test_autocast_multiplies_experts_in_half_precision() -> None:
    model = build("MixtralForCausalLM")
    with torch.autocast("cpu", torch.bfloat16):
        program = compile_tokens(model, (2, 1, 1))
    assert "bf16[<=32, 96]" in program.rank(0).code
    program.check()
    assert program.verify(dtype="model").passed


ROUTE = "layers1_mlp_gate_topk_1, number=4, own=2"
READ = 'p["model.layers.1.mlp.experts.down_proj"]'
FAULTS = {
    # What check says of it.
    "the gates are not read through f": (
        *("layers1_mlp_gate_div_f, layers1_mlp_experts_order", "layers1_mlp_gate_div, layers1_mlp_experts_order"),
        r"layers1_mlp_experts_combine \(program_00.py:\d+\) is divided and reads layers1_mlp_gate_div as it is",
    ),
    "the tokens are not read through f": (
        *("layers1_mlp_reshape_f, layers1_mlp_experts_order", "layers1_mlp_reshape, layers1_mlp_experts_order"),
        r"layers1_mlp_experts_dispatch \(program_00.py:\d+\) is divided and reads layers1_mlp_reshape as it is",
    ),
    "expert weights have their gradients summed over the tensor ranks": (
        *(READ, f"collectives.copy_to_tensor(rank, {READ})"),
        r"\(program_00.py:\d+\) hands model_layers_1_mlp_experts_down_proj, which is divided along dimension 0",
    ),
    "all experts are routed to each rank's": (
        *(ROUTE, ROUTE.replace("own=2", "own=4")),
        r"program_00.py:\d+: grouped_linear failed: .*counts \[4\], expected .*\[experts\]",
    ),
    "the first experts are routed to those of each rank": (
        *(ROUTE, ROUTE.replace("number=4", "number=2")),
        r"layers1_mlp_experts_grouped_linear \(program_00.py:\d+\) reads .*layers1_mlp_experts_counts, which is whole",
    ),
    "an auxiliary loss is counted on each rank": (
        *("aten.mul(mul_1, 0.001)", "aten.mul(collectives.reduce_from_tensor(rank, mul_1), 0.001)"),
        r"all-reduces mul_1, which is whole on every tensor rank already, and so multiplies it by their number",
    ),
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("fault", FAULTS)
def test_check_finds_faults_of_experts_with_their_line(fault: str) -> None:
    old, new, said = FAULTS[fault]
    program = compile_tokens(build("MixtralForCausalLM"), (2, 1, 1))
    with pytest.raises((ProgramError, RecordingError), match=said):
        rewrite((old, new))(program).check()


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("old", "new"),
    [
        (ROUTE, f"aten.remainder(aten.add({ROUTE.split(',')[0]}, 1), 4), number=4, own=2"),
        ("layers1_mlp_gate_div_f, layers1_mlp_experts_order", "layers1_mlp_gate_div_f, layers0_mlp_experts_order"),
    ],
)
def test_verify_finds_rows_of_the_neighbours_expert_with_their_line(old: str, new: str) -> None:
    program = rewrite((old, new))(compile_tokens(build("MixtralForCausalLM"), (2, 1, 1)))
    program.check()
    report = program.verify()
    lines = program.rank(0).code.splitlines()
    named = int(str(report).partition("first wrong value is made at program_00.py:")[2].split(",")[0])
    assert not report.passed
    assert lines[named - 1].startswith("    layers1_mlp_experts_"), lines[named - 1]


def test_experts_of_the_users_own_are_traced_as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the user registered is the user's, and is divided in width."""
    moe = pytest.importorskip("transformers.integrations.moe")

    def own(*args: Any, **kwargs: Any) -> Any:
        return moe.batched_mm_experts_forward(*args, **kwargs)

    monkeypatch.setitem(moe.ALL_EXPERTS_FUNCTIONS, "own", own)
    model: Any = build("MixtralForCausalLM")
    model.set_experts_implementation("own")
    program = compile_tokens(model, (2, 1, 1))
    assert "kernels.grouped_linear" not in program.rank(0).code
    assert divided_dims(program) == {1, 2}
    verify_exactly(program)


def test_a_forward_of_the_users_own_class_is_traced_as_written() -> None:
    """Under transformers' decorator too: it may do what the interface does not know, here halve the result."""
    moe = pytest.importorskip("transformers.integrations.moe")

    @moe.use_experts_implementation
    class Halved(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, HIDDEN) / HIDDEN**0.5)

        def forward(self, x: Tensor, chosen: Tensor, gates: Tensor) -> Tensor:
            shares = torch.zeros(len(x), EXPERTS, dtype=x.dtype).scatter(1, chosen, gates)
            result: Any = 0.5 * sum(shares[:, e, None] * torch.tanh(x @ self.up[e]) for e in range(EXPERTS))
            return cast(Tensor, result)

    class Own(Mixture):
        def __init__(self) -> None:
            super().__init__()
            self.mine = Halved(SimpleNamespace(_experts_implementation="eager"))

        def forward(self, x: Tensor) -> Tensor:
            gates, chosen = self.router(rows := x.flatten(0, 1)).softmax(-1).topk(2, dim=-1)
            result: Tensor = self.mine(rows, chosen, gates)
            return result.view(x.shape)

    torch.manual_seed(0)
    program = compile_tokens(vary(Own)(), (2, 1, 1))
    assert "kernels.grouped_linear" not in program.rank(0).code
    verify_exactly(program)


def test_dropout_of_sorted_rows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its mask would be another one on each mesh."""
    model = build("MixtralForCausalLM", intermediate_size=40)
    kind: Any = type(model.get_submodule("model.layers.0.mlp.experts"))
    gate = kind._apply_gate
    monkeypatch.setattr(kind, "_apply_gate", lambda own, x: functional.dropout(gate(own, x), 0.1, own.training))
    with pytest.raises(ValueError, match=r"moe.py:\d+.* is over \[32, 40\], rows in the order of their experts"):
        compile_tokens(model, (2, 1, 1))


class Looped(Summed):
    """The tokens of each expert, in ways that people pick them and put their rows back."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        gates, chosen = self.router(rows).softmax(-1).topk(2, dim=-1)
        result: Tensor = self.mix(rows, gates, chosen)
        return result.view(x.shape)

    def mix(self, x: Tensor, gates: Tensor, chosen: Tensor) -> Tensor:
        raise NotImplementedError


class Mixtral(Looped):
    """As in transformers before version 5; so are Qwen3-MoE and OLMoE."""

    def mix(self, x: Tensor, gates: Tensor, chosen: Tensor) -> Tensor:
        mask, out = functional.one_hot(chosen, EXPERTS).permute(2, 1, 0), torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            slots, tokens = torch.where(mask[e])
            rows = expert(x[None, tokens].reshape(-1, HIDDEN)) * gates[tokens, slots, None]
            out.index_add_(0, tokens, rows.to(x.dtype))
        return out


class Hits(Looped):
    """As in transformers from 4.53 on: an expert without tokens is left out, which a program takes too."""

    def mix(self, x: Tensor, gates: Tensor, chosen: Tensor) -> Tensor:
        mask, out = functional.one_hot(chosen, EXPERTS).permute(2, 1, 0), torch.zeros_like(x)
        for e in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
            slots, tokens = torch.where(mask[e].squeeze(0))
            rows = self.experts[int(e)](x[None, tokens].reshape(-1, HIDDEN)) * gates[tokens, slots, None]
            out.index_add_(0, tokens, rows.to(x.dtype))
        return out


class Numbered(Looped):
    """As in transformers from 5 on: the mask is read by the number itself."""

    def mix(self, x: Tensor, gates: Tensor, chosen: Tensor) -> Tensor:
        mask, out = functional.one_hot(chosen, EXPERTS).permute(2, 1, 0), torch.zeros_like(x)
        for e in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
            e = e[0]
            if e == EXPERTS:
                continue
            slots, tokens = torch.where(mask[e])
            out.index_add_(0, tokens, self.experts[int(e)](x[tokens]) * gates[tokens, slots, None])
        return out


class Deepseek(Looped):
    """As in the code published with DeepSeek-V2; all tokens have the first expert besides."""

    def mix(self, x: Tensor, gates: Tensor, chosen: Tensor) -> Tensor:
        repeated, chosen = x.repeat_interleave(2, 0), chosen.flatten()
        out = torch.empty_like(repeated)
        for e, expert in enumerate(self.experts):
            out[chosen == e] = expert(repeated[chosen == e])
        result: Tensor = (out.view(*gates.shape, -1) * gates.unsqueeze(-1)).sum(1) + self.experts[0](x)
        return result


class Nonzero(Looped):
    def mix(self, x: Tensor, gates: Tensor, chosen: Tensor) -> Tensor:
        out, weights = torch.zeros_like(x), torch.zeros(len(x), EXPERTS, dtype=x.dtype).scatter(1, chosen, gates)
        for e, expert in enumerate(self.experts):
            tokens = (weights[:, e] > 0).nonzero().squeeze(-1)
            out = out.index_add(0, tokens, weights[tokens, e, None] * expert(x[tokens]))
        return out


class Added(Looped):
    """Onto what is there already, behind a norm of each row."""

    def mix(self, x: Tensor, gates: Tensor, chosen: Tensor) -> Tensor:
        out = x.clone()
        for e, expert in enumerate(self.experts):
            tokens, slots = torch.where(chosen == e)
            out[tokens] += gates[tokens, slots, None] * functional.layer_norm(expert(x[tokens]), (HIDDEN,))
        return out


class Rewritten(Looped):
    """What rows are taken from, or put into, changes in between, or what was there."""

    def mix(self, x: Tensor, gates: Tensor, chosen: Tensor) -> Tensor:
        x, out = x.clone(), torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            tokens, slots = torch.where(chosen == e)
            rows, old = x[tokens], out[tokens]
            x.mul_(0.9)
            (out.add_(x) if e % 2 else old.mul_(0.5))
            out[tokens] = old + gates[tokens, slots, None] * expert(rows)
        return out


class TopOne(Looped):
    """One expert for each token, up to a capacity (Switch), found in the two dimensions of the batch."""

    def forward(self, x: Tensor) -> Tensor:
        gates, chosen = self.router(x).softmax(-1).max(-1)
        mask = functional.one_hot(chosen, EXPERTS)
        mask = mask * (mask.cumsum(1) <= 3)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            own = mask[..., e] == 1
            out[own] = expert(x[own]) * gates[own].unsqueeze(-1)
        return out


@pytest.mark.timeout(120)
@pytest.mark.parametrize("mesh", [pytest.param((2, 1, 1), marks=pytest.mark.slow), (2, 2, 1)])
@pytest.mark.parametrize("mixture", [Mixtral, Hits, Numbered, Deepseek, Nonzero, Added, Rewritten, TopOne])
def test_loops_over_the_tokens_of_each_expert_are_divided_in_width(
    mixture: type[nn.Module], mesh: tuple[int, int, int]
) -> None:
    """No more rows are multiplied than an expert has; a bias, or a norm, is added to whole rows."""
    torch.manual_seed(0)
    program = compile_tokens(vary(mixture)(), mesh)
    assert divided_dims(program) == {0, 1, None}
    assert "".join(program.texts).count("kernels.grouped_linear(") == 2 * 2 * EXPERTS
    verify_exactly(program)


def test_experts_with_weights_of_their_own_are_not_divided_over_data_ranks() -> None:
    with pytest.raises(ValueError, match=r"expert=2: .*each expert has weights of its own, and only stacked ones"):
        compile_tokens(vary(Hits)(), (1, 1, 2), expert=2)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("mesh", [(2, 1, 1), pytest.param((2, 2, 1), marks=pytest.mark.slow)])
@pytest.mark.parametrize("capacity", [3, pytest.param(64, marks=pytest.mark.slow)])
def test_switch_is_divided_in_width_and_exact(capacity: int, mesh: tuple[int, int, int]) -> None:
    """With its routers' losses; some tokens are above the capacity of 3, and have no expert."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 48,
        "num_heads": 4,
        "num_experts": 4,
    }
    layers: dict[str, Any] = {"num_layers": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
    others: dict[str, Any] = {"dropout_rate": 0.0, "router_jitter_noise": 0.0, "decoder_start_token_id": 0}
    config = transformers.SwitchTransformersConfig(expert_capacity=capacity, **sizes, **layers, **others)
    model = randomize(transformers.SwitchTransformersForConditionalGeneration(config))
    torch.manual_seed(1)
    given: dict[str, Any] = dict.fromkeys(("input_ids", "labels"), torch.randint(1, VOCABULARY, (2, LENGTH)))
    given |= dict.fromkeys(("attention_mask", "decoder_attention_mask"), torch.ones(2, LENGTH, dtype=torch.long))
    program = autoptd.compile(model, mesh=mesh, example_inputs=given | {"output_router_logits": True})
    assert divided_dims(program) == {0, 1}
    (line,) = (line for line in program.log if "one without tokens has a gradient of 0" in line)
    assert "for expert_idx in expert_hit" in line
    verify_exactly(program)


class RefusedHits(Looped):
    """A loop over the experts that have tokens which does one thing more, or in another way."""

    way = ""

    def mix(self, x: Tensor, gates: Tensor, chosen: Tensor) -> Tensor:
        mask, out, turns = functional.one_hot(chosen, EXPERTS).permute(2, 1, 0), torch.zeros_like(x), 0
        if self.way == "a mask with negative numbers":
            mask = 1 - mask
        hits: Any = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
        if self.way == "it writes to its mask":
            mask[0].zero_()
        if self.way == "it numbers its turns":
            hits = (e for _, e in enumerate(hits))
        taken: list[int] = []
        for e in hits:
            slots, tokens = torch.where(mask[e].squeeze(0))
            rows = self.experts[int(e)](x[tokens]) * gates[tokens, slots, None]
            out = out.index_add(0, tokens, rows)
            if self.way == "it counts its turns":
                turns += 1
            elif self.way == "it lists its experts":
                taken.append(int(e))
            elif self.way == "it is left early":
                break
            elif self.way == "it adds to all rows":
                out = out + x
            elif self.way == "it writes to all rows":
                out.mul_(2)
        return out / max(turns, len(taken), 1)


HITS = {
    **dict.fromkeys(["it counts its turns", "it numbers its turns", "it lists its experts"], "counts its turns"),
    "it is left early": "is left early",
    "it adds to all rows": "makes a value .aten.add.Tensor.",
    "it writes to all rows": "makes a value .aten.mul_.Tensor.",
    "it writes to its mask": "has a mask that is written to",
    "a mask with negative numbers": "control flow depends on a tensor's values",
}


@pytest.mark.parametrize("way", HITS)
def test_a_loop_over_the_experts_with_tokens_that_does_more_is_refused(way: str) -> None:
    with pytest.raises(ValueError, match=HITS[way]):
        compile_tokens(vary(type("Own", (RefusedHits,), {"way": way}))(), (1, 1, 1))


def test_partial_sums_of_a_loop_are_reduced_once() -> None:
    torch.manual_seed(0)
    program = compile_tokens(vary(habits.Looped)(), (2, 1, 1))
    assert any("5 all-reduces forward" in line for line in program.log)
    verify_exactly(program)


class Refused(Looped):
    """One way of many in which not each row stands for itself, or a token may have several."""

    way: Any = None

    def mix(self, x: Tensor, gates: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            tokens, slots = torch.where(chosen == e)
            out = out.index_add(0, *self.way(tokens, slots, expert(x[tokens])))
        return out


WAYS: dict[str, Any] = {
    "rows meet in a mean": lambda own, tokens, slots, rows: (tokens, rows - rows.mean(0)),
    "rows meet in a norm": lambda own, tokens, slots, rows: (tokens, functional.layer_norm(rows, rows.shape)),
    "rows are counted": lambda own, tokens, slots, rows: (tokens, rows * rows.shape[0]),
    "the first row is left out": lambda own, tokens, slots, rows: (tokens[1:], rows[1:]),
    "rows are put to the slots": lambda own, tokens, slots, rows: (slots, rows),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_loop_in_which_rows_do_not_stand_for_themselves_is_refused(way: str) -> None:
    with pytest.raises(ValueError, match=r"where\.default makes a number or size from a tensor's values"):
        compile_tokens(vary(type("Own", (Refused,), {"way": WAYS[way]}))(), (1, 1, 1))


class AtOnce(Looped):
    """The rows of all experts, of which a token has several."""

    def mix(self, x: Tensor, gates: Tensor, chosen: Tensor) -> Tensor:
        weights = torch.zeros(len(x), EXPERTS, dtype=x.dtype).scatter(1, chosen, gates)
        tokens, experts = torch.where(weights > 0)
        rows = self.experts[0](x[tokens]) * weights[tokens, experts, None]
        return torch.zeros_like(x).index_add(0, tokens, rows)


class OtherMask(Looped):
    """A mask that is written twice, and means something else the second time."""

    def mix(self, x: Tensor, gates: Tensor, chosen: Tensor) -> Tensor:
        out, first = torch.zeros_like(x), (chosen := chosen.clone())[:, 0]
        for e, expert in enumerate(self.experts):
            rows = expert(x[first == e])
            chosen.remainder_(EXPERTS)
            out[first == e] = rows
        return out


@pytest.mark.parametrize("mixture", [AtOnce, OtherMask])
def test_a_loop_over_masks_that_may_have_more_rows_is_refused(mixture: type[nn.Module]) -> None:
    with pytest.raises(ValueError, match="makes a number or size from a tensor's values"):
        compile_tokens(vary(mixture)(), (1, 1, 1))


class Sorted(Mixture):
    """Rows sorted by expert, and torch's grouped product."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        gates, chosen = self.router(rows).softmax(-1).topk(2, dim=-1)
        picks, order = chosen.flatten().sort()
        ends = functional.one_hot(picks, EXPERTS).sum(0).cumsum(0, dtype=torch.int32)
        up, down = self.up.bfloat16(), self.down.bfloat16()
        y = functional.gelu(functional.grouped_mm(rows[order // 2].bfloat16(), up, offs=ends))
        y = functional.grouped_mm(y, down, offs=ends) * gates.flatten()[order, None]
        return torch.zeros_like(rows).index_add(0, order // 2, y.to(x.dtype)).view(x.shape)


def test_rows_that_the_model_sorts_are_divided_in_width() -> None:
    """In half precision, the only one in which torch's product is traced."""
    torch.manual_seed(0)
    program = compile_tokens(vary(Sorted)(), (2, 1, 1))
    weights = [p for n, p in program.manifest.parameters.items() if n.endswith(("up", "down"))]
    assert {p.placement["tensor"].dim for p in weights} == {1, 2}
    program.check()
    assert program.verify(dtype="model").passed
