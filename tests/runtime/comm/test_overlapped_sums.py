"""What replicas send each other runs beside the step: nothing here goes by how fast anything is.

A backward or forward waits in its middle until the message is there. What began only when it is waited for would never
be there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from inspect import getclosurevars
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autoptd.runtime.comm.connection import Connection, connect
from autoptd.runtime.comm.timings import Span
from autoptd.runtime.module.parallel import Parallel
from autoptd.runtime.program.schedule import Kind
from tests.ranks import run_ranks
from tests.runtime.chain import Chain
from tests.runtime.comm.test_timings import read_spans

PATIENCE = 60  # seconds
MICROBATCHES = 3
CPU = torch.device("cpu")


def watch_end(posted: Any, end: Callable[[], None]) -> None:
    """Have `end` called when a posted collective is over, by the thread that has made it."""
    getclosurevars(posted.wait).nonlocals["works"][0].get_future().then(lambda _: end())


def bind(chain: Chain) -> tuple[Parallel, Connection, Callable[[], float]]:
    """The parallel model of a rank, and the clock of its trace."""
    connection = connect(chain.manifest, CPU, "text")
    parallel = chain.parallel(connection)
    return parallel, connection, parallel._shapes[0].measured.mark


def store() -> Any:
    """What all ranks of the job read and write."""
    return dist.distributed_c10d._get_default_store()


def find_spans(parallel: Parallel, kind: Kind | str, stage: int) -> list[Span]:
    """Of the last step, as `save_trace` writes them."""
    return [span for span in parallel._runner.shape.measured.spans if span[:2] == (kind, stage)]


def test_gradients_are_summed_before_the_last_backward_ends(tmp_path: Path) -> None:
    """Those of the upper one of a rank's two stages."""
    chain = Chain((1, 1, 2), "gpipe", 2, MICROBATCHES)
    over, backwards = threading.Event(), [0]
    lower = chain.functions[0]

    def wait_in_the_last_backward(_: Tensor) -> None:
        backwards[0] += 1
        assert backwards[0] < MICROBATCHES or over.wait(PATIENCE), "the sum has not begun"

    def stage(*values: Any) -> Any:
        result = lower(*values)
        result[0].register_hook(wait_in_the_last_backward)
        return result

    chain.functions[0] = stage

    def body(rank: int) -> None:
        parallel, connection, clock = bind(chain)
        data, begun, ended = connection.rank.group("data"), list[float](), list[float]()
        post = data.post_all_reduce

        def end() -> None:
            ended.append(clock())
            over.set()

        def watched(tensors: Any) -> Any:
            begun.append(clock())
            posted = post(tensors)
            watch_end(posted, end)
            return posted

        data.post_all_reduce = watched  # type: ignore[method-assign]
        parallel(**chain.batch(rank))["loss"].backward()
        assert len(begun) == 2  # a bucket a stage
        upper, last = find_spans(parallel, Kind.BACKWARD, 1)[-1], find_spans(parallel, Kind.BACKWARD, 0)[-1]
        assert upper[3] <= begun[0] < ended[0] < last[4]  # begun at the end of a backward, within its span
        assert last[3] <= begun[1]
        parallel.save_trace(tmp_path / "step.json")

    run_ranks(body, 2, timeout=2 * PATIENCE)
    _, spans = read_spans(tmp_path / "step.json")
    *_, last = [span for span in spans if span["cat"] == "backward"]
    (sums,) = (span for span in spans if span["name"] == "sums of gradients")
    assert sums["ts"] < last["ts"] + last["dur"] < sums["ts"] + sums["dur"]


def test_new_weights_come_while_the_next_step_runs() -> None:
    """Those of the upper stage: the other replica sends them when this one is in its first forward."""
    chain = Chain((1, 1, 2), "gpipe", 2, MICROBATCHES)
    lower, in_step = chain.functions[0], [False]

    def stage(*values: Any) -> Any:
        if in_step[0] and dist.get_rank() == 0:
            store().set("first forward", "begun")
            in_step[0] = False
        return lower(*values)

    chain.functions[0] = stage

    def body(rank: int) -> None:
        parallel, connection, clock = bind(chain)
        optimizer = parallel.shard_optimizer(torch.optim.SGD(parallel.parameters(), lr=0.1))
        batch = chain.batch(rank)
        parallel(**batch)["loss"].backward()
        data, begun, ended = connection.rank.group("data"), list[float](), list[float]()
        post = data.post_all_gather

        def watched(x: Tensor, into: Tensor) -> Any:
            if rank == 1 and len(begun) == 1:
                store().wait(["first forward"], timedelta(seconds=PATIENCE))
            begun.append(clock())
            posted = post(x, into)
            watch_end(posted, lambda: ended.append(clock()))
            return posted

        data.post_all_gather = watched  # type: ignore[method-assign]
        in_step[0] = True
        optimizer.step()
        before = clock()
        parallel(**batch)["loss"].backward()
        (first, *_), (upper, *_) = (find_spans(parallel, Kind.FORWARD, stage) for stage in (0, 1))
        assert len(begun) == len(ended) == 2
        assert ended[1] <= upper[3]
        if rank == 0:
            assert begun[1] < before < first[3] < ended[1]

    run_ranks(body, 2, timeout=2 * PATIENCE)
