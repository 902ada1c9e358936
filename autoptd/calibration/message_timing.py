"""Time messages between two devices, a process each, and steps of a program that they divide; see `machine_timing`.

Here it is the clock's time, not only a core's: between ranks that compute, most of what a small message takes is
until the other rank is woken. How much of it a core works is what such a step computes beyond its kernels.

Processes beyond the first pair are a crowd: pairs of their own, which only take their turns on the cores.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from autoptd.calibration.kernel_timing import DIVIDED, block_step, compile_block, main_dtype, plain_step
from autoptd.calibration.timer import LEAST_REPEATS, WARM_UPS, Place, Timer, say, start
from autoptd.runtime.comm.groups import ProcessGroup
from autoptd.runtime.comm.point_to_point import process_channels
from autoptd.runtime.program.mesh import Mesh

MESSAGES = (2**20, 2**24)  # bytes: what their times differ by is the link's rate
ROUNDS = 6
PAIR = 2  # ranks that talk
PATIENCE = timedelta(seconds=120)  # how long a process waits for another


class Meeting:
    """Where all processes wait for each other, those of other pairs too; who waits sleeps."""

    def __init__(self, place: Place, timer: Timer) -> None:
        self._store = dist.FileStore(  # type: ignore[attr-defined]
            f"{place.folder}/all", place.world_size
        )
        self._store.set_timeout(PATIENCE + timedelta(seconds=timer.seconds * (2 * len(MESSAGES) + ROUNDS)))
        self._size, self._number = place.world_size, 0

    def wait(self) -> None:
        """Until all are here."""
        self._number += 1
        if self._store.add(f"at {self._number}", 1) == self._size:
            self._store.set(f"all at {self._number}", "")
        self._store.wait([f"all at {self._number}"])

    def agree(self, counts: Sequence[int] | None = None) -> list[int]:
        """What one process says, to all that say nothing."""
        if counts is not None:
            self._store.set("counts", json.dumps(counts))
        return list(map(int, json.loads(self._store.get("counts"))))


def time_messages(
    place: Place, meeting: Meeting, timer: Timer, steps: Sequence[Callable[[], None]]
) -> Iterator[tuple[str, Any]]:
    """What the first pair measures: messages, and `steps`.

    Yield ("reduced", [bytes, seconds]), ("sent", [bytes, seconds]), and ("divided", [...]) in each of some rounds.
    Those are seconds of a core for a `plain_step`; for a divided step by the clock, of a core, and of one that a crowd
    shares; and of such a core for the plain step again. Without a crowd it costs what it does anyway; of a CUDA device
    all are the clock's. A machine's speed drifts: what is compared is timed in turn.
    """
    assert dist.group.WORLD is not None
    group = ProcessGroup(dist.group.WORLD, timer.device)
    own, channels = dist.get_rank(), process_channels(Mesh(1, PAIR, 1), timer.device)
    there, back = channels[own, 1 - own], channels[1 - own, own]
    for size in MESSAGES:
        x = torch.zeros(size // 4, device=timer.device)

        def exchange() -> None:
            arriving = back.receive(x.shape, x.dtype, timer.device)  # noqa: B023
            there.send(x)  # noqa: B023
            arriving.wait()
            there.flush()

        yield "reduced", [size, time_together(timer, lambda: group.all_reduce(x))[0]]  # noqa: B023
        yield "sent", [size, time_together(timer, exchange)[0]]
    counts = meeting.agree([count_calls(timer, step, 4) for step in steps])
    for _ in range(ROUNDS):
        apart = [run_together(timer, *calls) for calls in zip(steps, counts, strict=True)]
        works = int(timer.device.type != "cuda")
        alone, seconds, computed = apart[0][works], apart[1][0], apart[1][works]
        plain, divided = (
            share_cores(meeting, timer, steps, counts) if place.world_size > PAIR else (alone, computed)
        )
        yield "divided", [alone, seconds, computed, divided, plain]


def make_crowd(meeting: Meeting, timer: Timer, steps: Sequence[Callable[[], None]]) -> None:
    """What the other pairs do: nothing, but where the first pair shares its cores."""
    counts = meeting.agree()
    for _ in range(ROUNDS):
        share_cores(meeting, timer, steps, counts)


def make_steps(timer: Timer) -> tuple[Callable[[], None], Callable[[], None]]:
    """A plain step, and one that this process and its pair's other divide."""
    parallel = compile_block(DIVIDED, main_dtype(timer.device), tensor=2).bind(timer.device)
    return plain_step(timer.device), block_step(parallel, DIVIDED, timer.device)


def share_cores(
    meeting: Meeting, timer: Timer, steps: Sequence[Callable[[], None]], counts: Sequence[int]
) -> list[float]:
    """What this process computes in each of `steps`, while all make the same."""
    computed = []
    for step, count in zip(steps, counts, strict=True):
        meeting.wait()
        computed.append(run_together(timer, step, count)[1])
    meeting.wait()
    return computed


def time_together(timer: Timer, call: Callable[[], object]) -> tuple[float, float]:
    """The mean of calls that both ranks make in a row: by the clock, and what all threads of this process compute."""
    return run_together(timer, call, max(LEAST_REPEATS, count_calls(timer, call)))


def count_calls(timer: Timer, call: Callable[[], object], parts: int = 1) -> int:
    """How often both ranks make it in one of so many `parts` of the time for one thing, as the first rank says."""
    run_together(timer, call, WARM_UPS)
    once, _ = run_together(timer, call, LEAST_REPEATS)
    count = torch.tensor([max(1, int(timer.seconds / parts / once))], device=timer.device)
    dist.broadcast(count, 0)
    return int(count)


def run_together(timer: Timer, call: Callable[[], object], count: int) -> tuple[float, float]:
    """As `time_together`, so many times."""
    dist.barrier()
    begun, computed = time.perf_counter(), time.process_time()
    for _ in range(count):
        call()
    if timer.device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - begun) / count, (time.process_time() - computed) / count


def join(place: Place, timer: Timer) -> None:
    """Meet the other process of this pair."""
    dist.init_process_group(
        "nccl" if timer.device.type == "cuda" else "gloo",
        f"file://{place.folder}/pair{place.rank // PAIR}",
        rank=place.rank % PAIR,
        world_size=PAIR,
        timeout=PATIENCE,
    )


if __name__ == "__main__":
    place, timer = start(one_core=False)
    join(place, timer)
    meeting = Meeting(place, timer)
    steps = make_steps(timer)
    meeting.wait()  # what is timed has the cores to itself
    if place.rank < PAIR:
        say(time_messages(place, meeting, timer, steps))
    else:
        make_crowd(meeting, timer, steps)
    dist.barrier()  # nobody leaves while another may still talk to him
    dist.destroy_process_group()
