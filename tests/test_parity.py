"""Parity: generated GPTs on generated meshes, real processes, float64, against the plain model."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from math import ceil
from typing import Any, cast

import pytest
import torch

import autoptd
from autoptd.compiled import CompiledProgram
from samples.gpt import GPT, GPTConfig
from tests.generated_models import Attention, GeneratedGPT, Grouping, ModelConfig, Projection, make_batch, make_model
from tests.parity import Batch, ParityError, Run, Training, compare, compare_states, train_compiled, train_plain

NUM_CASES, NUM_QUICK = 104, 24


@dataclass(frozen=True)
class Case:
    """One model on a mesh: t tensor, p pipeline, d data ranks, v chunks, m microbatches of b sequences."""

    seed: int
    config: ModelConfig
    t: int
    p: int
    d: int
    v: int
    m: int
    b: int
    schedule: str
    scatter_gather: bool
    ignored: float

    def __str__(self) -> str:
        scatter = "" if self.scatter_gather else "-whole"
        plan = f"t{self.t}p{self.p}d{self.d}v{self.v}m{self.m}b{self.b}-{self.schedule}{scatter}"
        return f"{self.seed}-{plan}-{self.config}"

    def compile(self, model: GeneratedGPT) -> CompiledProgram:
        return autoptd.compile(
            model,
            mesh=(self.t, self.p, self.d),
            example_inputs=make_batch(self.config, self.b),
            microbatch_size=self.b,
            num_microbatches=self.m,
            schedule=self.schedule,
            num_model_chunks=self.v,
            scatter_gather=self.scatter_gather,
            sequence_parallel=self.by_tokens,
        )

    @property
    def by_tokens(self) -> bool:
        """Whether what lies between the divided regions is divided by tokens, also where t does not divide them."""
        return self.t > 1 and self.seed % 10 > 0

    @property
    def sequences(self) -> int:
        """Of one reference batch, all replicas together."""
        return self.b * self.m * self.d

    @property
    def batch_dim(self) -> int:
        return 1 if self.config.sequence_first else 0


def sample_case(seed: int) -> Case:
    """The case of a seed: legal, small, and together with the others covering every option.

    Most have at most 8 ranks, every twentieth 12 to 16.
    """
    r = random.Random(seed)
    wide = seed % 20 == 19
    meshes = [
        (t, p, d)
        for t in range(1, 5)
        for p in range(1, 5)
        for d in (1, 2)
        if (12 <= t * p * d <= 16 if wide else 2 <= t * p * d <= 8)
    ]
    t, p, d = r.choice(meshes)
    schedule = r.choice(["gpipe", "1f1b", "interleaved_1f1b"])
    v = 1 if schedule == "1f1b" or p == 1 else r.choice([1, 2, 2, 3])
    m = p * r.randint(1, 12 // p) if schedule == "interleaved_1f1b" else r.randint(1, 12)
    return Case(
        seed=seed,
        config=sample_model(r, t, least=min(6, ceil(p * v / 2))),
        t=t,
        p=p,
        d=d,
        v=v,
        m=m,
        b=r.choice([1, 1, 2]),
        schedule=schedule,
        scatter_gather=r.random() < 0.6,
        ignored=r.choice([0.0, 0.0, 0.3]),
    )


def sample_model(r: random.Random, t: int, least: int) -> ModelConfig:
    """A model of at least `least` layers that can be divided over `t` tensor ranks."""
    heads = t * r.randint(1, max(1, 6 // t))
    projection = cast(Projection, r.choice(["three", "packed", "per_head", "unequal"]))
    grouped = projection in ("three", "unequal")
    kv_heads = r.choice([n for n in range(1, heads + 1) if heads % n == 0]) if grouped else heads
    bias = r.random() < 0.6
    tied = r.random() < 0.4
    gated = r.random() < 0.5
    return ModelConfig(
        layers=r.randint(least, max(least, r.choice([2, 3, 6]))),
        heads=heads,
        kv_heads=kv_heads,
        head_size=r.choice([n for n in (4, 6, 8, 12, 24) if 24 <= n * heads <= 48]),
        vocabulary=r.choice([48, 53, 61, 67]),
        length=r.choice([6, 8]),
        width=r.choice([24, 36, 48]),
        projection=projection,
        attention=cast(Attention, r.choice(["fused", "written"])),
        grouping=cast(Grouping, r.choice(["repeat", "expand", "native"])),
        bias=bias,
        qkv_bias=bias or r.random() < 0.4,
        head_bias=not tied and r.random() < 0.3,
        tied=tied,
        gated=gated,
        packed_gate=gated and r.random() < 0.5,
        parallel_residual=r.random() < 0.25,
        rms_norm=r.random() < 0.4,
        query_key_norm=r.random() < 0.2,
        rotary=r.random() < 0.4,
        sequence_first=r.random() < 0.15,
    )


CASES = [sample_case(seed) for seed in range(NUM_CASES)]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[pytest.mark.slow] * (i >= NUM_QUICK)) for i, c in enumerate(CASES)], ids=str
)
def test_every_gradient_is_the_plain_models(case: Case) -> None:
    model = make_model(case.config, case.seed)
    batch = make_batch(case.config, case.sequences, case.seed, case.ignored)
    program = case.compile(model)
    # With some targets left out the loss is the mean over all that are left, as of the whole batch at once.
    expected = train_plain(model, [batch], 1 if case.ignored else case.m * case.d, batch_dim=case.batch_dim)
    found = train_compiled(program, [batch])
    compare(found.steps[0], expected.steps[0])


def test_the_cases_cover_every_option() -> None:
    def seen(name: str) -> set[object]:
        return {getattr(case, name) if hasattr(case, name) else getattr(case.config, name) for case in CASES}

    assert len(set(map(str, CASES))) == NUM_CASES
    assert seen("t") == seen("p") == {1, 2, 3, 4}
    assert seen("d") == seen("b") == {1, 2}
    assert seen("v") == {1, 2, 3}
    assert seen("m") == set(range(1, 13))
    assert seen("layers") == {1, 2, 3, 4, 5, 6}
    assert seen("schedule") == {"gpipe", "1f1b", "interleaved_1f1b"}
    assert seen("projection") == {"three", "packed", "per_head", "unequal"}
    assert seen("attention") == {"fused", "written"}
    assert seen("grouping") == {"repeat", "expand", "native"}
    for flag in ("bias", "head_bias", "tied", "gated", "packed_gate", "parallel_residual", "rms_norm"):
        assert seen(flag) == {False, True}, flag
    for flag in ("query_key_norm", "rotary", "sequence_first", "scatter_gather"):
        assert seen(flag) == {False, True}, flag
    kinds = {
        "grouped" if 1 < case.config.kv_heads < case.config.heads else "multi-query"
        for case in CASES
        if case.config.kv_heads < case.config.heads
    }
    assert kinds == {"grouped", "multi-query"}
    assert any(case.t > 1 and case.config.kv_heads % case.t for case in CASES)
    assert any(case.config.vocabulary % case.t for case in CASES)
    assert any(case.config.tied and case.p > 1 for case in CASES)
    assert sum(case.by_tokens for case in CASES) >= 60
    assert any(case.by_tokens and case.config.length % case.t for case in CASES)


TRAINED = [
    (
        ModelConfig(layers=4, projection="packed", tied=True),
        {"mesh": (2, 2, 2), "schedule": "interleaved_1f1b", "num_model_chunks": 2, "num_microbatches": 4},
    ),
    (
        ModelConfig(layers=3, kv_heads=2, projection="unequal", rms_norm=True, rotary=True, gated=True, bias=False),
        {"mesh": (4, 2, 1), "schedule": "1f1b", "num_microbatches": 3},
    ),
    (
        ModelConfig(layers=3, kv_heads=1, query_key_norm=True, rms_norm=True, gated=True, packed_gate=True),
        {"mesh": (2, 3, 1), "schedule": "gpipe", "num_microbatches": 4, "scatter_gather": False},
    ),
    (
        ModelConfig(layers=2, projection="per_head", parallel_residual=True, rotary=True, head_bias=True),
        {"mesh": (4, 1, 2), "schedule": "1f1b", "num_microbatches": 2},
    ),
    (
        ModelConfig(layers=6, heads=3, kv_heads=3, head_size=8, attention="written", tied=True),
        {"mesh": (3, 2, 1), "schedule": "interleaved_1f1b", "num_model_chunks": 3, "num_microbatches": 2},
    ),
    (ModelConfig(layers=2, vocabulary=67, tied=True), {"mesh": (1, 4, 2), "schedule": "1f1b", "num_microbatches": 5}),
]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("config", "options"), TRAINED, ids=lambda x: str(x) if isinstance(x, ModelConfig) else "")
def test_three_clipped_steps_and_the_state_after_them(config: ModelConfig, options: dict[str, Any]) -> None:
    """SGD, never Adam: Adam hides a wrong scale of the gradient."""
    model = make_model(config)
    program = autoptd.compile(model, example_inputs=make_batch(config, 1), **options)
    microbatches = program.manifest.num_microbatches * program.mesh.data
    batches = [make_batch(config, microbatches, seed) for seed in range(3)]
    training = Training(lr=0.1, max_norm=0.5)
    expected = train_plain(model, batches, microbatches, training)
    found = train_compiled(program, batches, training)
    compare(found.steps[0], expected.steps[0])
    for own, plain in zip(found.steps[1:], expected.steps[1:], strict=True):
        # The weights differ by rounding now.
        compare(own, plain, loss_tolerance=1e-13, gradient_tolerance=1e-11)
    compare_states(found.state, expected.state, tolerance=1e-12)

    fresh = GeneratedGPT(config).double()
    fresh.load_state_dict(found.state, strict=True)
    with torch.no_grad():
        trained = make_model(config)
        trained.load_state_dict(expected.state, strict=True)
        batch = make_batch(config, 2, seed=9)
        torch.testing.assert_close(fresh(**batch), trained(**batch), rtol=1e-12, atol=0)


DROPPING: list[dict[str, Any]] = [
    {"mesh": (2, 2, 2), "num_microbatches": 2, "microbatch_size": 2, "num_model_chunks": 2},
    {"mesh": (4, 2, 1), "num_microbatches": 8, "microbatch_size": 1, "schedule": "1f1b"},
    {"mesh": (1, 3, 2), "num_microbatches": 4, "microbatch_size": 1, "schedule": "gpipe"},
    {"mesh": (2, 1, 1), "num_microbatches": 2, "microbatch_size": 4, "schedule": "1f1b"},
]


def make_dropping() -> tuple[GPT, list[Batch]]:
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=53, block_size=8, n_layer=3, n_head=4, n_embd=24, dropout=0.2)).double()
    ids = torch.randint(0, 53, (2, 2, 8, 8))
    return model, [{"idx": idx, "targets": targets} for idx, targets in ids]


@cache
def train_alone(seed: int) -> Run:
    model, batches = make_dropping()
    alone = autoptd.compile(model, (1, 1, 1), num_microbatches=8, microbatch_size=1, seed=seed)
    return train_compiled(alone, batches, Training(lr=0.1))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("options", DROPPING, ids=lambda options: str(options["mesh"]))
def test_dropout_depends_on_neither_mesh_nor_microbatch_size(options: dict[str, Any]) -> None:
    """Two steps against one device, where the same eight sequences meet the same masks."""
    (model, batches), expected = make_dropping(), train_alone(seed=3)
    found = train_compiled(autoptd.compile(model, seed=3, **options), batches, Training(lr=0.1))
    compare(found.steps[0], expected.steps[0])
    compare(found.steps[1], expected.steps[1], loss_tolerance=1e-13, gradient_tolerance=1e-11)
    assert not torch.equal(train_alone(seed=4).steps[0].loss, expected.steps[0].loss)


def test_the_comparison_sees_a_small_error() -> None:
    """The judge is judged: 1e-11 in one element of one gradient is found, and 1e-13 of the loss."""
    config = ModelConfig(layers=1)
    expected, found = (train_plain(make_model(config), [make_batch(config, 2)], 2).steps[0] for _ in range(2))
    compare(found, expected)
    weight = found.gradients["blocks.0.mlp.up.weight"]
    weight.view(-1)[7] += 1e-11 * float(weight.abs().max())
    with pytest.raises(ParityError, match=r"1 of \d+ gradients are off, blocks.0.mlp.up.weight by 1.0e-11"):
        compare(found, expected)
    found.loss = found.loss * (1 + 1e-13)
    with pytest.raises(ParityError, match="loss"):
        compare(found, expected)
