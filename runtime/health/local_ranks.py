"""The ranks on this machine: the shared memory of their positions, and handles that tell when a process ends."""

import json
import mmap
import os
import secrets
import socket
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autoptd.runtime.health.activity import SLOTS

BYTES = 8 * SLOTS


@dataclass(frozen=True)
class LocalRanks:
    """The ranks on the machine of rank `rank`.

    `processes` has a pidfd (-1 if the system has none) for each other rank of this machine, by global rank; `everybody`
    is true if there is no other machine. `name` is this job's alone. `store` is torch's, kept as rank 0 may serve it.
    """

    rank: int
    name: str
    processes: Mapping[int, int]
    everybody: bool
    board: memoryview
    store: Any

    def slots(self, rank: int) -> memoryview:
        """Return the slots of the position of a rank of this machine."""
        return self.board[rank * SLOTS : (rank + 1) * SLOTS]


def gather_local_ranks(store: Any, own: int, size: int, limit: float) -> LocalRanks:
    """Find the ranks of this machine through torch's `store`. Every rank must call it.

    RuntimeError names the ranks that do not call it within `limit` seconds, or before gloo finds that one has ended.
    """
    machine, began = machine_number(), time.monotonic()
    keys = [f"rank {rank}" for rank in range(size)]
    store.set(keys[own], json.dumps([os.getpid(), machine, secrets.randbits(62)]))
    if store.add("come", 1) == size:
        store.set("all", "")
    gloo = dist.is_initialized() and "cpu:gloo" in dist.get_backend_config()
    arrival = dist.all_reduce(torch.zeros(1), async_op=True) if gloo else None
    while not store.check(["all"]):
        waited = time.monotonic() - began
        late = waited > limit or (arrival is not None and arrival.is_completed())
        if late and (missing := [rank for rank, key in enumerate(keys) if not store.check([key])]):
            raise RuntimeError(f"ranks {missing} did not come to bind in {waited:.0f} s: they ended, or hang")
        time.sleep(min(0.01 + waited / 10, 1))
    texts = store.multi_get(keys) if store.has_extended_api() else map(store.get, keys)
    rows = [json.loads(text) for text in texts]
    name = f"autoptd-{rows[0][2]:x}"
    here = [rank for rank, row in enumerate(rows) if row[1] == machine]
    path = Path(tempfile.gettempdir()) / f"{name}.ranks"
    number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        os.ftruncate(number, size * BYTES)
        board = memoryview(mmap.mmap(number, size * BYTES)).cast("q")
    finally:
        os.close(number)
    processes = {rank: _open_process(rank, rows[rank][0]) for rank in here if rank != own}
    if store.add(f"machine {machine}", 1) == len(here):
        path.unlink()  # all have opened it: the memory lives as long as they do, without a file
    return LocalRanks(own, name, processes, len(here) == size, board, store)


def _open_process(rank: int, number: int) -> int:
    """Open a pidfd of a rank's process; -1 if the system has none."""
    try:
        return os.pidfd_open(number) if hasattr(os, "pidfd_open") else -1
    except ProcessLookupError:
        raise RuntimeError(f"rank {rank} has ended while it waited for the others in bind") from None


def machine_number() -> int:
    """Return a number that is equal in processes that see each other's process ids and temporary files only."""
    marks = [socket.gethostname()]
    boot, space = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    if boot.exists():
        marks += [boot.read_text(), str(space.stat().st_ino)]
    return int.from_bytes(sha256(" ".join([*marks, tempfile.gettempdir()]).encode()).digest()[:7])
