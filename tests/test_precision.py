"""Generated models in float32 and bfloat16 on real ranks: no less exact than the plain run, and twice the same bits."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable
from math import isfinite

import pytest
import torch
from torch import Tensor

import autoptd
from tests.generated_models import GeneratedGPT, ModelConfig, make_batch, make_model
from tests.parity import Batch, Step, Training, train_compiled, train_plain
from tests.test_parity import sample_model

MESHES = [(2, 2, 1), (1, 2, 2), (2, 1, 2)]
MICROBATCHES = 2
NUM_CASES, NUM_QUICK = 100, 10
FEW = 256  # elements
# How many times the plain run's error against float64 is allowed.
FACTORS = {torch.float32: 2, torch.bfloat16: 4}


def build(seed: int, dtype: torch.dtype) -> tuple[GeneratedGPT, Batch, tuple[int, int, int]]:
    mesh = MESHES[seed // 2 % len(MESHES)]
    config = sample_model(random.Random(1000 + seed), mesh[0], least=2)
    return make_model(config, seed, dtype), make_batch(config, MICROBATCHES * mesh[2], seed), mesh


def compiled(model: GeneratedGPT, batch: Batch, mesh: tuple[int, int, int]) -> autoptd.CompiledProgram:
    dim = 1 if model.config.sequence_first else 0
    example = {n: x.narrow(dim, 0, 1) for n, x in batch.items()}
    return autoptd.compile(
        model, mesh, example_inputs=example, microbatch_size=1, num_microbatches=MICROBATCHES, num_model_chunks=1
    )


def errors(found: Step, exact: Step) -> dict[str, tuple[float, float]]:
    """How far the loss and each gradient are off, and how large they truly are, by the 2-norm.

    Those of few elements (biases and norms) count together: of six numbers one run has three times the error of another
    by luck, whichever the two are. Apart they are compared in float64, where luck is nothing, in test_parity.
    """
    own = {**found.gradients, "loss": found.loss}
    true = {**exact.gradients, "loss": exact.loss}
    assert own.keys() == true.keys()
    groups: dict[str, list[str]] = {}
    for name, value in exact.gradients.items():
        groups.setdefault(name if value.numel() >= FEW else f"those below {FEW} elements", []).append(name)
    return {
        group: (norm(own[n].double() - true[n] for n in names), norm(true[n] for n in names))
        for group, names in [*groups.items(), ("loss", ["loss"])]
    }


def norm(tensors: Iterable[Tensor]) -> float:
    return float(torch.cat([x.reshape(-1) for x in tensors]).norm())


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "seed", [pytest.param(s, marks=[pytest.mark.slow] * (s >= NUM_QUICK)) for s in range(NUM_CASES)]
)
def test_no_less_exact_than_the_plain_run(seed: int) -> None:
    """The exact values are those of the same weights in float64."""
    dtype = (torch.float32, torch.bfloat16)[seed % 2]
    model, batch, mesh = build(seed, dtype)
    dim, microbatches = (1 if model.config.sequence_first else 0), MICROBATCHES * mesh[2]
    (exact,) = train_plain(copy.deepcopy(model).double(), [batch], microbatches, batch_dim=dim).steps
    (plain,) = train_plain(model, [batch], microbatches, batch_dim=dim).steps
    (found,) = train_compiled(compiled(model, batch, mesh), [batch]).steps
    assert {g.dtype for g in plain.gradients.values()} == {dtype}
    assert {g.dtype for g in found.gradients.values()} == {torch.float32}
    largest = max(float(g.norm()) for g in exact.gradients.values())
    own, usual = errors(found, exact), errors(plain, exact)
    worse = {}
    for name, (error, true) in own.items():
        # Rounding is luck: a plain run may happen to be right. And a key bias has no gradient but for rounding.
        luck = torch.finfo(dtype).eps * max(true, 0.01 * largest)
        if not error <= FACTORS[dtype] * usual[name][0] + luck:
            worse[name] = (error, usual[name][0], luck)
    assert not worse, f"(error, the plain run's, one rounding): {worse}"


BITS = {
    "float32": (ModelConfig(tied=True, vocabulary=67), torch.float32, (2, 2, 2)),
    "bfloat16": (
        ModelConfig(kv_heads=2, rms_norm=True, rotary=True, gated=True, bias=False, qkv_bias=False),
        torch.bfloat16,
        (2, 2, 1),
    ),
    "written": (ModelConfig(projection="per_head", attention="written"), torch.bfloat16, (1, 2, 2)),
}


def check_bits(name: str, steps: int) -> None:
    config, dtype, mesh = BITS[name]
    model = make_model(config, dtype=dtype)
    batches = [make_batch(config, MICROBATCHES * mesh[2], seed) for seed in range(steps)]
    program = compiled(model, batches[0], mesh)
    first, second = (train_compiled(program, batches, Training(lr=0.05), timeout=240) for _ in range(2))
    for one, other in zip(first.steps, second.steps, strict=True):
        assert isfinite(float(one.loss))
        assert torch.equal(one.loss, other.loss)
        assert all(torch.equal(g, other.gradients[n]) for n, g in one.gradients.items())
    assert first.state.keys() == second.state.keys()
    assert all(torch.equal(x, second.state[n]) for n, x in first.state.items())
    assert not all(torch.equal(x, model.state_dict()[n]) for n, x in first.state.items())


def test_two_runs_give_the_same_bits() -> None:
    check_bits("bfloat16", 10)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", BITS)
def test_fifty_steps_twice_give_the_same_bits(name: str) -> None:
    check_bits(name, 50)
