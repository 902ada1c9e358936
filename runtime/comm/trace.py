"""The timeline of a pipeline's ranks, predicted or measured: a chrome trace, which Perfetto opens, and a picture."""

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from colorsys import hls_to_rgb
from pathlib import Path
from typing import Any, NamedTuple

from autoptd.runtime.program.schedule import Action, Kind

WORDS: Mapping[Kind | str, str] = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    "data": "sums of gradients",
    "optimizer": "optimizer",
    "tensor": "message of the tensor ranks",
    "products": "products beside a message",
}


class TimelineEntry(NamedTuple):
    """A forward, backward or message of a pipeline rank, from `start` to `end` seconds after the step began."""

    rank: int
    action: Action
    start: float
    end: float


class Phase(NamedTuple):
    """Work of a pipeline rank beside or after the schedule: "data" (the sum of gradients) or "optimizer".

    Or inside a forward or backward: "tensor" (a message of tensor ranks), "products" (computed meanwhile).
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
    may begin while the last backwards run, on one more; so are tensor ranks' messages. `about`: the times' origin.
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
        threads = {number: f"sends to rank {number - 1}" for number in {_thread(entry, len(rows)) for entry in row}}
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
        thread = {"products": 0, "tensor": len(rows) + 2}.get(phase.name, len(rows) + 1)
        yield _span(WORDS[phase.name], phase.name, phase.rank, thread, phase.start, phase.end, {})
    for rank, course in enumerate(memory):
        for at, held in course:
            yield {"name": "memory", "ph": "C", "pid": rank, "ts": _nanoseconds(at) / 1000, "args": {"bytes": held}}


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


WIDTH, ROW = 1200, 24  # of a picture


def write_svg(path: str | Path, rows: Rows, phases: Sequence[Phase]) -> None:
    """Write a picture like SC21 Figure 4: a row for each pipeline rank, and microbatches' numbers where they fit.

    Forwards are blue, backwards green, those of later chunks lighter; behind them are sums of gradients and optimizer.
    """
    scale = WIDTH / max([row[-1].end for row in rows] + [phase.end for phase in phases])
    colours = box_colours(1 + max(entry.action.stage for row in rows for entry in row) // len(rows))
    drawn = [(e, *colours[box_code(e.action, len(rows))], e.action.microbatch) for row in rows for e in row]
    boxes: list[Any] = [box for box in drawn if box[0].action.kind.computes]
    boxes += [(phase, "#d97a2b" if phase.name == "data" else "#8064a2", "", "") for phase in phases]
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{ROW * len(rows)}" font-size="10">']
    for span, fill, ink, number in boxes:
        left, top, width = span.start * scale, span.rank * ROW, (span.end - span.start) * scale
        lines.append(f'<rect x="{left:.2f}" y="{top}" width="{width:.2f}" height="{ROW - 4}" fill="{fill}"/>')
        if ink and width > 6 * len(str(number)) + 2:
            lines.append(f'<text x="{left + 2:.2f}" y="{top + 14}" fill="{ink}">{number}</text>')
    Path(path).write_text("\n".join([*lines, "</svg>"]) + "\n")


def box_colours(chunks: int) -> list[tuple[str, str]]:
    """Return fill and ink of chunk 0's forward, its backward, chunk 1's forward, …; later chunks are lighter."""
    found = []
    for chunk in range(chunks):
        light = 0.36 + 0.36 * chunk / (chunks - 1) if chunks > 1 else 0.42
        for hue, saturation in ((213 / 360, 0.55), (95 / 360, 0.38)):
            red, green, blue = (round(255 * part) for part in hls_to_rgb(hue, light, saturation))
            dark = 0.299 * red + 0.587 * green + 0.114 * blue < 140  # as the eye weighs them
            found.append((f"#{red:02x}{green:02x}{blue:02x}", "#ffffff" if dark else "#111111"))
    return found


def box_code(action: Action, num_ranks: int) -> int:
    """Return the index of a forward or backward in `box_colours`."""
    return 2 * (action.stage // num_ranks) + (action.kind is Kind.BACKWARD)
