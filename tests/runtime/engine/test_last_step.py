"""The last step in numbers."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from autoptd.runtime.comm.connection import Connection, run_threads
from autoptd.runtime.comm.timings import Measured, Span
from autoptd.runtime.engine.last_step import LastStep, read_last_step
from autoptd.runtime.program.manifest import Input
from autoptd.runtime.program.mesh import Mesh
from autoptd.runtime.program.schedule import Kind
from tests.runtime.chain import Chain
from tests.runtime.module.test_parallel import alone

SLEEP = 0.02


def test_numbers_of_a_step() -> None:
    chain = Chain((1, 2, 1), "gpipe", 1, 2)
    slow, begun = dict(chain.functions), threading.Event()

    def sleeping(index: int) -> object:
        def stage(*values: object) -> object:
            begun.wait(60)  # until the other rank waits for this one
            time.sleep(SLEEP)
            return slow[index](*values)

        return stage

    for index in slow:
        chain.functions[index] = sleeping(index)  # type: ignore[assignment]

    def body(connection: Connection) -> tuple[LastStep, Tensor, Tensor]:
        parallel = chain.parallel(connection)
        with pytest.raises(RuntimeError, match="no step has run"):
            _ = parallel.last_step
        if connection.world.index == 1:
            begun.set()
        loss = parallel(**chain.batch())["loss"]
        assert parallel.last_step.gradient_norm is None
        assert "gradient_norm" not in parallel.last_step.as_dict()
        loss.backward()
        norm = parallel.clip_grad_norm_(1.0)
        return parallel.last_step, loss, norm

    for rank, (step, loss, norm) in enumerate(run_threads(chain.manifest, body)):
        assert step.loss == loss.item()
        assert step.gradient_norm == norm.item()
        assert step.as_dict()["gradient_norm"] == norm.item()
        assert step.step_seconds > 2 * SLEEP
        assert step.bubble > 0
        assert 0 < step.exposed_communication_seconds < step.step_seconds
        assert step.tokens_per_second is None
        assert step.peak_memory_bytes > 10 * 2**20
        if rank == 1:  # two forwards, and it waited for one
            assert step.step_seconds * step.bubble / (1 + step.bubble) > SLEEP / 2


def test_the_tensor_ranks_sums_are_exposed_where_nothing_hides_them() -> None:
    chain = Chain((2, 1, 1), "1f1b", 1, 3, tied=True)

    def body(connection: Connection) -> tuple[float, float, float]:
        group, seconds = connection.rank.group("tensor"), []
        reduce = group.all_reduce

        def sleeping(*args: Any) -> Tensor:
            begin = time.time()
            time.sleep(SLEEP)
            result = reduce(*args)
            seconds.append(time.time() - begin)
            return result

        parallel = chain.parallel(connection)
        group.all_reduce = sleeping  # type: ignore[method-assign,assignment]
        parallel(**chain.batch())
        trained = parallel.last_step.exposed_communication_seconds - sum(seconds[: 2 * chain.m])
        seconds.clear()
        with torch.no_grad():
            parallel(**chain.batch())
        evaluated = parallel.last_step.exposed_communication_seconds - sum(seconds[: chain.m])
        return trained, evaluated, parallel.last_step.step_seconds

    for trained, evaluated, step in run_threads(chain.manifest, body):
        assert 0 < trained < step, "a sum forward and one backward for each microbatch, and what follows"
        assert 0 < evaluated < step


def test_all_reduces_beside_computing_are_hidden() -> None:
    manifest = Chain((2, 1, 1), "1f1b", 1, 2, tied=True).manifest
    mask = Input("mask", (2, 1, 3, 3), torch.bool, 0)
    manifest = replace(manifest, inputs=(Input("ids", (2, 3), torch.int64, 0), mask))
    spans: list[Span] = [
        (Kind.FORWARD, 0, 0, 101.0, 105.0),
        ("tensor", 0, 0, 102.0, 104.0),  # with nothing beside it
        (Kind.BACKWARD, 0, 0, 106.0, 114.0),
        ("tensor", 0, 0, 107.0, 112.0),
        ("products", 0, 0, 107.0, 110.0),  # beside it
        ("data", 0, 0, 113.0, 119.0),
    ]
    measured = Measured(torch.device("cpu"), list(spans), 100.0, 120.0)
    step = read_last_step(manifest, measured, torch.tensor(3.0), None)
    assert step.step_seconds == 20
    assert step.bubble == (14 - 12) / 12
    assert step.exposed_communication_seconds == 2 + (5 - 3) + (120 - 114)
    assert step.tokens_per_second == pytest.approx(2 * 2 * 3 / 20)
    twice = replace(manifest, mesh=Mesh(2, 1, 2))
    assert read_last_step(twice, measured, torch.tensor(3.0), None).tokens_per_second == pytest.approx(
        2 * 2 * 3 * 2 / 20
    )
    real = replace(manifest, inputs=(Input("x", (2, 3), torch.float32, 0),))
    assert read_last_step(real, measured, torch.tensor(3.0), None).tokens_per_second is None


def test_an_evaluation_is_a_step_too() -> None:
    chain, parallel = alone()
    parallel.eval()
    with torch.no_grad():
        loss = parallel(**chain.batch())["loss"]
    assert parallel.last_step.loss == loss.item()
