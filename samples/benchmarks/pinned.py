"""The training sample on few cores: neighbouring ranks share a core, and a message does not preempt a rank.

torchrun -m samples.benchmarks.pinned takes the arguments of samples.train. Ranks are numbered tensor, pipeline,
data: with as many replicas as cores, each replica has a core of its own and its messages stay there. Where the
system cannot do it (it is Linux's), nothing is changed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence


def schedule_in_batches(process: int = 0) -> None:
    """Give `process` (0: this one), and the threads it will start, Linux's batch scheduling.

    Under the usual policy a process that a message wakes interrupts the one that is computing.
    """
    if hasattr(os, "SCHED_BATCH"):
        os.sched_setscheduler(process, os.SCHED_BATCH, os.sched_param(0))


def keep_cores(rank: int, num_ranks: int, process: int = 0) -> None:
    """Bind `process` (0: this one), and the threads it will start, to its share of our cores, at least one."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(process, own_cores(sorted(os.sched_getaffinity(0)), rank, num_ranks))


def own_cores(cores: Sequence[int], rank: int, num_ranks: int) -> Sequence[int]:
    """The cores of `rank`: a contiguous share of `cores`, or one that neighbours have too."""
    first, end = rank * len(cores) // num_ranks, (rank + 1) * len(cores) // num_ranks
    return cores[first : max(first + 1, end)]


if __name__ == "__main__":
    keep_cores(int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    schedule_in_batches()
    from samples import train  # only now: torch starts threads, which inherit both

    train.main()
