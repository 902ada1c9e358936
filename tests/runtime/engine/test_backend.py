"""torch.compile of each stage gives the same numbers."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import autoptd
from autoptd.compiled import CompiledProgram
from samples.benchmarks.activation_memory import SavedTensors
from samples.gpt import GPT, GPTConfig
from tests.marks import slow_but, slow_rows_but
from tests.ranks import run_ranks


def make_program(dropout: float, recompute: str = "none", mesh: Any = (1, 1, 1)) -> CompiledProgram:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 64, "block_size": 16, "n_layer": 2, "n_embd": 32, "n_head": 4}
    model = GPT(GPTConfig(**sizes, dropout=dropout)).double()
    return autoptd.compile(model, mesh=mesh, microbatch_size=2, num_microbatches=2, recompute=recompute)


@pytest.mark.parametrize(
    ("backend", "dropout", "recompute"),
    slow_rows_but(
        [("aot_eager", 0.1, "selective")],
        product(("aot_eager", "inductor"), (0.0, 0.1), ("none", "full", "selective")),
    ),
)
def test_a_compiled_stage_gives_the_same_numbers(backend: str, dropout: float, recompute: str) -> None:
    torch._dynamo.reset()
    counters.clear()
    program = make_program(dropout, recompute)
    plain, compiled = program.bind(), program.bind(backend=backend)
    for _ in range(3):  # masks of later calls too: what changes from call to call is no constant
        idx, targets = torch.randint(0, 64, (2, 4, 16)).unbind()
        losses = [each(idx, targets)[1] for each in (plain, compiled)]
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-12, atol=0)
        for one, two in zip(plain.parameters(), compiled.parameters(), strict=True):
            assert one.grad is not None
            torch.testing.assert_close(two.grad, one.grad, rtol=1e-12, atol=1e-14)
            one.grad = two.grad = None
    assert not counters["graph_break"], "a part of the stage is not compiled"


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_collectives_may_stand_between_compiled_parts(recompute: str) -> None:
    program = make_program(0.1, recompute, (2, 1, 1))

    def work(rank: int) -> bool:
        plain, compiled = program.bind(), program.bind(backend="aot_eager")
        for seed in range(2):
            torch.manual_seed(seed)
            idx, targets = torch.randint(0, 64, (2, 4, 16)).unbind()
            losses = [each(idx, targets)[1] for each in (plain, compiled)]
            for loss in losses:
                loss.backward()
            assert torch.equal(*losses)
            for one, two in zip(plain.parameters(), compiled.parameters(), strict=True):
                assert one.grad is not None
                assert two.grad is not None
                assert torch.equal(one.grad, two.grad)
        return True

    assert run_ranks(work, 2, timeout=180) == [True, True]


def measure_saved(recompute: str) -> int:
    """Bytes that a compiled program keeps for its backward, without its parameters."""
    torch._dynamo.reset()
    parallel = make_program(0.1, recompute).bind(backend="aot_eager")
    idx, targets = torch.zeros(2, 4, 16, dtype=torch.long).unbind()
    parallel(idx, targets)
    saved = SavedTensors(dict(parallel.named_parameters()))
    with saved:
        parallel(idx, targets)
    return saved.nbytes


@pytest.mark.slow
def test_a_compiled_stage_keeps_no_more_than_it_recomputes() -> None:
    assert measure_saved("full") < measure_saved("none") / 3


def test_an_unknown_backend_is_refused() -> None:
    program = autoptd.compile(GPT(GPTConfig(n_layer=1)), mesh=(1, 1, 1), num_microbatches=1)
    with pytest.raises(
        ValueError, match=r"unknown torch\.compile backend 'inductr'; did you mean 'inductor'"
    ):
        program.bind(backend="inductr")


@pytest.mark.parametrize(
    ("stages", "sharded"),
    slow_rows_but([(None, True)], product((None, "aot_eager"), (False, True))),
)
def test_a_compiler_round_a_parallel_model_calls_it_as_it_is(stages: str | None, sharded: bool) -> None:
    """Scripts have torch.compile(model) in them; with `stages` these are compiled all the same."""
    program = make_program(0.1)
    plain, inner = program.bind(), program.bind(backend=stages)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (plain, inner)]
    if sharded:
        optimizers[1] = inner.shard_optimizer(optimizers[1])
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(inner, backend="aot_eager")
    for _ in range(3):
        idx, targets = torch.randint(0, 64, (2, 4, 16)).unbind()
        losses = [each(idx, targets)[1] for each in (plain, compiled)]
        assert torch.equal(*losses) or stages is not None
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-12, atol=0)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert bool(counters["stats"]["unique_graphs"]) == (stages is not None)
    assert not counters["graph_break"]


def test_a_compiled_step_breaks_at_the_parallel_model_alone() -> None:
    plain, inner = (make_program(0.0).bind() for _ in range(2))

    @torch.compile(backend="aot_eager")
    def step(idx: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = inner(idx, targets)[1]
        return loss * 2 + 1

    torch._dynamo.reset()
    counters.clear()
    idx, targets = torch.randint(0, 64, (2, 4, 16)).unbind()
    assert torch.equal(step(idx, targets), plain(idx, targets)[1] * 2 + 1)
    assert len(counters["graph_break"]) == 1
    assert "runs a schedule of stages" in next(iter(counters["graph_break"]))


@pytest.mark.parametrize("sharded", slow_but([True], (False, True)))
def test_a_compiled_step_clips_and_steps_as_the_eager_one(sharded: bool) -> None:
    program = make_program(0.0, mesh=(1, 1, 2) if sharded else (2, 1, 1))
    batches = torch.randint(0, 64, (3, 2, 4, 16))

    def train(_: int, compiled: bool) -> list[float]:
        parallel = program.bind()
        # torch's Adam rounds otherwise where it is traced
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1, momentum=0.9)
        if sharded:
            optimizer = parallel.shard_optimizer(optimizer)

        def step(idx: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = parallel(idx, targets)[1]
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parallel.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        taken = torch.compile(step, backend="eager") if compiled else step
        return [float(taken(*batch)) for batch in batches]

    plain, traced = (run_ranks(train, 2, compiled, timeout=120) for compiled in (False, True))
    assert traced[0] == pytest.approx(plain[0], rel=1e-12, abs=0)
    assert plain[0][0] != plain[0][1]
