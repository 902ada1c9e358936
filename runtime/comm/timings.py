"""The times of a pipeline's ranks, measured or predicted, and their chrome trace, which Perfetto opens."""

import gzip
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from autoptd.runtime.comm.groups import Group
from autoptd.runtime.program.schedule import Action, Kind

WORDS: Mapping[Kind | str, str] = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    "data": "sums of gradients",
    "optimizer": "optimizer",
    "tensor": "all-reduce over the tensor ranks",
    "weights": "gradients of weights",
}


class TimelineEntry(NamedTuple):
    """A forward, backward or message of a pipeline rank, from `start` to `end` seconds after the step began."""

    rank: int
    action: Action
    start: float
    end: float


class Phase(NamedTuple):
    """Work of a pipeline rank beside or after the schedule: "data" (the sum of gradients) or "optimizer".

    Or inside a forward or backward: "tensor" (an all-reduce of the tensor ranks) and "weights" (weight gradients
    computed meanwhile).
    """

    rank: int
    name: str
    start: float
    end: float


Rows = Sequence[Sequence[TimelineEntry]]
Courses = Sequence[Sequence[tuple[float, int]]]  # of each rank, the bytes that it holds from a time on


def write_trace(
    path: str | Path, rows: Rows, phases: Sequence[Phase], memory: Courses, about: Mapping[str, str]
) -> None:
    """Write a chrome trace, compressed if `path` ends in .gz: a process per pipeline rank, with its memory over time.

    A rank's forwards and backwards are on one thread, its messages on one for each destination, and its phases, which
    may begin while the last backwards run, on one more; so are the all-reduces of the tensor ranks. `about` names the
    origin of the times.
    """
    events = list(_trace_events(rows, phases, memory))
    for event in events:
        # Perfetto joins threads with equal numbers, and puts the one with its process's number first.
        if "tid" in event:
            event["tid"] = event["tid"] * len(rows) + event["pid"]
    trace = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": dict(about)}
    data = json.dumps(trace, separators=(",", ":")).encode()
    Path(path).write_bytes(gzip.compress(data, mtime=0) if str(path).endswith(".gz") else data)


def _trace_events(rows: Rows, phases: Sequence[Phase], memory: Courses) -> Iterator[dict[str, Any]]:
    for rank, row in enumerate(rows):
        yield {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"pipeline rank {rank}"}}
        numbers = {_thread(entry, len(rows)) for entry in row}
        threads = {number: f"sends to rank {number - 1}" for number in numbers}
        threads |= {0: "compute", len(rows) + 1: "after the backwards"}
        if any(phase.rank == rank and phase.name == "tensor" for phase in phases):
            threads[len(rows) + 2] = "tensor ranks"
        for thread, words in sorted(threads.items()):
            yield {"name": "thread_name", "ph": "M", "pid": rank, "tid": thread, "args": {"name": words}}
    for row in rows:
        for entry in row:
            stage, kind, microbatch = entry.action
            category, thread = WORDS.get(kind, "send"), _thread(entry, len(rows))
            arguments = {"stage": stage, "microbatch": microbatch}
            yield _span(str(entry.action), category, entry.rank, thread, *entry[2:], arguments)
    for phase in phases:
        thread = {"weights": 0, "tensor": len(rows) + 2}.get(phase.name, len(rows) + 1)
        yield _span(WORDS[phase.name], phase.name, phase.rank, thread, phase.start, phase.end, {})
    for rank, course in enumerate(memory):
        for at, held in course:
            place = {"name": "memory", "ph": "C", "pid": rank}
            yield place | {"ts": _nanoseconds(at) / 1000, "args": {"bytes": held}}


def _thread(entry: TimelineEntry, num_ranks: int) -> int:
    """Return 0 for computing and 1 + the destination rank for a message: the messages of a channel queue."""
    return 1 + entry.action.counterpart.stage % num_ranks if entry.action.kind.sends else 0


