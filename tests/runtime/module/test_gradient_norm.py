"""torch's own clipping of a divided model is by the norm of the whole model, or refused."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad, clip_grad_norm_, get_total_norm

from autoptd.runtime.comm.connection import Connection, connect, run_threads
from autoptd.runtime.module.parallel import Parallel
from tests.counting import calls
from tests.ranks import run_ranks
from tests.runtime.chain import Chain
from tests.runtime.module.test_parallel import Plain


def run(chain: Chain, ask: Callable[[Parallel], Any]) -> list[Any]:
    """``ask(parallel)`` on every rank, after a backward."""

    def body(connection: Connection) -> Any:
        parallel = chain.parallel(connection)
        parallel(**chain.batch())["loss"].backward()
        return ask(parallel)

    return run_threads(chain.manifest, body)


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_torch_clips_by_the_norm_of_the_whole_model(norm_type: float, foreach: bool | None) -> None:
    chain = Chain((2, 2, 2), "interleaved_1f1b", 2, 2, tied=True)

    def ask(parallel: Parallel) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        first = nn.utils.get_total_norm([p.grad for p in parallel.parameters() if p.grad is not None], norm_type)
        norm = clip_grad_norm_(parallel.parameters(), 0.01, norm_type, foreach=foreach)
        return first, norm, {n: p.grad for n, p in parallel.named_parameters() if p.grad is not None}

    plain = Plain(chain)
    plain.gradients(chain.batch())
    expected = clip_grad_norm_(plain.parameters(), 0.01, norm_type)
    for rank, (first, norm, own) in enumerate(run(chain, ask)):
        assert type(norm) is Tensor
        assert torch.equal(first, norm)
        torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
        for name, gradient in own.items():
            whole = plain.get_parameter(name).grad
            assert whole is not None
            part = (
                chain.manifest.parameters[name].placement["tensor"].take(whole, 2, chain.mesh.coordinates(rank).tensor)
            )
            torch.testing.assert_close(gradient, part, rtol=1e-11, atol=1e-14)


def test_a_model_of_another_thread_is_clipped_as_a_whole() -> None:
    """This thread bound another model; torch's own norm would be that of a rank's slices."""
    chain = Chain((2, 1, 1), "gpipe", 1, 1)

    def work(rank: int) -> float:
        connection = connect(chain.manifest, torch.device("cpu"), "")
        with ThreadPoolExecutor(1) as other:
            parallel = other.submit(chain.parallel, connection).result()
        another = chain.parallel(connection)
        parallel(**chain.batch())["loss"].backward()
        norm = clip_grad_norm_(parallel.parameters(), float("inf"))
        assert all(p.grad is None for p in another.parameters())
        return float(norm)

    plain = Plain(chain)
    plain.gradients(chain.batch())
    expected = float(clip_grad_norm_(plain.parameters(), float("inf")))
    assert run_ranks(work, 2) == pytest.approx([expected] * 2, rel=1e-12)


@pytest.mark.parametrize("norm_type", [0.0, -1.0, float("-inf"), float("nan")])
def test_norm_types_that_are_not_positive_are_refused(norm_type: float) -> None:
    """By both calls; the gradients stay as they were."""

    def ask(parallel: Parallel) -> None:
        gradients = {name: p.grad for name, p in parallel.named_parameters() if p.grad is not None}
        before = {name: gradient.clone() for name, gradient in gradients.items()}
        refused = partial(pytest.raises, ValueError, match=f"norm_type is {norm_type}, expected a positive")
        with refused():
            clip_grad_norm_(parallel.parameters(), 0.01, norm_type)
        with refused():
            parallel.clip_grad_norm_(0.01, norm_type)
        assert all(torch.equal(gradients[name], gradient) for name, gradient in before.items())

    run(Chain((2, 1, 1), "gpipe", 1, 1), ask)


def test_a_norm_of_some_gradients_is_refused() -> None:
    chain = Chain((2, 1, 1), "gpipe", 1, 1)

    def some(parallel: Parallel) -> None:
        with pytest.raises(ValueError, match=r"here it is given 3, not layer.*parallel.clip_grad_norm_\(max"):
            clip_grad_norm_([p for p in parallel.parameters() if p.grad is not None][:3], 1.0)
        other = nn.Parameter(torch.ones(3, dtype=chain.dtype))
        other.grad = torch.ones(3, dtype=chain.dtype)
        with pytest.raises(ValueError, match="together with others"):
            clip_grad_norm_([*parallel.parameters(), other], 1.0)

    run(chain, some)


@pytest.mark.parametrize("mesh", [(2, 2, 1), (1, 2, 2), (1, 1, 2)])
@pytest.mark.parametrize("sharded", [False, True])
def test_gradients_of_parameters_frozen_after_backward_are_clipped(mesh: tuple[int, int, int], sharded: bool) -> None:
    """An optimizer steps by the gradient that it has. What clips only trained ones leaves it out, as in torch."""
    chain = Chain(mesh, "1f1b", 1, 2)
    frozen = "layer.0.row.bias"

    def ask(connection: Connection) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        parallel = chain.parallel(connection)
        if sharded:
            others = [p for name, p in parallel.named_parameters() if name != frozen]
            parallel.shard_optimizer(torch.optim.SGD(others, lr=0.1))
        parallel(**chain.batch())["loss"].backward()
        own = dict(parallel.named_parameters()).get(frozen)
        if own is not None:
            own.requires_grad_(False)
        trained = clip_grad_norm_([p for p in parallel.parameters() if p.requires_grad], float("inf"))
        whole = clip_grad_norm_(parallel.parameters(), float("inf"))
        return trained, whole, parallel.clip_grad_norm_(0.01), own.grad if own is not None else None

    plain = Plain(chain)
    plain.gradients(chain.batch())
    plain.get_parameter(frozen).requires_grad_(False)
    some = clip_grad_norm_([p for p in plain.parameters() if p.requires_grad], float("inf"))
    expected = clip_grad_norm_(plain.parameters(), 0.01)
    assert some < expected
    for trained, whole, norm, own in run_threads(chain.manifest, ask):
        torch.testing.assert_close(trained, some, rtol=1e-12, atol=0)
        torch.testing.assert_close(whole, expected, rtol=1e-12, atol=0)
        torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
        if own is not None:
            clipped = plain.get_parameter(frozen).grad
            torch.testing.assert_close(own, clipped, rtol=1e-11, atol=1e-14)


REPLACED: dict[str, Callable[[Tensor], Tensor]] = {
    "divided": lambda gradient: gradient / 2,
    "cleaned": torch.nan_to_num,
    "cloned": torch.clone,
}


@pytest.mark.parametrize("name", REPLACED)
@pytest.mark.parametrize("mesh", [(2, 1, 1), (1, 2, 1)])
def test_replaced_gradients_are_clipped_as_the_plain_models(name: str, mesh: tuple[int, int, int]) -> None:
    chain = Chain(mesh, "1f1b", 1, 2)

    def train(model: nn.Module, backward: Callable[[], object]) -> tuple[Tensor, dict[str, Tensor]]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        backward()
        for p in model.parameters():
            p.grad = None if p.grad is None else REPLACED[name](p.grad)
        norm = clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        return norm, {n: p.detach().clone() for n, p in model.named_parameters()}

    def ask(connection: Connection) -> tuple[Tensor, dict[str, Tensor]]:
        parallel = chain.parallel(connection)
        return train(parallel, lambda: parallel(**chain.batch())["loss"].backward())

    plain = Plain(chain)
    expected, whole = train(plain, lambda: plain.gradients(chain.batch()))
    for rank, (norm, own) in enumerate(run_threads(chain.manifest, ask)):
        torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
        for n, weight in own.items():
            at = chain.mesh.coordinates(rank).tensor
            part = chain.manifest.parameters[n].placement["tensor"].take(whole[n], mesh[0], at)
            torch.testing.assert_close(weight, part, rtol=1e-11, atol=1e-14)


def test_a_gradient_of_a_shard_that_was_replaced_is_not_stepped() -> None:
    chain = Chain((2, 1, 2), "1f1b", 1, 2)

    def ask(connection: Connection) -> None:
        parallel = chain.parallel(connection)
        optimizer = parallel.shard_optimizer(torch.optim.SGD(parallel.parameters(), lr=0.1))
        parallel(**chain.batch())["loss"].backward()
        for p in optimizer.param_groups[0]["params"]:
            p.grad = None if p.grad is None else p.grad / 2
        with pytest.raises(ValueError, match=r"the gradient of the part of .*layer.* was replaced"):
            optimizer.step()

    run_threads(chain.manifest, ask)


def test_a_norm_that_a_rank_does_not_ask_for_is_refused() -> None:
    """Where what it has is frozen; `clip_grad_norm_` of the parallel model is asked by all."""
    chain = Chain((1, 2, 1), "1f1b", 1, 2)

    def ask(connection: Connection) -> None:
        parallel = chain.parallel(connection)
        for name, parameter in parallel.named_parameters():
            parameter.requires_grad_(name.startswith("layer.1"))
        parallel(**chain.batch())["loss"].backward()
        if connection.rank.coordinates.pipeline == 1:
            with pytest.raises(ValueError, match="some ranks have no gradients and do not ask for it"):
                clip_grad_norm_(parallel.parameters(), 0.1)
        else:
            assert clip_grad_norm_(parallel.parameters(), 0.1) == 0
        assert parallel.clip_grad_norm_(0.1) > 0
        for parameter in parallel.parameters():
            parameter.requires_grad_()
        parallel(**chain.batch())["loss"].backward()
        assert clip_grad_norm_(parallel.parameters(), 0.1) > 0

    run_threads(chain.manifest, ask)


@pytest.mark.parametrize("mesh", [(2, 1, 2), (1, 1, 2)])
def test_torch_clips_what_a_sharded_optimizer_steps(mesh: tuple[int, int, int]) -> None:
    chain = Chain(mesh, "gpipe", 1, 2)

    def body(connection: Connection) -> tuple[list[Tensor], list[Tensor]]:
        parallel = chain.parallel(connection)
        used = [p for n, p in parallel.named_parameters() if not n.startswith("unused")]
        optimizer = parallel.shard_optimizer(torch.optim.SGD(used, lr=0.1))
        stepped = optimizer.param_groups[0]["params"]
        norms, scaled = [], []
        asked: list[Callable[[], Tensor]] = [
            lambda: clip_grad_norm_(parallel.parameters(), 0.01),
            lambda: clip_grad_norm_(parallel.parameters(), 0.01, foreach=True),
            lambda: clip_grad_norm_(stepped, 0.01),
            lambda: parallel.clip_grad_norm_(0.01),
        ]
        for ask in asked:
            parallel(**chain.batch())["loss"].backward()
            norms.append(ask())
            scaled.append(torch.cat([p.grad for p in stepped]))
            with pytest.raises(ValueError, match="gradients on each; here it is given 1, not "):
                clip_grad_norm_(used[:1], 1.0)
            parallel.zero_grad()
            assert all(p.grad is None for p in stepped)
        return norms, scaled

    for norms, scaled in run_threads(chain.manifest, body):
        assert norms[0] > 0.01
        assert all(map(torch.equal, norms, norms[1:]))
        assert all(map(torch.equal, scaled, scaled[1:]))


def test_other_models_are_clipped_by_torch_alone() -> None:
    """While a parallel model lives, whose functions torch's are wrapped in once, and after."""
    chain = Chain((2, 1, 1), "gpipe", 1, 1)

    def ask(connection: Connection) -> None:
        plain, parallel = nn.Linear(3, 2), chain.parallel(connection)
        plain(torch.ones(3)).sum().backward()
        gradients = [p.grad for p in plain.parameters() if p.grad is not None]
        expected = torch.cat([gradient.flatten() for gradient in gradients]).norm()
        before = dict(calls(connection.world))
        for clip in (clip_grad_norm_, nn.utils.clip_grad_norm_):
            torch.testing.assert_close(clip(plain.parameters(), float("inf")), expected)
        for total in (get_total_norm, nn.utils.get_total_norm):
            torch.testing.assert_close(total(gradients), expected)
        assert calls(connection.world) == before
        assert not hasattr(nn.utils.get_total_norm.__wrapped__, "knows_parallel_models")  # type: ignore[attr-defined]
        assert parallel.training

    run_threads(chain.manifest, ask)


