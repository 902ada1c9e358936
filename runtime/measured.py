"""The last step as it ran, brought together from the ranks of a pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from autoptd.runtime.rank import Rank
from autoptd.runtime.schedule import Action
from autoptd.runtime.stopwatch import Stopwatch
from autoptd.runtime.trace import Phase, TimelineEntry

KINDS = ("F", "B", "data")
Span = tuple[str, int, int, Any, Any]


@dataclass
class Measured:
    """What this rank did in its last whole step: (kind, stage, microbatch, begin, end), with marks of the stopwatch.

    A forward or backward begins when what it needs has arrived; "data" is the sum of gradients, from when the first is
    posted to when the last is there.
    """

    stopwatch: Stopwatch
    spans: tuple[Span, ...] = ()
    begin: Any = None  # of the step, and its end: marks
    end: Any = None
    _running: list[Span] = field(default_factory=list)

    def start(self) -> None:
        """A step begins; the one before is forgotten."""
        self.spans = ()
        self.begin = self.stopwatch.mark()
        self._running.clear()

    def add(self, action: Action, begin: Any) -> None:
        """`action` began at the mark `begin`, and ends now."""
        self._running.append((action.kind, action.stage, action.microbatch, begin, self.stopwatch.mark()))

    def add_sums(self, begin: Any) -> None:
        """The sum of gradients began at the mark `begin`, and ends now."""
        self._running.append(("data", 0, 0, begin, self.stopwatch.mark()))

    def finish(self) -> None:
        """The step is whole."""
        self.spans = tuple(self._running)
        self.end = self.stopwatch.mark()


def gather_measured(
    measured: Measured, rank: Rank
) -> tuple[tuple[tuple[TimelineEntry, ...], ...], tuple[Phase, ...]]:
    """A row per pipeline rank, and the sums of gradients, in seconds from the first begin of any.

    Every rank of the pipeline must call it, after a step of all.
    """
    kinds = [KINDS.index(kind) for kind, *_ in measured.spans]
    count = len(measured.spans)
    marks = measured.stopwatch.read([span[i] for i in (3, 4) for span in measured.spans])
    begins, ends = marks[:count], marks[count:]
    places = [span[1:3] for span in measured.spans]
    rows = [
        [kind, *place, begin, end]
        for kind, place, begin, end in zip(kinds, places, begins, ends, strict=True)
    ]
    own = torch.tensor(rows, dtype=torch.float64, device=rank.device)
    tables = [table.tolist() for table in rank.pipeline.all_gather(own)]
    origin = min(row[3] for table in tables for row in table)
    entries = tuple(tuple(_read_entries(index, table, origin)) for index, table in enumerate(tables))
    phases = tuple(
        Phase(index, KINDS[int(row[0])], row[3] - origin, row[4] - origin)
        for index, table in enumerate(tables)
        for row in table
        if KINDS[int(row[0])] == "data"
    )
    return entries, phases


def _read_entries(index: int, table: Sequence[Sequence[float]], origin: float) -> Iterator[TimelineEntry]:
    for kind, stage, microbatch, begin, end in table:
        if kind < KINDS.index("data"):
            action = Action(int(stage), "B" if kind else "F", int(microbatch))
            yield TimelineEntry(index, action, begin - origin, end - origin)
