"""Programs that recompute train bit for bit like those that keep everything, on processes and on threads, though they
are cut elsewhere: the cut weighs what is repeated."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import autoptd
from autoptd.runtime.comm.connection import Connection, run_threads
from autoptd.runtime.engine.executor import ShapeFunctions
from autoptd.runtime.module.parallel import Parallel
from autoptd.runtime.program.program_text import read_program
from samples.gpt import GPT, GPTConfig
from tests.parity import Batch, Run, Training, loss_of, train_compiled
from tests.plain_models import LENGTH, VOCABULARY, _llama_like

MICROBATCHES, LAYERS = 4, 4
MODES: list[str | int] = ["full", "selective", 2, "optimal"]


def make_sample() -> nn.Module:
    return GPT(GPTConfig(VOCABULARY, LENGTH, LAYERS, 4, 16, dropout=0.1))


def make_gpt2() -> nn.Module:
    sizes: dict[str, Any] = {"n_layer": LAYERS, "n_embd": 16, "n_head": 4, "n_positions": LENGTH}
    drops: dict[str, Any] = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
    config = transformers.GPT2Config(vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0, **sizes, **drops)
    config._attn_implementation = "eager"
    return transformers.GPT2LMHeadModel(config)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "sample": make_sample,
    "gpt2": make_gpt2,
    "llama": lambda: _llama_like("Llama", attention_dropout=0.1),
}


def make_model(name: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().to(dtype).train()


def make_batches(name: str) -> list[Batch]:
    torch.manual_seed(1)
    names = ("idx", "targets") if name == "sample" else ("input_ids", "labels")
    return [{n: torch.randint(0, VOCABULARY, (MICROBATCHES, LENGTH)) for n in names} for _ in range(2)]


@cache
def compile_model(name: str, dtype: torch.dtype, mesh: Any, recompute: str | int) -> autoptd.CompiledProgram:
    example = {n: x[:1] for n, x in make_batches(name)[0].items()}
    options: dict[str, Any] = {"num_microbatches": MICROBATCHES, "num_model_chunks": 2 if mesh[1] > 1 else 1}
    return autoptd.compile(make_model(name, dtype), mesh, example_inputs=example, recompute=recompute, **options)


@cache
def train_keeping(name: str, dtype: torch.dtype, mesh: Any) -> Run:
    program = compile_model(name, dtype, mesh, "none")
    return train_compiled(program, make_batches(name), Training(lr=0.1))


def check_same(found: Run, expected: Run) -> None:
    for own, other in zip(found.steps, expected.steps, strict=True):
        assert torch.equal(own.loss, other.loss)
        assert own.gradients.keys() == other.gradients.keys()
        differing = [n for n, g in other.gradients.items() if not torch.equal(g, own.gradients[n])]
        assert not differing
    assert all(torch.equal(value, found.state[name]) for name, value in expected.state.items())


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("name", "mesh", "dtype", "recompute"),
    [
        pytest.param(name, *on, mode, marks=[pytest.mark.slow] * (k > 0 or i != j))
        for i, name in enumerate(MODELS)
        for j, mode in enumerate(MODES[:3])
        for k, on in enumerate([((2, 2, 1), torch.float32), ((1, 1, 1), torch.float64), ((1, 2, 1), torch.float64)])
    ],
    ids=str,
)
def test_processes(name: str, mesh: Any, dtype: torch.dtype, recompute: str | int) -> None:
    program = compile_model(name, dtype, mesh, recompute)
    found = train_compiled(program, make_batches(name), Training(lr=0.1))
    check_same(found, train_keeping(name, dtype, mesh))


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["full", 2])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(name: str, dtype: torch.dtype, recompute: str | int) -> None:
    test_processes(name, (1, 2, 1), dtype, recompute)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("recompute", MODES)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("mesh", "dtype"),
    [((1, 1, 1), torch.float32), ((2, 2, 1), torch.float64), ((2, 2, 1), torch.bfloat16)],
    ids=lambda x: str(x),
)
def test_processes_in_the_other_precision(name: str, mesh: Any, dtype: torch.dtype, recompute: str | int) -> None:
    test_processes(name, mesh, dtype, recompute)


def train_threads(program: autoptd.CompiledProgram, model: nn.Module, batch: Batch) -> dict[Any, Tensor]:
    """Losses and gradients, by tensor rank and name, after one step in training mode, the ranks as threads."""
    texts = [read_program(text, f"program_{i:02}.py") for i, text in enumerate(program.texts)]
    weights = {**program.buffers, **model.state_dict()}

    def step(connection: Connection) -> dict[Any, Tensor]:
        at = connection.rank.coordinates
        text = texts[at.pipeline]
        functions = ShapeFunctions(program.manifest, text, weights)
        parallel = Parallel(connection, functions).train()
        loss = loss_of(parallel(**batch))
        loss.backward()
        named = parallel.named_parameters()
        found: dict[Any, Tensor] = {(at.tensor, name): p.grad for name, p in named if p.grad is not None}
        return {**found, at: loss.detach()}

    return {key: value for own in run_threads(program.manifest, step) for key, value in own.items()}


@pytest.mark.slow
@pytest.mark.parametrize("recompute", MODES)
@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 2, 1)], ids=str)
def test_threads(mesh: Any, recompute: str | int) -> None:
    model, (batch, _) = make_model("gpt2", torch.float64), make_batches("gpt2")
    own, other = (
        train_threads(compile_model("gpt2", torch.float64, mesh, mode), model, batch) for mode in (recompute, "none")
    )
    assert own.keys() == other.keys()
    assert len(own) > 1
    assert all(torch.equal(value, own[key]) for key, value in other.items())


@pytest.mark.parametrize("name", MODELS)
def test_recomputing_programs_are_cut_elsewhere(name: str) -> None:
    """So that equal bits, above, say something."""
    found = set()
    for recompute in ("none", *MODES):
        program = compile_model(name, torch.float32, (2, 2, 1), recompute)
        found.add(tuple(tuple(b.name for b in stage.receives) for stage in program.manifest.stages))
    assert len(found) > 1


@pytest.mark.parametrize("recompute", MODES)
def test_verify(recompute: str | int) -> None:
    report = compile_model("sample", torch.float32, (2, 2, 1), recompute).verify()
    assert report.passed, str(report)


def test_a_step_without_gradients_recomputes_nothing() -> None:
    program = compile_model("sample", torch.float64, (1, 1, 1), "full")
    with torch.no_grad():
        loss = loss_of(program.bind()(**make_batches("sample")[0]))
    assert torch.equal(loss, train_keeping("sample", torch.float64, (1, 1, 1)).steps[0].loss)