REACHED: dict[str, Callable[[list[nn.Parameter]], Tensor]] = {
    "imported before bind": lambda ps: clip_grad_norm_(ps, 0.01),
    "attribute of torch.nn.utils": lambda ps: nn.utils.clip_grad_norm_(ps, 0.01),
    "attribute of its module": lambda ps: clip_grad.clip_grad_norm_(ps, 0.01),
    "norm alone": lambda ps: nn.utils.get_total_norm([p.grad for p in ps if p.grad is not None]),
    "one by one": lambda ps: nn.utils.get_total_norm((p.grad for p in ps if p.grad is not None), foreach=False),
}


@pytest.mark.parametrize("sharded", [False, True])
def test_torchs_functions_are_found_however_they_are_reached(sharded: bool) -> None:
    chain = Chain((2, 1, 2), "gpipe", 1, 2)

    def ask(connection: Connection) -> list[Tensor]:
        parallel = chain.parallel(connection)
        if sharded:
            parallel.shard_optimizer(torch.optim.SGD(parallel.parameters(), lr=0.1))
        norms = []
        for reach in REACHED.values():
            parallel.zero_grad()
            parallel(**chain.batch())["loss"].backward()
            norms.append(reach(list(parallel.parameters())))
        return [*norms, parallel.clip_grad_norm_(float("inf"))]

    for first, *others in run_threads(chain.manifest, ask):
        assert all(torch.equal(first, other) for other in others)


def test_a_norm_that_is_not_finite_is_refused_where_it_is_asked_for() -> None:
    def ask(parallel: Parallel) -> None:
        for p in parallel.parameters():
            if p.grad is not None:
                p.grad.fill_(float("inf"))
        with pytest.raises(RuntimeError, match=r"the 2\.0-norm of the gradient is inf: skip this step"):
            clip_grad_norm_(parallel.parameters(), 1.0, error_if_nonfinite=True)

    run(Chain((2, 1, 1), "gpipe", 1, 1), ask)
