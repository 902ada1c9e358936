"""Loss scaling in float16: a step that overflows is run again on all ranks, and the factor finds its range."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import autoptd
from autoptd.runtime.comm.connection import Connection, run_threads
from autoptd.runtime.comm.rank import Rank
from autoptd.runtime.module.parallel import Parallel
from autoptd.runtime.optimizer import loss_scale
from autoptd.runtime.optimizer.loss_scale import INITIAL, LossScale
from autoptd.runtime.program.mesh import Mesh
from tests.models import make_gpt, tokens
from tests.parity import loss_of
from tests.ranks import run_ranks
from tests.runtime.chain import Chain

MICROBATCHES = 2


def compile_gpt() -> autoptd.CompiledProgram:
    """A float32 GPT under autocast to float16, in two stages."""
    with torch.autocast("cpu", torch.float16):
        return autoptd.compile(
            make_gpt(), (1, 2, 1), num_microbatches=MICROBATCHES, microbatch_size=1, num_model_chunks=1
        )


def run_steps(
    count: int, prepare: Callable[[Parallel], None] | None = None, lr: float = 0.1
) -> list[list[tuple[float, float, int]]]:
    """By rank and step: the loss, the factor after it, and how many parameters have a gradient."""
    program = compile_gpt()
    assert program.manifest.scales_loss

    def work(rank: int) -> list[tuple[float, float, int]]:
        parallel = program.bind()
        optimizer = torch.optim.SGD(parallel.parameters(), lr=lr)
        if prepare is not None:
            prepare(parallel)
        seen = []
        for step in range(count):
            loss = loss_of(parallel(ids := tokens(rows=MICROBATCHES, seed=step % 3), ids.roll(-1, 1)))
            loss.backward()
            given = [p.grad for p in parallel.parameters() if p.grad is not None]
            assert all(g.dtype is torch.float32 and bool(g.isfinite().all()) for g in given)
            optimizer.step()
            optimizer.zero_grad()
            scale = parallel._runner.loss_scale
            assert scale is not None
            seen.append((float(loss), scale.value, len(given)))
        return seen

    return run_ranks(work, 2)


def test_a_gpt_in_float16_learns() -> None:
    first, second = run_steps(15, lr=0.3)
    assert [loss for loss, _, _ in first] == [loss for loss, _, _ in second]
    losses = [loss for loss, _, _ in first]
    assert sum(losses[-3:]) < 0.95 * sum(losses[:3])


def test_a_step_that_overflows_is_run_again_on_all_ranks_with_half_the_factor() -> None:
    def enlarge(parallel: Parallel) -> None:
        assert parallel._runner.loss_scale is not None
        parallel._runner.loss_scale.value = 2.0**40

    first, second = run_steps(3, enlarge)
    expected, _ = run_steps(3)
    assert [scale for _, scale, _ in first] == [scale for _, scale, _ in second]
    assert first[0][1] < 2.0**24  # float16 has no such gradients
    for (loss, _, given), (wanted, _, _) in zip(first, expected, strict=True):
        assert given > 0  # none of the steps is left out
        assert loss == pytest.approx(wanted, rel=1e-3)


@pytest.mark.parametrize("overflowing", [0, 1])
def test_all_calls_of_an_accumulation_count_where_one_overflows(overflowing: int) -> None:
    chain = Chain((1, 2, 2), "1f1b", 1, 2, dtype=torch.float16)

    def accumulate(connection: Connection, scale: float) -> dict[str, Tensor]:
        parallel = chain.parallel(connection)
        parallel._runner.loss_scale = LossScale()
        for call in range(2):
            parallel._runner.loss_scale.value = scale if call == overflowing else 8.0
            parallel(**chain.batch(connection.rank.coordinates.data + 10 * call))["loss"].backward()
        return {name: p.grad for name, p in parallel.named_parameters() if p.grad is not None}

    found = run_threads(chain.manifest, lambda connection: accumulate(connection, 2.0**30))
    wanted = run_threads(chain.manifest, lambda connection: accumulate(connection, 8.0))
    for own, expected in zip(found, wanted, strict=True):
        assert own.keys() == expected.keys()
        for name, gradient in own.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-2, atol=1e-4)


def test_a_loss_that_is_not_finite_is_no_matter_of_the_factor() -> None:
    chain = Chain((1, 2, 1), "1f1b", 1, 2, dtype=torch.float32)

    def overflow(connection: Connection) -> float:
        parallel = chain.parallel(connection)
        parallel._runner.loss_scale = LossScale()
        with torch.no_grad():
            next(iter(parallel.parameters())).fill_(torch.inf)
        with pytest.raises(FloatingPointError, match="the loss is nan"):
            parallel(**chain.batch())
        return parallel._runner.loss_scale.value

    assert run_threads(chain.manifest, overflow) == [INITIAL] * 2


def test_one_rank_that_overflows_stops_all() -> None:
    mesh = Mesh(1, 1, 2)
    chain = Chain((1, 1, 2), "gpipe", 2, 2)

    def body(connection: Connection) -> tuple[bool, float]:
        scale = LossScale()
        own = torch.full((2,), float("inf") if connection.rank.coordinates.data else 1.0)
        return scale.unscale(connection.rank, [own], torch.ones(())), scale.value

    assert run_threads(chain.manifest, body) == [(True, INITIAL / 2)] * mesh.size


def test_the_factor_grows_after_steps_that_were_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_scale, "GROWTH_INTERVAL", 3)
    rank, scale, values = Rank.local(Mesh(1, 1, 1)), LossScale(), []
    for finite in [True, True, False, True, True, True, True, True, True]:
        gradient = torch.tensor([scale.value if finite else float("nan")])
        assert scale.unscale(rank, [gradient], torch.ones(())) is not finite
        values.append(scale.value / INITIAL)
        assert not finite or gradient.item() == 1
    assert values == [1, 1, 0.5, 0.5, 0.5, 1, 1, 1, 2]


@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 2, 1)])
def test_where_no_factor_helps_the_step_is_refused_and_the_factor_as_it_was(mesh: tuple[int, int, int]) -> None:
    chain = Chain(mesh, "1f1b", 1, 2, dtype=torch.float32)

    def body(connection: Connection) -> tuple[float, bool]:
        parallel = chain.parallel(connection)
        parallel._runner.loss_scale = LossScale()
        batch = chain.batch()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(parallel._weights.sums, "gradients", lambda: [torch.tensor([torch.nan])])
            with pytest.raises(FloatingPointError, match="a gradient is not finite"):
                parallel(**batch)
        parallel(**batch)["loss"].backward()
        return parallel._runner.loss_scale.value, any(p.grad is not None for p in parallel.parameters())

    assert [value for value, _ in run_threads(chain.manifest, body)] == [INITIAL] * chain.mesh.size


def test_tensor_ranks_that_disagree_are_told_so() -> None:
    chain = Chain((2, 1, 1), "gpipe", 1, 2, dtype=torch.float32)

    def body(connection: Connection) -> None:
        parallel = chain.parallel(connection)
        parallel._runner.loss_scale = LossScale()
        batch = chain.batch()
        batch["target"].fill_(torch.inf if connection.world.index else 1.0)
        with pytest.raises(ValueError, match="argument target differs inside replica 0"):
            parallel(**batch)

    run_threads(chain.manifest, body)


@pytest.mark.parametrize("factor", [1.0, 2.0**7, 2.0**10])
def test_scaled_gradients_are_the_unscaled_ones(factor: float) -> None:
    """A power of two changes no bit of a float32 chain; its gradients reach the optimizer divided by it."""
    chain = Chain((1, 2, 1), "1f1b", 1, 2, tied=True, dtype=torch.float32)

    def body(connection: Connection) -> dict[str, Tensor]:
        parallel = chain.parallel(connection)
        parallel._runner.loss_scale = LossScale()
        parallel._runner.loss_scale.value = factor
        parallel(**chain.batch())["loss"].backward()
        return {n: p.grad for n, p in parallel.named_parameters() if p.grad is not None}

    def without(connection: Connection) -> dict[str, Tensor]:
        parallel = chain.parallel(connection)
        parallel(**chain.batch())["loss"].backward()
        return {n: p.grad for n, p in parallel.named_parameters() if p.grad is not None}

    for own, plain in zip(run_threads(chain.manifest, body), run_threads(chain.manifest, without), strict=True):
        assert own.keys() == plain.keys()
        assert all(torch.equal(own[name], plain[name]) for name in own)
