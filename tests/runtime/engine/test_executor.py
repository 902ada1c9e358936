"""The executor against a plain loop, on threads and on gloo processes."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from autoptd.runtime.comm.connection import Connection, connect, run_threads
from autoptd.runtime.comm.rank import Rank
from tests.counting import sent_elements
from tests.ranks import run_ranks
from tests.runtime.chain import ROWS, WIDTH, Chain

CPU = torch.device("cpu")


def step(chain: Chain, connection: Connection) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, and the gradients this rank has."""
    parallel = chain.parallel(connection)
    loss = parallel(**chain.batch(connection.rank.coordinates.data))["loss"]
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in parallel.named_parameters() if p.grad is not None}


def check_bitwise(chain: Chain, results: list[Any]) -> None:
    loss, gradients = chain.plain(chain.weights(), chain.batch())
    seen = set()
    for own_loss, own in results:
        assert torch.equal(own_loss, loss)
        for name, gradient in own.items():
            assert torch.equal(gradient, gradients[name]), name
        seen |= set(own)
    assert seen == set(gradients)


SHAPES = [
    ("gpipe", 2, 1, 3),
    ("gpipe", 2, 2, 4),
    ("1f1b", 1, 1, 3),
    ("1f1b", 2, 1, 5),
    ("1f1b", 4, 1, 4),
    ("interleaved_1f1b", 1, 3, 2),
    ("interleaved_1f1b", 2, 2, 4),
    ("interleaved_1f1b", 3, 2, 6),
]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("schedule", "p", "v", "m"), SHAPES)
def test_pipeline_is_bitwise_the_plain_loop(schedule: str, p: int, v: int, m: int, tied: bool) -> None:
    chain = Chain((1, p, 1), schedule, v, m, tied)
    check_bitwise(chain, run_threads(chain.manifest, lambda connection: step(chain, connection)))


def test_processes_are_bitwise_the_plain_loop() -> None:
    chain = Chain((1, 2, 1), "interleaved_1f1b", 2, 4, tied=True)

    def body(rank: int) -> tuple[Tensor, dict[str, Tensor]]:
        return step(chain, connect(chain.manifest, CPU, "same"))

    check_bitwise(chain, run_ranks(body, 2))


@pytest.mark.parametrize("scatter_gather", [True, False])
@pytest.mark.parametrize("tied", [False, True])
def test_all_three_axes_meet_the_plain_loop(scatter_gather: bool, tied: bool) -> None:
    chain = Chain((2, 2, 2), "interleaved_1f1b", 2, 4, tied, scatter_gather)
    results = run_threads(chain.manifest, lambda connection: step(chain, connection))
    plain = [chain.plain(chain.weights(), chain.batch(replica)) for replica in (0, 1)]
    loss = (plain[0][0] + plain[1][0]) / 2
    for rank, (own_loss, own) in enumerate(results):
        torch.testing.assert_close(own_loss, loss, rtol=1e-14, atol=0)
        assert torch.equal(own_loss, results[0][0])
        tensor = chain.mesh.coordinates(rank).tensor
        for name, gradient in own.items():
            mean = (plain[0][1][name] + plain[1][1][name]) / 2
            expected = chain.manifest.parameters[name].placement["tensor"].take(mean, 2, tensor)
            torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-14, msg=name)


@pytest.mark.parametrize("scatter_gather", [True, False])
def test_boundary_elements_are_counted(scatter_gather: bool) -> None:
    chain = Chain((2, 2, 1), "1f1b", 1, 3, scatter_gather=scatter_gather)

    def body(connection: Connection) -> dict[str, int]:
        parallel = chain.parallel(connection)
        parallel(**chain.batch())
        return dict(sent_elements(parallel))

    share = 2 if scatter_gather else 1
    values = 2 * ROWS * WIDTH
    forward, backward = 3 * (values + ROWS) // share, 3 * values // share
    sent = run_threads(chain.manifest, body)
    assert sent[0] == sent[1] == {"stage 0 -> 1": forward}
    assert sent[2] == sent[3] == {"stage 1 -> 0": backward}


