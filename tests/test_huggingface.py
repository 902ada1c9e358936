"""Models of transformers, nanoGPT and minGPT in float32, against float64: no worse than the plain model in float32.

The reference computes everything in float64. The models cast to float32 inside (norms, softmax, rotary angles);
in the reference those casts are promoted too. Left as they are they put float32 errors into the reference
itself, up to 6 units in the last place for the Llama family, where the errors that are judged are 1 to 5. What
stays of float32 are values, not arithmetic: weights and rotary frequencies are those of the float32 model.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

import autoptd
from autoptd.verification import float64
from autoptd.verification.step import widen
from tests.parity import GRADIENT_TOLERANCE, Batch, Run, Training, compare, compare_states, train_compiled, train_plain
from tests.plain_models import FURTHER, HUGGING_FACE, LENGTH, PLAIN, VOCABULARY

MODELS = HUGGING_FACE | FURTHER | PLAIN
QUICK = ["gpt2", "gpt-neox", "llama", "phi3", *PLAIN]
MICROBATCHES = 4
EPSILON = torch.finfo(torch.float32).eps
# Rounding is luck: where the plain run happens to be right to far less than a unit in the last place, twice its
# error is less than float32 can express. So much of a tensor's largest element is always allowed.
ALLOWED = 2 * EPSILON


class Promotion(TorchFunctionMode):
    """While entered, what asks for float32 gets float64."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        def promote(x: Any) -> Any:
            return torch.float64 if x is torch.float32 else x

        if func is Tensor.float:
            func = Tensor.double
        result = func(*tree_map(promote, tuple(args)), **tree_map(promote, dict(kwargs or {})))
        assert not (isinstance(result, Tensor) and result.dtype is torch.float32), f"{func} gives float32"
        return result


def promote_batch(batch: Batch) -> Batch:
    return {name: x.double() if x.is_floating_point() else x for name, x in batch.items()}


def train_exact(model: nn.Module, batches: Sequence[Batch], training: Training) -> Run:
    """What `train_plain` would give without rounding to float32."""
    double = copy.deepcopy(model).double()
    torch.set_default_dtype(torch.float64)
    try:
        with Promotion():
            return train_plain(double, [promote_batch(b) for b in batches], MICROBATCHES, training)
    finally:
        torch.set_default_dtype(torch.float32)


def build(name: str) -> nn.Module:
    """The model with weights that leave no gradient zero: biases are not 0, norm weights not 1."""
    torch.manual_seed(0)
    model = MODELS[name]()
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape)
            p.copy_(noise / p.shape[-1] ** 0.5 if p.dim() > 1 else p + 0.2 * noise)
    return model.train()


def make_batches(name: str, count: int) -> list[Batch]:
    torch.manual_seed(1)
    if name == "vit":
        shape = (count, MICROBATCHES, 3, 16, 16)
        images, classes = torch.randn(shape), torch.randint(0, 10, shape[:2])
        return [{"pixel_values": x, "labels": y} for x, y in zip(images, classes, strict=True)]
    ids = torch.randint(0, VOCABULARY, (count, MICROBATCHES, LENGTH))
    if name in PLAIN:
        return [{"idx": x, "targets": x.roll(-1, 1)} for x in ids]
    return [{"input_ids": x, "labels": x.clone()} for x in ids]


def check_against_exact(found: Run, plain: Run, reference: Run) -> None:
    """Every error of `found` is within twice that of `plain`."""
    for own, single, true in zip(found.steps, plain.steps, reference.steps, strict=True):
        limit = 2 * abs(float(single.loss) - float(true.loss)) + ALLOWED * float(true.loss)
        assert abs(float(own.loss) - float(true.loss)) <= limit
        assert set(own.gradients) == set(single.gradients) == set(true.gradients)
        largest = max(float(g.abs().max()) for g in true.gradients.values())
        worse = {}
        for name, gradient in true.gradients.items():
            error, usual = (float((step.gradients[name].double() - gradient).abs().max()) for step in (own, single))
            # A key bias has no gradient but for rounding: see tests/parity.py.
            scale = max(float(gradient.abs().max()), 1e-6 * largest)
            if not error <= 2 * usual + ALLOWED * scale:
                worse[name] = (error, usual, scale)
        assert not worse, f"gradients with (error, plain error, size): {worse}"


def promote_casts() -> None:
    """In a rank's own process, to its end."""
    float64.Promotion().__enter__()  # type: ignore[no-untyped-call]


