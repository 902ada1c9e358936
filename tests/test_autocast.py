"""A program captured under ``torch.autocast``, trained on real ranks beside the plain model under the same autocast."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoptd
from autoptd.runtime import aten
from autoptd.runtime.program.manifest_json import from_json, to_json
from samples.gpt import GPT, GPTConfig
from tests.generated_models import ModelConfig, make_batch, make_model
from tests.parity import Batch, Run, Step, train_compiled, train_plain
from tests.plain_models import HUGGING_FACE, LENGTH, VOCABULARY

Made = tuple[nn.Module, Batch]
MICROBATCHES = 2
BF16 = torch.bfloat16


def generated(**style: Any) -> Callable[[], Made]:
    config = ModelConfig(**style)
    return lambda: (make_model(config, dtype=torch.float32), make_batch(config, MICROBATCHES))


def sample_gpt() -> Made:
    torch.manual_seed(0)
    return GPT(GPTConfig(53, 8, 2, 4, 24)), make_batch(ModelConfig(), MICROBATCHES)


def transformers_model(name: str) -> Callable[[], Made]:
    def make() -> Made:
        torch.manual_seed(0)
        ids = torch.randint(0, VOCABULARY, (MICROBATCHES, LENGTH))
        return HUGGING_FACE[name]().train(), {"input_ids": ids, "labels": ids}

    return make


# Each value is cast for one operator only, so that gradients add up as autograd adds them.
SAME: dict[str, Callable[[], Made]] = {
    "gpt": sample_gpt,
    "gpt2": transformers_model("gpt2"),
    "packed": generated(projection="packed"),
    "per-head-tied": generated(projection="per_head", tied=True, vocabulary=48),
    "rms-rotary-gate": generated(
        projection="packed", rms_norm=True, rotary=True, gated=True, packed_gate=True, bias=False, qkv_bias=False
    ),
}
# One cast feeds several linears, or an operator is reordered: rounding differs.
NEAR: dict[str, Callable[[], Made]] = {
    "three-gated": generated(gated=True),
    "written-query-key-norm": generated(projection="packed", attention="written", query_key_norm=True, rotary=True),
    "llama": transformers_model("llama"),
}


def compiled(model: nn.Module, batch: Batch, mesh: tuple[int, int, int], **options: Any) -> autoptd.CompiledProgram:
    with torch.autocast("cpu", BF16):
        return autoptd.compile(model, mesh, example_inputs={n: x[:1] for n, x in batch.items()}, **options)


class Autocasting(nn.Module):
    """Calls `model` in a region of autocast, as a plain loop does."""

    def __init__(self, model: nn.Module, dtype: torch.dtype = BF16) -> None:
        super().__init__()
        self.model = model
        self.dtype = dtype

    def forward(self, **batch: Tensor) -> Any:
        with torch.autocast("cpu", self.dtype):
            return self.model(**batch)


def plain_run(model: nn.Module, batch: Batch, microbatches: int) -> Run:
    run = train_plain(Autocasting(model), [batch], microbatches)
    (step,) = run.steps
    run.steps[0] = Step(step.loss, {n.removeprefix("model."): g for n, g in step.gradients.items()})
    return run


def exact_run(model: nn.Module, batch: Batch) -> Step:
    return train_plain(copy.deepcopy(model).double(), [batch], MICROBATCHES).steps[0]


def check_rounding(found: Step, plain: Step, exact: Step) -> None:
    """Loss and gradients are within 4 times the plain run's error, or what bfloat16 can express."""
    largest = max(float(g.abs().max()) for g in exact.gradients.values())
    worse = {}
    assert set(found.gradients) == set(plain.gradients) == set(exact.gradients)
    for name, gradient in {**exact.gradients, "loss": exact.loss}.items():
        errors = [
            float(((step.loss if name == "loss" else step.gradients[name]).double() - gradient.double()).norm())
            for step in (found, plain)
        ]
        # A key bias has no gradient but for rounding.
        size = max(float(gradient.norm()), 0.01 * largest)
        if not errors[0] <= 4 * errors[1] + torch.finfo(BF16).eps * size:
            worse[name] = (*errors, size)
    assert not worse, f"(error, plain error, size): {worse}"


