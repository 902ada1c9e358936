"""Time messages between two devices, a process each, and steps of a program that they divide; see `machine_timing`.

Here it is the clock's time, not only a core's: between ranks that compute, most of what a small message takes is
until the other rank is woken. How much of it a core works is what such a step computes beyond its kernels.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from autoptd.kernel_timing import DIVIDED, block_step, compile_block, main_dtype
from autoptd.machine_timing import LEAST_REPEATS, WARM_UPS, Place, Timer, gather, say, start
from autoptd.runtime.communicator import ProcessGroup

MESSAGES = (2**20, 2**24)  # bytes: what their times differ by is the link's rate
PATIENCE = 120.0  # seconds that a process waits for another


def time_messages(place: Place, timer: Timer) -> Iterator[tuple[str, Any]]:
    """Yield ("reduced", [bytes, seconds]), ("sent", [bytes, seconds]), and of a step ("divided", [seconds, of a core,
    of a core that both ranks share]).

    A CUDA device shares no core: there all are the clock's.
    """
    assert dist.group.WORLD is not None
    group = ProcessGroup(dist.group.WORLD, timer.device)
    for size in MESSAGES:
        x, arriving = (torch.zeros(size // 4, device=timer.device) for _ in range(2))

        def exchange() -> None:
            peer = 1 - dist.get_rank()
            both = [dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, arriving, peer)]  # noqa: B023
            for work in dist.batch_isend_irecv(both):
                work.wait()

        yield "reduced", [size, time_together(timer, lambda: group.all_reduce(x))[0]]  # noqa: B023
        yield "sent", [size, time_together(timer, exchange)[0]]
    parallel = compile_block(DIVIDED, main_dtype(timer.device), tensor=2).bind(timer.device)
    step = block_step(parallel, DIVIDED, timer.device)
    seconds, computed = time_together(timer, step, parts=0.5)
    if timer.device.type == "cuda":
        yield "divided", [seconds] * 3
    else:
        gather(place)
        yield "divided", [seconds, computed, time_together(timer, step, parts=0.5)[1]]


def time_together(timer: Timer, call: Callable[[], object], parts: float = 1) -> tuple[float, float]:
    """The mean of calls that both ranks make in a row, as often as the first one says: by the clock, and what all
    threads of this process compute."""

    def run(count: int) -> tuple[float, float]:
        dist.barrier()
        begun, computed = time.perf_counter(), time.process_time()
        for _ in range(count):
            call()
        if timer.device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - begun) / count, (time.process_time() - computed) / count

    run(WARM_UPS)
    once, _ = run(LEAST_REPEATS)
    count = torch.tensor([max(LEAST_REPEATS, int(timer.seconds / parts / once))], device=timer.device)
    dist.broadcast(count, 0)
    return run(int(count))


def join(place: Place, timer: Timer) -> None:
    """Meet the other process."""
    dist.init_process_group(
        "nccl" if timer.device.type == "cuda" else "gloo",
        f"file://{place.folder}/store",
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=PATIENCE),
    )


if __name__ == "__main__":
    place, timer = start(one_core=False)
    join(place, timer)
    say(time_messages(place, timer))
    dist.barrier()  # nobody leaves while another may still talk to him
    dist.destroy_process_group()
