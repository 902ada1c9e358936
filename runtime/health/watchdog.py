"""A watchdog in every rank: it ends a job in which a rank fails, dies or hangs, and reports the first cause once.

The first failing rank writes the record and shows its traceback; every other one prints a line. For a rank that was
killed or stopped, the first rank that notices writes the record, with the place that the dead rank shared.
"""

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
from autoptd.runtime.health.failure_record import Failure, FailureRecord
from autoptd.runtime.health.local_ranks import LocalRanks
from autoptd.runtime.program.manifest import Manifest

INTERVAL = 0.5  # seconds between looks
SILENT = 2.0  # seconds without a heartbeat: the process is stopped
ENDED = "its process ended without a word (killed, or out of memory?)"
# The files that send and await messages: an error raised there may come of a peer's end.
MESSAGES = re.compile(r'[^"]*/(torch/distributed/|runtime/comm/(point_to_point|groups)\.py)')
GRACE = 2.0  # seconds for the main thread to fail by itself, or for exit handlers
COMPUTING = 0.05  # of its time: such a rank does not only wait
PATIENCE = 10  # times the limit, while a peer runs the user's own code

Exit = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


class Watchdog:
    """The thread that watches the ranks of its machine; `limit` is the longest time, in seconds, without a move."""

    def __init__(
        self, manifest: Manifest, local: LocalRanks, record: FailureRecord, position: Position, limit: float
    ) -> None:
        self.position = position
        self.manifest = manifest
        self._local = local
        self._record = record
        self._limit = limit
        self._ended: set[int] = set()
        self._looked = time.monotonic()
        self._resumed = self._looked
        self._clock = time.pthread_getcpuclockid(threading.main_thread().ident or 0)
        self._seen = (0, 0)  # the start of the activity, and the CPU time of the main thread then
        self._handled = threading.Event()
        self._printing = threading.Lock()
        self._printed = False
        self._cut_off = ""  # the traceback of this rank's failed message
        self._shown: Exit = sys.excepthook
        self._wakeup, self._alarm = socket.socketpair()

    def start(self, launched: bool) -> None:
        """Start to watch; if torchrun has `launched` this process, explain its SIGTERM too."""
        self._beat()
        sys.excepthook = self._explain
        in_main = threading.current_thread() is threading.main_thread()
        if launched and in_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            # A Python handler runs in the main thread, which may be waiting for a peer: wake the watchdog instead.
            self._alarm.setblocking(False)
            signal.signal(signal.SIGTERM, _take_notice)
            signal.set_wakeup_fd(self._alarm.fileno(), warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=self._forget)
        atexit.register(self._record.leave_store)
        threading.Thread(target=self._watch, name="autoptd watchdog", daemon=True).start()

    def _forget(self) -> None:
        """Undo `start` in a forked child, such as a data loader's worker."""
        sys.excepthook = self._shown
        atexit.unregister(self._record.leave_store)
        if signal.getsignal(signal.SIGTERM) is _take_notice:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _watch(self) -> None:
        ranks = {number: rank for rank, number in self._local.processes.items() if number >= 0}
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
                # Unless it is to end at once, its main thread has time to fail by itself.
                if terminated or not self._handled.wait(GRACE / 2):
                    self._follow(failure, self.position.read())
                    os._exit(1)
                return
            if terminated and time.monotonic() - terminated > INTERVAL:
                _die_terminated()
                terminated = 0.0

    def _beat(self) -> None:
        """Write the heartbeat of this process, and the CPU time of its main thread in the current activity."""
        slots, computed = self.position.slots, time.clock_gettime_ns(self._clock)
        if slots[SINCE] != self._seen[0]:
            self._seen = slots[SINCE], computed
        # A thread that waits for a GPU spins, so that its CPU time does not tell it from the ranks that wait for it.
        slots[BUSY] = 0 if torch.cuda.is_initialized() else computed - self._seen[1]
        slots[HEARTBEAT] = time.monotonic_ns()

    def _find_failure(self, interval: float) -> Failure | None:
        now = time.monotonic()
        if now - self._looked > SILENT + interval:
            self._resumed = now  # this process was stopped, and the others may have been too
        self._looked = now
        self._beat()
        return self._record.read() or self._find_ended() or self._find_hanging(now)

    def _find_ended(self) -> Failure | None:
        """Find a rank whose process ended in a call, before a call of this rank, or within its message."""
        calls = self.position.read().calls
        for rank in sorted(self._ended):
            place = read_place(self._local.slots(rank))
            if place.activity or place.collective or place.calls < calls or self._cut_off:
                return self._claim(rank, place, ENDED, self._cut_off)
        return None

    def _find_hanging(self, now: float) -> Failure | None:
        """Find the rank to blame if this one has waited too long: one that is silent, computes, or stopped first."""
        own = self.position.read()
        if not own.activity and not own.collective:
            return None
        places = {r: read_place(self._local.slots(r)) for r in self._local.processes.keys() - self._ended}
        silent = [rank for rank, place in places.items() if now - place.heartbeat > SILENT + INTERVAL]
        behind = [rank for rank, place in places.items() if place.calls < own.calls]
        elsewhere = any(r not in silent and not (own.activity and places[r].activity) for r in behind)
        if elsewhere and now - own.since < self._limit * PATIENCE:
            self._resumed = now
        waited = now - max(own.since, self._resumed)
        if waited < self._limit:
            return None
        # A collective call may take any time, and reading or writing a file may hold up a whole process.
        for rank in (rank for rank in silent if own.activity or now - places[rank].heartbeat > self._limit):
            # The launcher would wait long for it to end.
            reason = f"its process has been silent for {now - places[rank].heartbeat:.0f} s (stopped?)"
            failure = self._claim(rank, places[rank], reason)
            signal.pidfd_send_signal(self._local.processes[rank], signal.SIGKILL)
            return failure
        places[self._local.rank] = own
        awaited = {rank: place for rank, place in places.items() if place.activity or rank in behind}
        if not awaited:  # all are in the collective call
            return None
        # The ranks that wait for it do not compute; its share of a busy machine may be small.
        rank, place = max(awaited.items(), key=lambda item: item[1].busy)
        computing = place.busy > waited * COMPUTING
        if not computing:
            rank, place = min(awaited.items(), key=lambda item: item[1].since)
        reason = f"it has not moved for {now - place.since:.0f} s{', and computes' if computing else ''}"
        return self._claim(rank, place, reason)

    def _claim(self, rank: int, place: Place, reason: str, trace: str = "") -> Failure:
        ranks = sorted({*self._local.processes, self._local.rank})
        places = {str(r): str(read_place(self._local.slots(r))) for r in ranks}
        where, at = f"{place} ({self._stages(rank, place)})", str(self.manifest.mesh.coordinates(rank))
        return self._record.claim(Failure(rank, where, reason, socket.gethostname(), at, trace, places))

    def _stages(self, rank: int, place: Place) -> str:
        if place.stage is not None:
            return f"stage {place.stage}"
        mesh = self.manifest.mesh
        own = range(mesh.coordinates(rank).pipeline, len(self.manifest.stages), mesh.pipeline)
        return f"stage{'s' * (len(own) > 1)} {', '.join(map(str, own))}"

    def _follow(self, failure: Failure, own: Place) -> None:
        """Print, once, the line of a rank, at `own`, that ends for another's failure; then let the other end first."""
        with self._printing:
            if self._printed:
                return
            self._printed = True
        about = f"rank {failure.rank} failed first, in {failure.place}: {failure.reason}; see {self._record.path}"
        print(f"autoptd: rank {self._local.rank} stopped in {own}: {about}", file=sys.stderr, flush=True)
        process = self._local.processes.get(failure.rank, -1)
        if process >= 0:  # so that the launcher names it: it names the first process to end
            select.select([process], [], [], GRACE / 2)

    def _explain(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Show the error, as the exception hook, if it is the first of the job; else print a line about the first."""
        if isinstance(sys.stderr, io.StringIO):  # the hook of init_process_group would swallow this output
            sys.stderr = sys.__stderr__
        self._handled.set()
        text = "".join(traceback.format_exception(kind, error, trace))
        failed = isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError)
        self._cut_off = text if failed and MESSAGES.match(text.rpartition('File "')[2]) else ""
        first = self._record.read()
        until = time.monotonic() + GRACE / 2
        while first is None and isinstance(error, RuntimeError) and time.monotonic() < until:
            time.sleep(0.01)  # the cause may be a peer's end that is about to be noticed
            first = self._record.read()
        place = self.position.place_of(error)
        reason = " ".join(traceback.format_exception_only(kind, error)[0].split())
        first = first or self._claim(self._local.rank, place, reason, text)
        if first.traceback == text and first.rank == self._local.rank:
            what = f"rank {first.rank} failed in {first.place}: {reason}"
            with self._printing:  # a SIGTERM now waits until the error is shown, and adds no line
                self._printed = True
                print(f"autoptd: {what}; see {self._record.path}", file=sys.stderr, flush=True)
                self._shown(kind, error, trace)
        else:
            self._follow(first, place)
        # The end of the interpreter, and exit handlers, might wait for messages that no longer come.
        faulthandler.dump_traceback_later(GRACE, exit=True, file=open(os.devnull, "w"))  # noqa: SIM115
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(1)


def _take_notice(number: int, frame: object) -> None:
    """Replace the default handler, which would end the process without an explanation; the watchdog ends it."""


def _die_terminated() -> None:
    """End by SIGTERM, as a process without a handler does, unless the user has set a handler since."""
    if signal.getsignal(signal.SIGTERM) is _take_notice:
        # Python allows only the main thread to set a handler.
        ctypes.CDLL(None).signal(signal.SIGTERM, ctypes.c_void_p(0))
        os.kill(os.getpid(), signal.SIGTERM)
