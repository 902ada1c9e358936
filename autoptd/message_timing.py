"""Time all-reduces and messages between devices, a process each; see `machine_timing`.

Here it is the clock's time, not a core's: a rank that waits for another to be woken, beside what computes there, does
nothing else. It is so with ranks that share cores too, where waking waits for a core.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from autoptd.machine_timing import LEAST_REPEATS, WARM_UPS, Place, Timer, say, start

MESSAGES = (4, 2**16, 2**18, 2**20, 2**22, 2**24)  # bytes
ROUNDS = 5
RESOLUTION = 1e-7  # seconds: less is not seen, beside a product
PATIENCE = 120.0  # seconds that a process waits for another
COMPANY = (256, 256, 1024)  # the product that computes between two messages


def time_messages(timer: Timer) -> Iterator[tuple[str, Any]]:
    """Yield ("reduced", [bytes, seconds]) and ("sent", [bytes, seconds]): all-reduces of two ranks, and messages.

    Ranks 2i and 2i + 1 do both, all pairs at once; of a message each of them sends one and receives one.
    """
    rank = dist.get_rank()
    pairs = [dist.new_group([first, first + 1]) for first in range(0, dist.get_world_size(), 2)]
    for size in MESSAGES:
        x, arriving = (torch.zeros(size // 4, device=timer.device) for _ in range(2))

        def reduce() -> None:
            dist.all_reduce(x, group=pairs[rank // 2])  # noqa: B023

        def exchange() -> None:
            both = [dist.P2POp(dist.isend, x, rank ^ 1), dist.P2POp(dist.irecv, arriving, rank ^ 1)]  # noqa: B023
            for work in dist.batch_isend_irecv(both):
                work.wait()

        yield "reduced", [size, time_beside_products(timer, reduce)]
        yield "sent", [size, time_beside_products(timer, exchange)]


def time_beside_products(timer: Timer, message: Callable[[], None]) -> float:
    """What a message adds to a product before it, whose data it drives from the caches, as it does in a program.

    The rounds with messages and those without take turns.
    """
    m, n, k = COMPANY
    x, w = torch.randn(m, k, device=timer.device), torch.randn(n, k, device=timer.device)

    def run(count: int, message: Callable[[], object]) -> float:
        dist.barrier()
        start = time.perf_counter()
        for _ in range(count):
            F.linear(x, w)
            message()
        if timer.device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / count

    for _ in range(WARM_UPS):
        once = run(LEAST_REPEATS, message)
    share = timer.seconds / (2 * ROUNDS)
    count = torch.tensor([max(LEAST_REPEATS, int(share / once))], device=timer.device)
    dist.broadcast(count, 0)
    more = [run(int(count), message) - run(int(count), lambda: None) for _ in range(ROUNDS)]
    return max(RESOLUTION, statistics.median(more))


def join(place: Place, timer: Timer) -> None:
    """Meet the other processes."""
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
    say(time_messages(timer))
    dist.barrier()  # nobody leaves while another may still talk to him
    dist.destroy_process_group()
