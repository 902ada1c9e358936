"""The timer of the processes that `autoptd.calibrate` starts, and their command line and output.

    python -m autoptd.calibration.kernel_timing  RANK WORLD_SIZE SECONDS FOLDER CORES
    python -m autoptd.calibration.message_timing RANK WORLD_SIZE SECONDS FOLDER CORES

Each measurement takes about SECONDS. A process prints a line for each and at the end all results as JSON, in seconds
of the device. Kernels on a CPU are timed in CPU time, which other processes hardly change.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

WARM_UPS, LEAST_REPEATS = 2, 3


class Timer:
    """Times calls on `device`, each kind for about `seconds`."""

    def __init__(self, device: torch.device, seconds: float) -> None:
        self.device = device
        self.seconds = seconds

    def now(self) -> float:
        """Return the CPU time of this thread, or the wall time once the CUDA device is idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            return time.perf_counter()
        return time.thread_time()

    def time(self, call: Callable[[], object], parts: int = 1) -> float:
        """Return the median time of a call, repeated for one of `parts` of `seconds`."""
        for _ in range(WARM_UPS):
            call()
        found: list[float] = []
        until = time.perf_counter() + self.seconds / parts
        while len(found) < LEAST_REPEATS or time.perf_counter() < until:
            start = self.now()
            call()
            found.append(self.now() - start)
        return statistics.median(found)


def start(*, one_core: bool) -> tuple[int, int, str, Timer]:
    """Read rank, world size and folder from the command line, and pin one thread to its cores, or to one of them."""
    rank, world_size = int(sys.argv[1]), int(sys.argv[2])
    cores = json.loads(sys.argv[5])
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, [cores[rank % len(cores)]] if one_core else cores)
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return rank, world_size, sys.argv[4], Timer(device, float(sys.argv[3]))


def say(results: Iterable[tuple[str, Any]]) -> None:
    """Print the name of each result at once, and all results at the end."""
    found: dict[str, list[Any]] = {}
    for name, value in results:
        found.setdefault(name, []).append(value)
        print(name, flush=True)
    print(json.dumps(found))
