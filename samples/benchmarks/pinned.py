"""The training sample on few cores: neighbouring ranks share a core, and a message does not preempt a rank.

torchrun -m samples.benchmarks.pinned takes the arguments of samples.train. Ranks are numbered tensor, pipeline,
data, so with as many replicas as cores each replica has a core of its own and its messages stay there. Linux only.
"""

from __future__ import annotations

import os


def schedule_in_batches() -> None:
    """Give this process, and the threads it will start, Linux's batch scheduling.

    Under the usual policy a process that a message wakes interrupts the one that is computing.
    """
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def keep_core(rank: int, world_size: int) -> None:
    """Bind this process, and the threads it will start, to its share of the allowed cores."""
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // world_size)
    first = rank * len(cores) // world_size
    os.sched_setaffinity(0, cores[first : first + share])


if __name__ == "__main__":
    keep_core(int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)))
    schedule_in_batches()
    from samples import train  # only now: torch starts threads, which inherit both

    train.main()
