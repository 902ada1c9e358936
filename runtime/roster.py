"""Who runs on this machine: where every rank's place is, and a handle that tells when its process has ended."""

from __future__ import annotations

import mmap
import os
import secrets
import socket
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import torch
import torch.distributed as dist

from autoptd.runtime.position import SLOTS

BYTES = 8 * SLOTS


@dataclass(frozen=True)
class Roster:
    """The job as rank `rank` sees it.

    `processes` has a pidfd (-1 where the system has none) for each other rank of this machine, by global rank;
    `everybody`: there is no other machine. `name` is the job's, the same on all its ranks and no other job's.
    """

    rank: int
    name: str
    processes: Mapping[int, int]
    everybody: bool
    board: memoryview

    def slots(self, rank: int) -> memoryview:
        """The position of a rank of this machine."""
        return self.board[rank * SLOTS : (rank + 1) * SLOTS]


def gather_roster(device: torch.device) -> Roster:
    """Learn from all ranks of the default group who is here. Every rank must call it."""
    own, size = dist.get_rank(), dist.get_world_size()
    machine = machine_number()
    rows = gather([os.getpid(), machine, secrets.randbits(62)], device)
    name = f"autoptd-{rows[0][2]:x}"
    here = [rank for rank, row in enumerate(rows) if row[1] == machine]
    path = Path(tempfile.gettempdir()) / f"{name}.ranks"
    number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        os.ftruncate(number, size * BYTES)
        board = memoryview(mmap.mmap(number, size * BYTES)).cast("q")
    finally:
        os.close(number)
    opened = getattr(os, "pidfd_open", lambda _: -1)
    processes = {rank: opened(rows[rank][0]) for rank in here if rank != own}
    gather([0], device)  # all have opened it: the memory lives as long as they do, and no file is left behind
    path.unlink(missing_ok=True)
    return Roster(own, name, processes, len(here) == size, board)


def machine_number() -> int:
    """The same in processes that see each other's process numbers and temporary files, and in no others."""
    marks = [socket.gethostname()]
    boot, space = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    if boot.exists():
        marks += [boot.read_text(), str(space.stat().st_ino)]
    return int.from_bytes(sha256(" ".join([*marks, tempfile.gettempdir()]).encode()).digest()[:7])


def find_others(given: Mapping[int, object]) -> tuple[list[int], int]:
    """The ranks that were `given` something else than most, and the first that was given what most were."""
    values = list(given.values())
    common = max(values, key=values.count)
    others = [rank for rank, value in given.items() if value != common]
    return others, next(rank for rank in given if rank not in others)


def gather(
    values: list[int], device: torch.device, group: dist.ProcessGroup | None = None
) -> list[list[int]]:
    """Every rank's `values`, as many on each, by its index in `group` (the default group). Each must call it."""
    own = torch.tensor(values, device=device)
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, own, group=group)
    return [row.tolist() for row in everyone]
