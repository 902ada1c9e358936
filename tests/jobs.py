"""Jobs that are left to end by themselves: forked ranks, each with its own stderr, that nobody kills but they."""

from __future__ import annotations

import gc
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

DEADLINE = 60  # seconds after which a job counts as hanging


@dataclass(frozen=True)
class Ended:
    """How a job ended: by rank, its wait status, what it wrote to stderr, and its seconds from `began` of `mark`."""

    statuses: Mapping[int, int]
    stderr: Mapping[int, str]
    seconds: Mapping[int, float]

    @property
    def lines(self) -> list[str]:
        """What the ranks wrote, in the order of their ends."""
        return [
            line for r in sorted(self.seconds, key=self.seconds.__getitem__) for line in self.stderr[r].splitlines()
        ]


def mark(folder: Path) -> None:
    """The rank that fails says that it does so now."""
    (folder / "failed").write_text(str(time.time()))


def run_job(
    function: Callable[[int], Any],
    world_size: int,
    folder: Path,
    environment: Mapping[str, str] | None = None,
    machines: int = 1,
) -> Ended:
    """Run ``function(rank)`` in forked ranks, and wait until all have ended; temporary files go below `folder`.

    Exceptions go to ``sys.excepthook``, as an interpreter's do. With two `machines` each half of the ranks has a
    folder of its own, so that it takes the others to be elsewhere. RuntimeError where one has not ended in time.
    """
    listener = socket.create_server(("127.0.0.1", 0), backlog=4 * world_size)
    variables = {
        **(environment or {}),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(listener.getsockname()[1]),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    processes: dict[int, int] = {}
    for rank in range(world_size):
        temporary = folder / f"machine_{rank * machines // world_size}"
        temporary.mkdir(exist_ok=True)
        process = os.fork()
        if process == 0:
            os.environ.update(variables, RANK=str(rank), LOCAL_RANK=str(rank))
            tempfile.tempdir = str(temporary)
            _work(function, rank, folder)
        processes[process] = rank
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1",
        int(variables["MASTER_PORT"]),
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    try:
        statuses, ends = _wait(processes)
    finally:
        for process in processes:
            os.kill(process, 9)
            os.waitpid(process, 0)
        del store
    began = float((folder / "failed").read_text())
    stderr = {rank: (folder / f"{rank}.err").read_text() for rank in range(world_size)}
    return Ended(statuses, stderr, {rank: end - began for rank, end in ends.items()})


def _wait(processes: dict[int, int]) -> tuple[dict[int, int], dict[int, float]]:
    """Status and time of each rank's end; those that have ended are taken out of `processes`."""
    statuses: dict[int, int] = {}
    ends: dict[int, float] = {}
    until = time.monotonic() + DEADLINE
    while processes:
        for process, rank in list(processes.items()):
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                statuses[rank], ends[rank] = status, time.time()
                del processes[process]
        if time.monotonic() > until:
            raise RuntimeError(f"ranks {sorted(processes.values())} have not ended after {DEADLINE} s")
        time.sleep(0.01)
    return statuses, ends


def _work(function: Callable[[int], Any], rank: int, folder: Path) -> None:
    number = os.open(folder / f"{rank}.err", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(number, 2)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    gc.disable()  # a collection would copy every page that the rank shares with its parent,
    gc.freeze()  # and one that a test asks for looks at the rank's own objects
    torch.set_num_threads(1)
    code = 1
    try:
        dist.init_process_group("gloo")
        function(rank)
        dist.barrier()
        code = 0
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        os._exit(code)
