"""torch.compile round a parallel model, or round a whole step, leaves the numbers as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import autoptd
from autoptd.compiled import CompiledProgram
from samples.gpt import GPT, GPTConfig
from tests.marks import slow_but
from tests.ranks import run_ranks


def make_program(dropout: float, mesh: Any = (1, 1, 1)) -> CompiledProgram:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 64, "block_size": 16, "n_layer": 2, "n_embd": 32, "n_head": 4}
    model = GPT(GPTConfig(**sizes, dropout=dropout)).double()
    return autoptd.compile(model, mesh=mesh, microbatch_size=2, num_microbatches=2)


@pytest.mark.parametrize("sharded", slow_but([True], (False, True)))
def test_a_compiler_round_a_parallel_model_calls_it_as_it_is(sharded: bool) -> None:
    """Scripts have torch.compile(model) in them."""
    program = make_program(0.1)
    plain, inner = program.bind(), program.bind()
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (plain, inner)]
    if sharded:
        optimizers[1] = inner.shard_optimizer(optimizers[1])
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(inner, backend="aot_eager")
    for _ in range(3):
        idx, targets = torch.randint(0, 64, (2, 4, 16)).unbind()
        losses = [each(idx, targets)[1] for each in (plain, compiled)]
        assert torch.equal(*losses)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert not counters["stats"]["unique_graphs"]
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
