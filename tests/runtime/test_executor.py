"""The executor against a plain loop, on threads and on gloo processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from autoptd.runtime.connection import Connection, connect, run_threads
from tests.ranks import run_ranks
from tests.runtime.chain import Chain

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
