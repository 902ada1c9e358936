"""The training sample on few cores: pipeline neighbours share a core, and a message does not preempt a rank.

torchrun -m samples.benchmarks.pinned takes the arguments of samples.train, --mesh with them. Ranks are numbered tensor,
pipeline, data. Pipeline ranks wait for each other, in the bubble, where tensor ranks and replicas compute at the same
time: so the former share a core, which then never idles. Where the system has no such calls (they are Linux's),
nothing is changed.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence


def schedule_in_batches(process: int = 0) -> None:
    """Give `process` (0: this one), and the threads it will start, Linux's batch scheduling.

    Under the usual policy a process that a message wakes interrupts the one that is computing.
    """
    if hasattr(os, "SCHED_BATCH"):
        os.sched_setscheduler(process, os.SCHED_BATCH, os.sched_param(0))


def keep_cores(rank: int, mesh: Sequence[int], process: int = 0) -> None:
    """Bind `process` (0: this one), and the threads it will start, to its share of our cores, at least one."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(process, own_cores(sorted(os.sched_getaffinity(0)), rank, mesh))


def own_cores(cores: Sequence[int], rank: int, mesh: Sequence[int]) -> Sequence[int]:
    """The cores of `rank` of a mesh (tensor, pipeline, data): a share of `cores` for each line of pipeline ranks."""
    tensor, pipeline, data = mesh
    line, lines = rank // (tensor * pipeline) * tensor + rank % tensor, tensor * data
    first, end = line * len(cores) // lines, (line + 1) * len(cores) // lines
    return cores[first : max(first + 1, end)]


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(add_help=False)
    arguments.add_argument("--mesh", default="1,1,1")
    given = [int(size) for size in arguments.parse_known_args()[0].mesh.split(",")]
    here, everywhere = (int(os.environ.get(name, 1)) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    if not here == everywhere == math.prod(given):
        sys.exit(f"pinned: {here} of {everywhere} processes are here, --mesh {given} is of {math.prod(given)}")
    keep_cores(int(os.environ.get("RANK", 0)), given)
    schedule_in_batches()
    from samples import train  # only now: torch starts threads, which inherit both

    train.main()
