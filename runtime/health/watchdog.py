"""A watchdog in every rank: a job whose rank fails, dies or hangs ends, and says once what came first.

The first failing rank writes the record and shows its traceback; every other one prints a line. A rank that was
killed or stopped writes nothing: whoever sees it first does so for it, from the place that it shared.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import io
import os
import re
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch

from autoptd.runtime.health.activity import BUSY, HEARTBEAT, SINCE, Place, Position, read_place
from autoptd.runtime.health.failure_record import Failure, Record
from autoptd.runtime.health.local_ranks import Roster
from autoptd.runtime.program.manifest import Manifest

INTERVAL = 0.5  # seconds between looks
SILENT = 2.0  # without a heartbeat: the process is stopped
ENDED = "its process ended without a word (killed, or out of memory?)"
# Files in which messages are sent and awaited: what is raised there may be of a peer's end.
MESSAGES = re.compile(r'[^"]*/(torch/distributed/|runtime/comm/(point_to_point|groups)\.py)')
GRACE = 2.0  # for the main thread to fail of itself, or for what runs at exit
COMPUTING = 0.05  # of its time: a rank that does not only wait
PATIENCE = 10  # times the limit, while a stage is compiled or a peer is in the user's own code

Exit = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


class Watchdog:
    """The thread that watches this rank and those of its machine; `limit` is how long, in seconds, one may not move."""

    def __init__(
        self, manifest: Manifest, roster: Roster, record: Record, position: Position, limit: float
    ) -> None:
        self.position = position
        self.manifest = manifest
        self.compiles = False
        self._roster = roster
        self._record = record
        self._limit = limit
        self._ended: set[int] = set()
        self._looked = time.monotonic()
        self._resumed = self._looked
        self._clock = time.pthread_getcpuclockid(threading.main_thread().ident or 0)
        self._seen = (0, 0)  # since when the rank is where it is, and what its main thread had computed then
        self._handled = threading.Event()
        self._printing = threading.Lock()
        self._printed = False
        self._cut_off = ""  # the traceback of this rank's failed message
        self._shown: Exit = sys.excepthook
        self._wakeup, self._alarm = socket.socketpair()

    def start(self, launched: bool) -> None:
        """Start watching; where torchrun has `launched` this process, its SIGTERM no longer goes unexplained."""
        self._beat()
        sys.excepthook = self._explain
        in_main = threading.current_thread() is threading.main_thread()
        if launched and in_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            # A handler of Python's waits for the main thread, which may be waiting for a peer: the thread is woken.
            self._alarm.setblocking(False)
            signal.signal(signal.SIGTERM, _take_notice)
            signal.set_wakeup_fd(self._alarm.fileno(), warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=self._forget)
        atexit.register(self._record.leave_store)
        threading.Thread(target=self._watch, name="autoptd watchdog", daemon=True).start()

    def _forget(self) -> None:
        """In a forked child, such as a data loader's worker: none of this is its own."""
        sys.excepthook = self._shown
        atexit.unregister(self._record.leave_store)
        if signal.getsignal(signal.SIGTERM) is _take_notice:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _watch(self) -> None:
        ranks = {number: rank for rank, number in self._roster.processes.items() if number >= 0}
        poll = select.poll()
        for number in (self._wakeup.fileno(), *ranks):
            poll.register(number, select.POLLIN)
        interval = min(INTERVAL, self._limit / 5)
        terminated = 0.0
        while True:
            for number, _ in poll.poll(1000 * (interval if not terminated else 0.01)):
                if number in ranks:
                    self._ended.add(ranks[number])
                    poll.unregister(number)
                elif signal.SIGTERM in self._wakeup.recv(4096):
                    terminated = terminated or time.monotonic()
            failure = self._find_failure(interval)
            if failure is not None:
                self._end(failure, at_once=bool(terminated))
                return
            if terminated and time.monotonic() - terminated > INTERVAL:
                _die_terminated()
                terminated = 0.0

    def _beat(self) -> None:
        """Tell the others that this process runs, and how long its main thread has computed where it is."""
        slots, computed = self.position.slots, time.clock_gettime_ns(self._clock)
        if slots[SINCE] != self._seen[0]:
            self._seen = slots[SINCE], computed
        # A thread that waits for a GPU computes without end: by that nobody is told from those who wait for it.
        slots[BUSY] = 0 if torch.cuda.is_initialized() else computed - self._seen[1]
        slots[HEARTBEAT] = time.monotonic_ns()

    def _find_failure(self, interval: float) -> Failure | None:
        now = time.monotonic()
        if now - self._looked > SILENT + interval:
            self._resumed = now  # this process was stopped, and so may the others have been
        self._looked = now
        self._beat()
        found = self._record.read()
        return found or self._find_ended() or self._find_hanging(now)

    def _find_ended(self) -> Failure | None:
        """A rank whose process ended where others need it: in a call or duty, before this rank's, or in its message."""
        calls = self.position.read().calls
        for rank in sorted(self._ended):
            place = read_place(self._roster.slots(rank))
            if place.activity or place.duty or place.calls < calls or self._cut_off:
                return self._claim(rank, place, ENDED, self._cut_off)
        return None

    def _find_hanging(self, now: float) -> Failure | None:
        """The rank to blame if this one has waited too long: one that is silent, else who moved last."""
        own = self.position.read()
        if not own.activity and not own.duty:
            return None
        places = {r: read_place(self._roster.slots(r)) for r in self._roster.processes.keys() - self._ended}
        silent = [rank for rank, place in places.items() if now - place.heartbeat > SILENT + INTERVAL]
        behind = [rank for rank, place in places.items() if place.calls < own.calls]
        elsewhere = any(r not in silent and not (own.activity and places[r].activity) for r in behind)
        compiling = self.compiles and self.position.compiling
        if (elsewhere or compiling) and now - own.since < self._limit * PATIENCE:
            self._resumed = now
        waited = now - max(own.since, self._resumed)
        if waited < self._limit:
            return None
        # A duty takes as long as it does, and a file that is read or written may hold up a whole process.
        for rank in (rank for rank in silent if own.activity or now - places[rank].heartbeat > self._limit):
            # It would hold up the launcher, which waits long for it to end.
            reason = f"its process has been silent for {now - places[rank].heartbeat:.0f} s (stopped?)"
            failure = self._claim(rank, places[rank], reason)
            signal.pidfd_send_signal(self._roster.processes[rank], signal.SIGKILL)
            return failure
        places[self._roster.rank] = own
        awaited = {rank: place for rank, place in places.items() if place.activity or rank in behind}
        if not awaited:  # all are in the duty
            return None
        # Those who wait for it do not compute; its share of a busy machine may be small.
        rank, place = max(awaited.items(), key=lambda item: item[1].busy)
        computing = place.busy > waited * COMPUTING
        if not computing:
            rank, place = min(awaited.items(), key=lambda item: item[1].since)
        reason = f"it has not moved for {now - place.since:.0f} s{', and computes' if computing else ''}"
        return self._claim(rank, place, reason)

    def _claim(self, rank: int, place: Place, reason: str, trace: str = "") -> Failure:
        slots = self._roster.slots
        places = {
            str(r): str(read_place(slots(r))) for r in sorted({*self._roster.processes, self._roster.rank})
        }
        failure = Failure(
            rank,
            f"{place} ({self._stages(rank, place)})",
            reason,
            socket.gethostname(),
            str(self.manifest.mesh.coordinates(rank)),
            trace,
            places,
        )
        return self._record.claim(failure)

    def _stages(self, rank: int, place: Place) -> str:
        if place.stage is not None:
            return f"stage {place.stage}"
        mesh = self.manifest.mesh
        own = range(mesh.coordinates(rank).pipeline, len(self.manifest.stages), mesh.pipeline)
        return f"stage{'s' * (len(own) > 1)} {', '.join(map(str, own))}"

    def _end(self, failure: Failure, at_once: bool) -> None:
        """End this process for `failure`; unless `at_once`, its main thread may fail of itself first."""
        if at_once or not self._handled.wait(GRACE / 2):
            self._follow(failure, self.position.read())
            os._exit(1)

    def _follow(self, failure: Failure, own: Place) -> None:
        """Print the line of a rank, at `own`, that ends for another's failure, once; then let that one end first."""
        with self._printing:
            if self._printed:
                return
            self._printed = True
        _write(
            f"autoptd: rank {self._roster.rank} stopped in {own}: rank {failure.rank} failed first, in "
            f"{failure.place}: {failure.reason}; see {self._record.path}"
        )
        process = self._roster.processes.get(failure.rank, -1)
        if process >= 0:  # so that the launcher, which names the first to end, names it
            select.select([process], [], [], GRACE / 2)

    def _explain(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """The exception hook: show the error if it is the job's first, else one line about the first."""
        if isinstance(sys.stderr, io.StringIO):  # init_process_group's hook would keep what this one writes
            sys.stderr = sys.__stderr__
        self._handled.set()
        text = "".join(traceback.format_exception(kind, error, trace))
        failed = isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError)
        self._cut_off = text if failed and MESSAGES.match(text.rpartition('File "')[2]) else ""
        first = self._record.read()
        until = time.monotonic() + GRACE / 2
        while first is None and isinstance(error, RuntimeError) and time.monotonic() < until:
            time.sleep(0.01)  # a peer's end may be the cause, and be about to be seen
            first = self._record.read()
        place = self.position.place_of(error)
        reason = " ".join(traceback.format_exception_only(kind, error)[0].split())
        mine = first is None
        if first is None:
            first = self._claim(self._roster.rank, place, reason, text)
            mine = first.traceback == text and first.rank == self._roster.rank
        if mine:
            with self._printing:  # a SIGTERM that comes now waits until it is shown, and adds no line
                self._printed = True
                _write(
                    f"autoptd: rank {first.rank} failed in {first.place}: {reason}; see {self._record.path}"
                )
                self._shown(kind, error, trace)
        else:
            self._follow(first, place)
        # The interpreter's end waits for messages that no longer come; what was registered for it may do so too.
        faulthandler.dump_traceback_later(GRACE, exit=True, file=open(os.devnull, "w"))  # noqa: SIM115
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(1)


def _take_notice(number: int, frame: object) -> None:
    """In place of the default, which ends a process before it can say why: the watchdog ends it."""


def _die_terminated() -> None:
    """End by SIGTERM, as a process does that has no handler; a user's own handler, set later, has its way."""
    if signal.getsignal(signal.SIGTERM) is _take_notice:
        # Python lets the main thread alone do so.
        ctypes.CDLL(None).signal(signal.SIGTERM, ctypes.c_void_p(0))
        os.kill(os.getpid(), signal.SIGTERM)


def _write(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
