"""Start a rank's watchdog when a program is bound, and end its process with its launcher."""

import ctypes
import math
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store
from torch.distributed.rendezvous import rendezvous

from autoptd.runtime.comm.connection import Connection, check_world_size, connect
from autoptd.runtime.health.activity import Position
from autoptd.runtime.health.failure_record import FailureRecord
from autoptd.runtime.health.local_ranks import gather_local_ranks
from autoptd.runtime.health.watchdog import PATIENCE, Watchdog
from autoptd.runtime.program.manifest import Manifest

PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>

_IMPORTED_BY = os.getpid(), os.getppid()
_watchdogs: list[Watchdog] = []  # of this process: one at most


def read_limit() -> float:
    """Read AUTOPTD_TIMEOUT in seconds, default 120. ValueError for anything but a positive number."""
    text = os.environ.get("AUTOPTD_TIMEOUT", "120")
    try:
        limit = float(text)
    except ValueError:
        limit = math.nan
    if not limit > 0:
        raise ValueError(f"AUTOPTD_TIMEOUT is {text!r}, expected a positive number of seconds without a move")
    return limit


@contextmanager
def join(manifest: Manifest, device: torch.device, program: str) -> Iterator[Connection]:
    """Connect this rank to the others, and watch it from before its first message on; every rank must call it.

    Where torchrun has started this process, it ends with torchrun. A rank without peers has no watchdog.
    """
    check_world_size(manifest.mesh)
    limit, launched = read_limit(), end_with_launcher()
    if manifest.mesh.size == 1:
        position = Position()
    else:
        if not _watchdogs:
            _watchdogs.append(_make_watchdog(manifest, limit))
            _watchdogs[0].start(launched)
        (watchdog,) = _watchdogs
        watchdog.manifest = manifest
        position = watchdog.position
    with position.collective_call("bind"):
        connection = connect(manifest, device, program)
        connection.position = position
        yield connection


def _make_watchdog(manifest: Manifest, limit: float) -> Watchdog:
    patience = min(PATIENCE * limit, 86_400.0)  # a day
    # torchrun starts ranks again with the store that they had.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        if dist.is_initialized():
            store, own, size = _get_default_store(), dist.get_rank(), dist.get_world_size()
        else:
            store, own, size = next(rendezvous("env://", timeout=timedelta(seconds=patience)))
        local = gather_local_ranks(PrefixStore(f"autoptd/{attempt}", store), own, size, patience)
    except dist.DistError as error:
        raise RuntimeError(
            "the store by which ranks find each other was not reached in bind, or has ended: rank 0 (with torchrun the "
            f"launcher) serves it at {os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}, and has not come "
            f"there, or has ended: {str(error).splitlines()[0]}"
        ) from error
    # A store's calls wait for each other: the thread has a connection of its own.
    messages = None if local.everybody else local.store.clone()
    record = FailureRecord(Path(tempfile.gettempdir()) / f"{local.name}.json", messages)
    position = Position(local.slots(local.rank), {rank: local.slots(rank) for rank in local.processes})
    return Watchdog(manifest, local, record, position, limit)


def end_with_launcher() -> bool:
    """Have Linux kill this process when the torchrun that started it ends; return whether one did start it."""
    launched = "TORCHELASTIC_RUN_ID" in os.environ
    if launched and sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        importer, parent = _IMPORTED_BY
        if importer == os.getpid() and parent != os.getppid():
            os.kill(importer, signal.SIGKILL)
    return launched
