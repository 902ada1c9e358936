"""Time messages between two devices, a process each, and steps of a program that they divide; see `kernel_timing`.

Here wall time counts, not a core's: between ranks that compute, a small message takes as long as to wake the other.
"""

import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from autoptd.calibration import kernel_timing
from autoptd.calibration.kernel_timing import DIVIDED, Timer, block_step, compile_block, plain_step
from autoptd.runtime.comm.groups import ProcessGroup
from autoptd.runtime.comm.point_to_point import process_channels
from autoptd.runtime.program.mesh import Mesh

MESSAGES = (2**20, 2**24)  # bytes: the difference of their times is the link's rate
CUDA_MESSAGES = (2**2, 2**30)  # the first takes no time but the link's latency
ROUNDS = 6
MEASUREMENTS = 2 * len(MESSAGES) + ROUNDS
PAIR = 2  # ranks
PATIENCE = timedelta(seconds=120)  # how long a process waits for the other


def time_messages(timer: Timer) -> Iterator[tuple[str, Any]]:
    """Yield ("reduced", [bytes, seconds]), ("sent", [bytes, seconds]), and rounds of ("divided", [plain, divided]).

    The latter, on CPUs alone, are CPU seconds of a step of the plain model, and seconds of the step that both ranks
    divide. A machine's speed drifts, so both are timed in every round.
    """
    assert dist.group.WORLD is not None
    group = ProcessGroup(dist.group.WORLD, timer.device)
    own, channels = dist.get_rank(), process_channels(Mesh(1, PAIR, 1), timer.device)
    there, back = channels[own, 1 - own], channels[1 - own, own]
    cuda = timer.device.type == "cuda"
    for size in CUDA_MESSAGES if cuda else MESSAGES:
        x = torch.zeros(size // 4, device=timer.device)

        def exchange() -> None:
            arriving = back.receive(x.shape, x.dtype, timer.device)  # noqa: B023
            there.send(x)  # noqa: B023
            arriving.wait()
            there.release()

        yield "reduced", [size, time_together(timer, lambda: group.all_reduce(x))]  # noqa: B023
        yield "sent", [size, time_together(timer, exchange)]
    if cuda:
        return
    parallel = compile_block(DIVIDED, kernel_timing.main_dtype(timer.device), tensor=PAIR).bind(timer.device)
    steps = (plain_step(timer.device), block_step(parallel, DIVIDED, timer.device))
    counts = [count_calls(timer, step, 4) for step in steps]
    for _ in range(ROUNDS):
        (_, core), (divided, _) = (run_together(timer, *calls) for calls in zip(steps, counts, strict=True))
        yield "divided", [core, divided]


def time_together(timer: Timer, call: Callable[[], object]) -> float:
    """Return the mean wall time of calls that both ranks make."""
    return run_together(timer, call, max(kernel_timing.LEAST_REPEATS, count_calls(timer, call)))[0]


def count_calls(timer: Timer, call: Callable[[], object], parts: int = 1) -> int:
    """Return how many calls fit into one of `parts` of the time of a measurement, by the first rank's clock."""
    run_together(timer, call, kernel_timing.WARM_UPS)
    once, _ = run_together(timer, call, kernel_timing.LEAST_REPEATS)
    count = torch.tensor([max(1, int(timer.seconds / parts / once))], device=timer.device)
    dist.broadcast(count, 0)
    return int(count)


def run_together(timer: Timer, call: Callable[[], object], count: int) -> tuple[float, float]:
    """Return the mean wall time and the mean CPU time (all threads) of `count` calls that both ranks make."""
    dist.barrier()
    begun, computed = time.perf_counter(), time.process_time()
    for _ in range(count):
        call()
    if timer.device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - begun) / count, (time.process_time() - computed) / count


if __name__ == "__main__":
    rank, world_size, folder, timer = kernel_timing.start(one_core=False)
    backend = "nccl" if timer.device.type == "cuda" else "gloo"
    dist.init_process_group(backend, f"file://{folder}/pair", PATIENCE, world_size, rank)
    kernel_timing.say(time_messages(timer))
    dist.barrier()  # a rank that left now would break the other's last message
    dist.destroy_process_group()