def _span(
    name: str, category: str, rank: int, thread: int, start: float, end: float, arguments: Mapping[str, int]
) -> dict[str, Any]:
    # Perfetto counts whole nanoseconds and drops a span that begins before its neighbour ends, be it by one.
    begin, until = _nanoseconds(start), _nanoseconds(end)
    place = {"name": name, "cat": category, "ph": "X", "pid": rank, "tid": thread, "args": arguments}
    return place | {"ts": begin / 1000, "dur": (until - begin) / 1000}  # in microseconds


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


KINDS: tuple[Kind | str, ...] = (Kind.FORWARD, Kind.BACKWARD, "data", "tensor", "weights")
NOTHING = len(KINDS)  # of a row that fills the table of a rank with fewer spans
Span = tuple[Kind | str, int, int, Any, Any]


class Stopwatch:
    """A clock whose marks are cheap to set and are read later; on a GPU they are times of its stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> Any:
        """Return a mark of this moment: on a GPU, of the moment when its stream has finished the work so far."""
        if self._device.type != "cuda":
            return time.time()
        if torch.cuda.is_current_stream_capturing():
            return None  # a replay has no marks
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def read(self, marks: Sequence[Any]) -> list[float]:
        """Return the seconds since the epoch of each mark; wait for the device."""
        if self._device.type != "cuda":
            return list(marks)
        torch.cuda.synchronize(self._device)  # the marks may belong to another stream
        last = self.mark()
        last.synchronize()
        now = time.time()
        return [now - mark.elapsed_time(last) / 1000 for mark in marks]


@dataclass
class Measured:
    """The spans of this rank's last whole step: (kind, stage, microbatch, begin, end), with marks of the stopwatch.

    A forward or backward begins when its inputs have arrived; "data" is the sum of gradients, from the post of the
    first to the result of the last. Inside a forward or backward, "tensor" is an all-reduce over the tensor ranks, from
    its post to its result, and "weights" the computation of weight gradients meanwhile, if any.
    """

    stopwatch: Stopwatch
    spans: list[Span] = field(default_factory=list)
    begin: Any = None  # of the step, and its end: marks
    end: Any = None

    def start(self) -> None:
        """Begin a step and forget the one before."""
        self.spans = []
        self.begin = self.stopwatch.mark()

    def add(self, kind: Kind | str, begin: Any, end: Any = None, stage: int = 0, microbatch: int = 0) -> None:
        """Record a span that began at the mark `begin` and ends at `end`, or now; none in a graph."""
        if begin is not None:
            self.spans.append((kind, stage, microbatch, begin, self.stopwatch.mark() if end is None else end))

    def finish(self) -> None:
        """End the step."""
        self.end = self.stopwatch.mark()


def gather_measured(
    measured: Measured, pipeline: Group, device: torch.device
) -> tuple[list[list[TimelineEntry]], list[Phase]]:
    """Return a row of entries per pipeline rank, and the phases, in seconds from the first begin of any.

    Every rank of the `pipeline` must call it, after a step of all; `device` holds its tensors.
    """
    count = len(measured.spans)
    marks = measured.stopwatch.read([span[i] for i in (3, 4) for span in measured.spans])
    times = zip(measured.spans, marks[:count], marks[count:], strict=True)
    own = [[KINDS.index(kind), stage, microbatch, *span] for (kind, stage, microbatch, *_), *span in times]
    most = pipeline.all_reduce(torch.tensor([count], device=device), "max").item()
    own += [[NOTHING] * 5] * (int(most) - count)
    found = pipeline.all_gather(torch.tensor(own, dtype=torch.float64, device=device))
    tables = [[row for row in table.tolist() if row[0] != NOTHING] for table in found]
    origin = min(row[3] for table in tables for row in table)
    entries: list[list[TimelineEntry]] = [[] for _ in tables]
    phases = []
    for index, table in enumerate(tables):
        for number, stage, microbatch, begin, end in table:
            kind = KINDS[int(number)]
            if isinstance(kind, Kind):
                action = Action(int(stage), kind, int(microbatch))
                entries[index].append(TimelineEntry(index, action, begin - origin, end - origin))
            else:
                phases.append(Phase(index, kind, begin - origin, end - origin))
    return entries, phases