def compile_interleaved(name: str, model: nn.Module, batches: Sequence[Batch]) -> autoptd.CompiledProgram:
    return autoptd.compile(
        model,
        mesh=(2, 2, 1),
        example_inputs={n: x[:1] for n, x in batches[0].items()},
        num_microbatches=MICROBATCHES,
        schedule="interleaved_1f1b",
        num_model_chunks=2,
    )


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in MODELS]
)
def test_float32_is_as_exact_as_the_plain_run(name: str) -> None:
    model = build(name)
    batches = make_batches(name, 1)
    program = compile_interleaved(name, model, batches)
    reference = train_exact(model, batches, Training())
    plain = train_plain(model, batches, MICROBATCHES)
    assert {g.dtype for g in plain.steps[0].gradients.values()} == {torch.float32}
    assert {g.dtype for g in reference.steps[0].gradients.values()} == {torch.float64}
    check_against_exact(train_compiled(program, batches), plain, reference)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", MODELS)
def test_three_steps_of_every_model_in_float64(name: str) -> None:
    """What a model casts to float32 is promoted in both, as ``program.verify`` does."""
    model = build(name)
    batches = make_batches(name, 3)
    training = Training(lr=0.1)
    program = compile_interleaved(name, model, batches)
    program.check()
    wide = replace(program, manifest=widen(program.manifest), model=copy.deepcopy(model).double())
    doubled = [promote_batch(batch) for batch in batches]
    with float64.Promotion():
        plain = train_plain(copy.deepcopy(model).double(), doubled, MICROBATCHES, training)
    found = train_compiled(wide, doubled, training, prepare=promote_casts)
    for own, true in zip(found.steps, plain.steps, strict=True):
        compare(own, true)
    compare_states(found.state, plain.state, tolerance=GRADIENT_TOLERANCE)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["mixtral", "deepseek-v3"])
def test_experts_as_transformers_multiplies_them(name: str) -> None:
    """Its default is torch's grouped product in float32, beside which the ranks' own products are as exact."""
    model = build(name)
    model.set_experts_implementation("grouped_mm")  # type: ignore[operator]
    batches = make_batches(name, 1)
    program = compile_interleaved(name, model, batches)
    weights = [p for n, p in program.manifest.parameters.items() if n.endswith(("gate_up_proj", "experts.down_proj"))]
    assert {p.placement["tensor"].dim for p in weights} == {0}
    plain = train_plain(model, batches, MICROBATCHES)
    found = train_compiled(program, batches)
    compare(found.steps[0], plain.steps[0], loss_tolerance=8 * EPSILON, gradient_tolerance=64 * EPSILON)


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_experts_are_traced_and_verified_whatever_multiplies_them(implementation: str) -> None:
    """A loop over data, which no graph has, and torch's grouped product, which takes no float64, among them."""
    model = build("mixtral")
    example = {name: x[:1] for name, x in make_batches("mixtral", 1)[0].items()}
    model.set_experts_implementation(implementation)  # type: ignore[operator]
    config: Any = model.config
    program = autoptd.compile(model, mesh=(2, 1, 1), example_inputs=example)
    assert not any("evaluation" in line for line in program.log)
    assert config._experts_implementation == implementation
    assert program.verify().passed
    assert program.verify(dtype="model").passed


@pytest.mark.timeout(120)
def test_five_steps_of_gpt2() -> None:
    model = build("gpt2")
    batches = make_batches("gpt2", 5)
    training = Training(lr=0.01)
    program = autoptd.compile(model, mesh=(2, 2, 1), num_microbatches=MICROBATCHES)
    reference = train_exact(model, batches, training)
    plain = train_plain(model, batches, MICROBATCHES, training)
    found = train_compiled(program, batches, training)
    check_against_exact(found, plain, reference)
    compare_states(found.state, plain.state, tolerance=1e-5)

    fresh = MODELS["gpt2"]()
    fresh.load_state_dict(found.state, strict=True)


@pytest.mark.parametrize(
    ("cached", "given", "said"),
    [
        (True, {}, True),
        (True, {"use_cache": True}, False),
        (True, {"attention_mask": torch.ones(2, LENGTH, dtype=torch.long)}, False),
        (False, {}, False),
    ],
    ids=["cached", "cache given", "mask given", "packed"],
)
def test_packed_sequences(cached: bool, given: dict[str, Any], said: bool) -> None:
    """Positions that start anew: what the plain model makes of them, or a warning that it makes something else."""
    torch.manual_seed(0)
    model = HUGGING_FACE["llama"]().double()
    model.config.use_cache = cached  # type: ignore[union-attr]
    ids, half = torch.randint(0, VOCABULARY, (2, LENGTH)), LENGTH // 2
    positions = torch.arange(half).repeat(2)[None].expand(2, -1)
    tensors = {"input_ids": ids, "labels": ids, "position_ids": positions}
    plain = float(model(**tensors, **given).loss.detach())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        program = autoptd.compile(model, (1, 1, 1), example_inputs=tensors | given, num_microbatches=1)
    assert any("packed" in str(entry.message) for entry in caught) == said
    parallel = program.bind()
    loss = parallel(**tensors, **{k: x for k, x in given.items() if isinstance(x, Tensor)}).loss
    assert (abs(float(loss) - plain) < 1e-6 * plain) != said
