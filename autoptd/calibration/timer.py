"""How the processes that `autoptd.calibrate` starts take time, and say it.

    python -m autoptd.calibration.kernel_timing  RANK WORLD_SIZE SECONDS FOLDER CORES
    python -m autoptd.calibration.message_timing RANK WORLD_SIZE SECONDS FOLDER CORES

Each thing is timed for about SECONDS. A process prints a line for each and last, as JSON, all results: seconds of the
device alone. A kernel's on a CPU are those of its core (CPU time), which other processes change little.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

WARM_UPS, LEAST_REPEATS = 2, 3


class Timer:
    """Times calls on `device`, each kind for about `seconds`."""

    def __init__(self, device: torch.device, seconds: float) -> None:
        self.device = device
        self.seconds = seconds

    def now(self) -> float:
        """Seconds of this thread's core, or of the device when it has done all it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            return time.perf_counter()
        return time.thread_time()

    def time(self, call: Callable[[], object], parts: int = 1) -> float:
        """The median of repeated calls, one of so many `parts` of what is timed."""
        for _ in range(WARM_UPS):
            call()
        found: list[float] = []
        until = time.perf_counter() + self.seconds / parts
        while len(found) < LEAST_REPEATS or time.perf_counter() < until:
            start = self.now()
            call()
            found.append(self.now() - start)
        return statistics.median(found)


@dataclass(frozen=True)
class Place:
    """Which process this is, of how many, and where they meet: a `folder`."""

    rank: int
    world_size: int
    folder: str


def start(*, one_core: bool) -> tuple[Place, Timer]:
    """Read the command line; keep to the cores it names, or to one of them, with one thread."""
    rank, world_size = int(sys.argv[1]), int(sys.argv[2])
    cores = json.loads(sys.argv[5])
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, [cores[rank % len(cores)]] if one_core else cores)
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return Place(rank, world_size, sys.argv[4]), Timer(device, float(sys.argv[3]))


def say(results: Iterable[tuple[str, Any]]) -> None:
    """Print each result's name when it is there, and all by their names."""
    found: dict[str, list[Any]] = {}
    for name, value in results:
        found.setdefault(name, []).append(value)
        print(name, flush=True)
    print(json.dumps(found))