def test_forward_only_gives_the_same_loss_and_keeps_no_graph() -> None:
    chain = Chain((1, 2, 1), "interleaved_1f1b", 2, 4)

    def body(connection: Connection) -> tuple[Tensor, list[Tensor | None]]:
        parallel = chain.parallel(connection)
        with torch.no_grad():
            loss = parallel(**chain.batch())["loss"]
        assert not loss.requires_grad
        assert connection.rank.randomness.call == 1
        return loss, [p.grad for p in parallel.parameters()]

    loss, _ = chain.plain(chain.weights(), chain.batch())
    for own, gradients in run_threads(chain.manifest, body):
        assert torch.equal(own, loss)
        assert gradients == [None] * len(gradients)


def test_microbatches_know_their_global_sample() -> None:
    chain = Chain((1, 2, 2), "1f1b", 1, 3)
    seen: dict[tuple[int, int], list[int]] = {}
    plain = dict(chain.functions)

    def watched(k: int) -> Any:
        def stage(rank: Rank, *values: Any) -> Any:
            assert rank.randomness.moment is not None
            seen.setdefault((rank.coordinates.data, k), []).append(int(rank.randomness.moment[2]))
            return plain[k](rank, *values)

        return stage

    chain.functions = {k: watched(k) for k in plain}
    run_threads(chain.manifest, lambda connection: step(chain, connection))
    for (replica, _), samples in seen.items():
        assert samples == [replica * 3 * ROWS + i * ROWS for i in range(3)]
    assert len(seen) == 4


def test_failing_stage_names_its_action_and_frees_the_others() -> None:
    chain = Chain((1, 2, 1), "1f1b", 1, 2)
    chain.functions[1] = lambda rank, p, *values: torch.zeros(2) @ torch.zeros(3)
    with pytest.raises(RuntimeError) as raised:
        run_threads(chain.manifest, lambda connection: step(chain, connection))
    assert "1F0" in raised.value.__notes__[0]


def test_wrong_shape_at_a_boundary_is_named() -> None:
    chain = Chain((1, 2, 1), "1f1b", 1, 2)
    whole = chain.functions[0]
    chain.functions[0] = lambda *values: tuple(x[:1] for x in whole(*values))
    with pytest.raises(
        ValueError, match=r"x crosses stage 0 -> 1 as torch.float64\[1, 8\], expected torch.float64\[2, 8\]"
    ):
        run_threads(chain.manifest, lambda connection: step(chain, connection))


def test_sent_output_that_no_operator_saved_is_freed() -> None:
    chain = Chain((1, 2, 1), "gpipe", 1, 3)
    whole = chain.functions[0]
    outputs: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def watched(*values: Any) -> Any:
        alive.append(sum(output() is not None for output in outputs))
        result = whole(*values)
        outputs.append(weakref.ref(result[0]))
        return result

    chain.functions[0] = watched
    run_threads(chain.manifest, lambda connection: step(chain, connection))
    assert alive == [0, 0, 0]


@pytest.mark.parametrize(("name", "p", "v"), [("gpipe", 2, 2), ("1f1b", 3, 1), ("interleaved_1f1b", 3, 2)])
def test_evaluation_between_training_steps_changes_nothing(name: str, p: int, v: int) -> None:
    chain = Chain((1, p, 1), name, v, 2 * p)

    def body(rank: int) -> list[tuple[float, float]]:
        connection = connect(chain.manifest, CPU, "same")
        parallel, batch, found = chain.parallel(connection), chain.batch(), []
        for _ in range(3):
            with torch.no_grad():
                evaluated = parallel(**batch)["loss"].item()
            loss = parallel(**batch)["loss"]
            loss.backward()
            found.append((evaluated, loss.item()))
        return found

    for found in run_ranks(body, p):
        assert len({loss for pair in found for loss in pair}) == 1
