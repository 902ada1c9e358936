"""Put a rank under watch when a program is bound: its place, its watchdog, and its end with its launcher's."""

from __future__ import annotations

import ctypes
import math
import os
import signal
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.distributed.distributed_c10d import _get_default_store

from autoptd.runtime.connection import Connection
from autoptd.runtime.failure import Record
from autoptd.runtime.journal import Journal, TracedPosition
from autoptd.runtime.manifest import Manifest
from autoptd.runtime.position import Position
from autoptd.runtime.roster import gather_roster
from autoptd.runtime.watchdog import Watchdog

PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>

_IMPORTED_BY = os.getpid(), os.getppid()
_watchdogs: list[Watchdog] = []  # of this process: one at most


def read_limit() -> float:
    """AUTOPTD_TIMEOUT in seconds, default 120. ValueError for anything but a positive number."""
    text = os.environ.get("AUTOPTD_TIMEOUT", "120")
    try:
        limit = float(text)
    except ValueError:
        limit = math.nan
    if not limit > 0:
        raise ValueError(
            f"AUTOPTD_TIMEOUT is {text!r}, expected a positive number: the seconds that a rank may not move"
        )
    return limit


def watch(manifest: Manifest, connection: Connection, compiles: bool) -> None:
    """Watch this process's rank from now on; every rank must call it. `compiles`: the first calls may take longer.

    Where torchrun has started this process, it ends with torchrun. A rank without peers has no watchdog.
    """
    limit = read_limit()
    launched = "TORCHELASTIC_RUN_ID" in os.environ
    if launched and sys.platform == "linux":
        die_with_parent()
    if manifest.mesh.size == 1:
        connection.position = _make_position(None, {}, rank=0)
    else:
        if not _watchdogs:
            _watchdogs.append(_make_watchdog(manifest, connection, limit))
            _watchdogs[0].start(launched)
        (watchdog,) = _watchdogs
        watchdog.manifest, watchdog.compiles = manifest, compiles
        connection.position = watchdog.position
    if isinstance(connection.position, TracedPosition):
        connection.position.trace_groups(connection)


def _make_watchdog(manifest: Manifest, connection: Connection, limit: float) -> Watchdog:
    roster = gather_roster(connection.rank.device)
    # A store's calls wait for each other: the thread has a connection of its own.
    store: Any = _get_default_store()
    store = None if roster.everybody else store.clone()
    record = Record(Path(tempfile.gettempdir()) / f"{roster.name}.json", store)
    peers = {rank: roster.slots(rank) for rank in roster.processes}
    position = _make_position(roster.slots(roster.rank), peers, roster.rank)
    return Watchdog(manifest, roster, record, position, limit)


def _make_position(slots: memoryview | None, peers: Mapping[int, memoryview], rank: int) -> Position:
    folder = os.environ.get("AUTOPTD_TRACE")
    return TracedPosition(slots, peers, Journal(Path(folder), rank)) if folder else Position(slots, peers)


def die_with_parent() -> None:
    """Have Linux kill this process when its parent ends, or do so if it has ended since this module was imported."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    importer, parent = _IMPORTED_BY
    if importer == os.getpid() and parent != os.getppid():
        os.kill(importer, signal.SIGKILL)
