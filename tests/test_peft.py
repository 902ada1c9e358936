"""Adapters of PEFT on any mesh: each method's gradients, what frozen weights cost, and adapters in PEFT's format."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import autoptd
from autoptd.compiled import CompiledProgram
from autoptd.passes.cost.call_work import count_flops
from autoptd.passes.cost.work import backward_work, forward_work
from autoptd.passes.ir.program import find_trained
from autoptd.runtime import collectives, kernels
from samples.gpt import GPTConfig
from samples.huggingface import make_gpt2, make_llama
from tests.ranks import run_ranks

peft = pytest.importorskip("peft")

SIZES = GPTConfig(vocab_size=96, block_size=16, n_layer=2, n_head=4, n_embd=32)
QUICK = [(2, 1, 1), (2, 2, 1)]
MESHES = [(1, 1, 1), (1, 2, 1), (1, 2, 2), (2, 2, 2), *QUICK]
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def llama(**changes: Any) -> nn.Module:
    model: Any = make_llama(SIZES)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**model.config.to_dict() | changes))


def mixture() -> nn.Module:
    sizes: dict[str, Any] = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    model = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**sizes, **heads, max_position_embeddings=16, use_cache=False)
    )
    model.set_experts_implementation("batched_mm")
    return model


def lora(**options: Any) -> Any:
    return peft.LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": LINEARS, **options})


def gpt2() -> nn.Module:
    return make_gpt2(SIZES)


CONV1D = ["c_attn", "c_proj", "c_fc"]
VIRTUAL: dict[str, Any] = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 4}
IA3 = {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]}
METHODS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "lora": (llama, lora),
    "dropout": (llama, lambda: lora(target_modules="all-linear", lora_dropout=0.1, use_rslora=True)),
    "two matrices": (llama, lambda: lora(target_modules=["q_proj", "v_proj"])),
    "biases": (gpt2, lambda: lora(lora_bias=True, target_modules=["c_attn", "c_proj"])),
    "conv1d": (gpt2, lambda: lora(target_modules=CONV1D, fan_in_fan_out=True)),
    "embedding": (llama, lambda: lora(target_modules=["embed_tokens", "q_proj", "o_proj"])),
    "saved modules": (llama, lambda: lora(modules_to_save=["lm_head", "embed_tokens"])),
    "dora": (llama, lambda: lora(use_dora=True)),
    "dora, dropout": (llama, lambda: lora(use_dora=True, lora_dropout=0.1)),
    "vera": (llama, lambda: peft.VeraConfig(r=4, target_modules=LINEARS)),
    "vera, one width": (llama, lambda: peft.VeraConfig(r=4, target_modules=LINEARS[:4])),
    "oft": (llama, lambda: peft.OFTConfig(oft_block_size=8, r=0, target_modules=LINEARS)),
    "ia3": (llama, lambda: peft.IA3Config(**IA3)),
    "prompt": (llama, lambda: peft.PromptTuningConfig(**VIRTUAL)),
    "prefix": (llama, lambda: peft.PrefixTuningConfig(**VIRTUAL)),
    "tied": (lambda: llama(tie_word_embeddings=True), lora),
    "mixture": (mixture, lambda: lora(target_modules=["q_proj", "v_proj", "o_proj"])),
}


def adapt(name: str, *, checkpoints: bool = False) -> nn.Module:
    """The model with the method's adapters, none of which does nothing, as LoRA's do at first."""
    torch.manual_seed(0)
    base, config = METHODS[name]
    model: Any = peft.get_peft_model(base(), config())
    for parameter in (p for p in model.parameters() if p.requires_grad):
        with torch.no_grad():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    if checkpoints:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    return model.train()  # type: ignore[no-any-return]


def batch(rows: int) -> dict[str, Tensor]:
    ids = torch.randint(96, (rows, 16), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def compile_adapted(model: nn.Module, mesh: tuple[int, int, int]) -> CompiledProgram:
    return autoptd.compile(model, mesh, example_inputs=batch(1), num_microbatches=2)


def slow_but_quick(name: str, mesh: tuple[int, int, int]) -> Any:
    """A case, slow but for what shows most."""
    quick = mesh in QUICK and name in ("lora", "conv1d", "embedding")
    return pytest.param(name, mesh, marks=() if quick else pytest.mark.slow)


@pytest.mark.parametrize(("name", "mesh"), [slow_but_quick(name, mesh) for name in METHODS for mesh in MESHES])
def test_adapters_have_the_plain_models_gradients(name: str, mesh: tuple[int, int, int]) -> None:
    model = adapt(name)
    program = compile_adapted(model, mesh)
    program.check()
    report = program.verify()
    assert report.passed, report
    assert {*report.gradient_errors} == {n for n, p in model.named_parameters() if p.requires_grad}


@pytest.fixture(scope="module")
def program() -> CompiledProgram:
    return compile_adapted(adapt("lora"), (2, 1, 1))


def test_an_update_of_a_partial_sum_joins_its_all_reduce(program: CompiledProgram) -> None:
    """Two in a layer, one of the embedding; each update is added by the product that makes it."""
    targets = [node.target for stage in program.stages for node in stage.graph.nodes]
    assert targets.count(collectives.reduce_from_tensor) == 2 * SIZES.n_layer + 1
    assert targets.count(kernels.add_linear) == len(LINEARS) * SIZES.n_layer
    partial = [n for n, p in program.manifest.parameters.items() if p.placement.has_partial_gradient]
    ends = {n.split(".", 6)[-1].removesuffix(".default.weight") for n in partial}
    assert ends == {
        *("o_proj.lora_B", "down_proj.lora_B"),
        *(f"{name}_proj.lora_A" for name in ("q", "k", "v", "gate", "up")),
    }


class Updated(nn.Module):
    """A gated layer, and a low-rank update that is joined to it by `body`."""

    def __init__(self, body: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 8), nn.Linear(8, 32)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.a, self.b = nn.Linear(16, 2, bias=False), nn.Linear(2, 8, bias=False)
        self.slopes = nn.Parameter(torch.rand(8))
        self.body = body

    def forward(self, idx: Tensor) -> Tensor:
        wide = self.up(self.embed(idx)).relu()
        result: Tensor = self.head(self.body(self, self.down(wide), self.b(self.a(wide)))).logsumexp(-1).mean()
        return result


BODIES: dict[str, tuple[Callable[[Any, Tensor, Tensor], Tensor], int]] = {
    "scaled": (lambda m, base, update: base + update * 0.5, 1),
    "first": (lambda m, base, update: update + base, 1),
    "by a vector": (lambda m, base, update: base + m.slopes * update * 0.5, 1),
    "squared": (lambda m, base, update: base + update * update, 2),
    "doubled": (lambda m, base, update: base + (update + update), 2),
    "with a factor": (lambda m, base, update: torch.add(base, update, alpha=2), 2),
    "read twice": (lambda m, base, update: base + update + update.tanh(), 2),
    "a base read twice": (lambda m, base, update: base * base + (base + update), 2),
    "of another operator": (lambda m, base, update: base + update.tanh(), 2),
}


@pytest.mark.parametrize("name", BODIES)
def test_what_is_linear_joins_an_all_reduce(name: str) -> None:
    """And only that: with the all-reduce of the embedding there are so many more."""
    torch.manual_seed(0)
    body, count = BODIES[name]
    example = {"idx": torch.randint(32, (2, 4))}
    program = autoptd.compile(Updated(body), (2, 1, 1), example_inputs=example, num_microbatches=2)
    found = [n.target for n in program.stages[0].graph.nodes].count(collectives.reduce_from_tensor)
    looked_up = sum(n.target is kernels.embedding for n in program.stages[0].graph.nodes)
    assert found - looked_up == count
    assert program.verify().passed


BASE, UPDATE = "layers0_self_attn_o_proj_base_layer", "layers0_self_attn_o_proj_lora_A_default"
EDITS = [
    (f"{BASE}, {UPDATE}", f"collectives.reduce_from_tensor(rank, {BASE}), {UPDATE}", f"partial sum {UPDATE}"),
    (f"{BASE}, {UPDATE}", f"{BASE}, collectives.reduce_from_tensor(rank, {UPDATE})", f"partial sum {BASE}"),
    (f"{BASE}, {UPDATE}", f"{BASE}, aten.mul({UPDATE}, {UPDATE})", f"partial sum {UPDATE}"),
    (f"{BASE}, {UPDATE}", f"{BASE}, aten.div(1.0, {UPDATE})", f"partial sum {UPDATE}"),
    (f"{BASE}, {UPDATE}", f"{BASE}, aten.mul(2.0, {UPDATE})", ""),
]


@pytest.mark.parametrize(("old", "new", "refused"), EDITS, ids=[new for _, new, _ in EDITS])
def test_a_partial_sum_is_read_by_what_is_linear(
    program: CompiledProgram, tmp_path: Path, old: str, new: str, refused: str
) -> None:
    program.save(tmp_path)
    file = tmp_path / "program_00.py"
    text = file.read_text()
    assert text.count(old) == 1
    file.write_text(text.replace(old, new))
    with pytest.raises(autoptd.ProgramError, match=refused) if refused else nullcontext():
        autoptd.load(tmp_path).check()


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_checkpointed_layers_with_inputs_that_want_gradients(mesh: tuple[int, int, int]) -> None:
    report = compile_adapted(adapt("dropout", checkpoints=True), mesh).verify()
    assert report.passed, report


def test_the_backward_computes_what_trained_parameters_need() -> None:
    """Counted by torch, of the plain model: no gradient of a frozen weight, and none before the first adapter."""
    model = adapt("two matrices")
    with FlopCounterMode(display=False) as counter:
        model(**batch(1)).loss.backward()
    (stage,) = compile_adapted(model, (1, 1, 1)).stages
    trained = find_trained(stage)
    calls = [n for n in stage.graph.nodes if n.target is not kernels.grouped_attention]  # which torch does not count
    works = [work for n in calls for work in (forward_work(n), backward_work(n, trained))]
    assert sum(product.flops for work in works for product in work.products) == counter.get_total_flops()


def test_adapters_are_saved_and_loaded_in_pefts_format(tmp_path: Path) -> None:
    """After a step in which frozen weights have no gradient and no state."""
    model: Any = adapt("saved modules")
    program = compile_adapted(model, (2, 2, 1))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}

    def train(rank: int) -> dict[str, Tensor]:
        parallel = program.bind()
        optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.1)
        parallel(**batch(2)).loss.backward()
        optimizer.step()
        for name, parameter in parallel.named_parameters():
            has = parameter.grad is not None, parameter in optimizer.state
            assert has == (name in trained, name in trained), name
        state: dict[str, Tensor] = parallel.full_state_dict()
        if rank == 0:
            model.save_pretrained(tmp_path, state_dict=state)
        return state

    stepped, *_ = run_ranks(train, 4)
    loaded = peft.PeftModel.from_pretrained(METHODS["saved modules"][0](), tmp_path, is_trainable=True)
    before, after = model.state_dict(), loaded.state_dict()
    assert {name for name, p in loaded.named_parameters() if p.requires_grad} == trained
    for name in trained:
        assert torch.equal(after[name], stepped[name])
        assert not torch.equal(after[name], before[name])


# Half of the FLOPs, but for small products that one tensor rank repeats: of four inputs or outputs in 32, and of OFT's
# blocks of 8, where a layer has all its inputs.
SHARES = {"lora": 0.57, "dora": 0.57, "vera": 0.53, "vera, one width": 0.53, "oft": 0.62}


@pytest.mark.parametrize("name", SHARES)
def test_methods_are_divided(name: str) -> None:
    model = adapt(name)
    one, two = (sum(map(count_flops, compile_adapted(model, (t, 1, 1)).stages)) for t in (1, 2))
    assert two / one < SHARES[name]