@pytest.mark.parametrize("name", SAME)
def test_on_one_rank_all_is_bit_for_bit_the_same(name: str) -> None:
    model, batch = SAME[name]()
    program = compiled(model, batch, (1, 1, 1), num_microbatches=MICROBATCHES, fuse=False, layout="bsh")
    assert program.manifest.autocast is BF16
    assert "torch.bfloat16" in program.texts[0]
    (found,) = train_compiled(program, [batch]).steps
    (plain,) = plain_run(model, batch, MICROBATCHES).steps
    assert torch.equal(found.loss, plain.loss)
    assert set(found.gradients) == set(plain.gradients)
    for parameter, gradient in plain.gradients.items():
        assert found.gradients[parameter].dtype is torch.float32
        assert torch.equal(found.gradients[parameter], gradient), parameter


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", [*SAME, *NEAR])
def test_on_a_mesh_the_error_is_that_of_the_plain_run(name: str) -> None:
    model, batch = {**SAME, **NEAR}[name]()
    program = compiled(model, batch, (2, 2, 1), num_microbatches=MICROBATCHES, num_model_chunks=1)
    (found,) = train_compiled(program, [batch]).steps
    (plain,) = plain_run(model, batch, MICROBATCHES).steps
    assert {g.dtype for g in found.gradients.values()} == {torch.float32}
    check_rounding(found, plain, exact_run(model, batch))


def test_a_region_inside_forward_is_what_is_on_around_compile() -> None:
    model, batch = sample_gpt()
    around = compiled(model, batch, (1, 2, 1), num_microbatches=MICROBATCHES)
    inside = autoptd.compile(_Region(model), (1, 2, 1), num_microbatches=MICROBATCHES, example_inputs=_first(batch))
    assert inside.manifest.autocast is None
    (one,), (other,) = train_compiled(around, [batch]).steps, train_compiled(inside, [batch]).steps
    assert torch.equal(one.loss, other.loss)
    for name, gradient in one.gradients.items():
        assert torch.equal(gradient, other.gradients[f"model.{name}"])


class _Region(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, idx: Tensor, targets: Tensor) -> Any:
        with torch.autocast("cpu", BF16):
            return self.model(idx, targets)


def _first(batch: Batch) -> Mapping[str, Tensor]:
    return {n: x[:1] for n, x in batch.items()}


def test_verify_promotes_the_casts_and_says_so() -> None:
    model, batch = NEAR["three-gated"]()
    report = compiled(model, batch, (2, 2, 1), num_microbatches=MICROBATCHES).verify()
    assert report.passed
    assert any("autocast" in note for note in report.notes)
    assert autoptd.compile(model, (1, 1, 1), example_inputs=_first(batch)).verify().notes == ()


def test_values_are_cast_once_and_the_manifest_keeps_the_dtype() -> None:
    model, batch = sample_gpt()
    program = compiled(model, batch, (1, 1, 1))
    (stage,) = program.stages
    cast = [str(n.args[0]) for n in stage.graph.nodes if n.target is aten.to.dtype and n.args[1] is BF16]
    assert len(cast) == len(set(cast))
    assert from_json(to_json(program.manifest)) == program.manifest


@pytest.mark.parametrize(("dtype", "warned"), [(BF16, False), (torch.float16, True)], ids=str)
def test_only_a_call_under_another_autocast_is_warned_of_and_once(dtype: torch.dtype, warned: bool) -> None:
    model, batch = sample_gpt()
    parallel = compiled(model, batch, (1, 1, 1), num_microbatches=MICROBATCHES).bind()
    with torch.autocast("cpu", dtype), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            parallel(**batch)
    assert ["autocast" in str(w.message) for w in seen] == [True] * warned


def test_constants_are_computed_as_written() -> None:
    """A product of constants outside of autocast stays in float32, whatever is on where it is computed."""
    model, batch = _Table(), {"idx": torch.arange(8).view(2, 4)}
    program = autoptd.compile(model, (1, 1, 1), example_inputs=_first(batch), num_microbatches=2)
    with torch.autocast("cpu", BF16), pytest.warns(UserWarning, match="autocast"):
        found = program.bind()(**batch)
    assert torch.equal(found, train_plain(model, [batch], 2).steps[0].loss)


class _Table(nn.Module):
    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(8, 4)
        self.register_buffer("table", torch.randn(4, 4))

    def forward(self, idx: Tensor) -> Tensor:
        out: Tensor = (self.embedding(idx) * (self.table @ self.table)).mean()
        return out


def test_a_shared_layer_is_cast_on_each_stage_that_uses_it() -> None:
    model, batch = _Shared(), make_batch(ModelConfig(vocabulary=24), MICROBATCHES)
    program = compiled(model, batch, (1, 2, 1), num_microbatches=MICROBATCHES, num_model_chunks=1)
    (found,) = train_compiled(program, [batch]).steps
    (plain,) = plain_run(model, batch, MICROBATCHES).steps
    check_rounding(found, plain, exact_run(model, batch))
    sizes = [tuple(b.shape) for stage in program.manifest.stages for b in stage.receives]
    assert (48, 48) not in sizes


class _Shared(nn.Module):
    """One layer, four times."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(24, 48)
        self.norm = nn.LayerNorm(48)
        self.layer = nn.Linear(48, 48)
        self.head = nn.Linear(48, 24)

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(idx)
        for _ in range(4):
            x = x + self.layer(self.norm(x)).tanh()
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())
