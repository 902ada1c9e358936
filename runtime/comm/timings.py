"""The last step as it ran, brought together from the ranks of a pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from autoptd.runtime.comm.groups import Group
from autoptd.runtime.comm.stopwatch import Stopwatch
from autoptd.runtime.comm.trace import Phase, TimelineEntry
from autoptd.runtime.program.schedule import Action, Kind

KINDS: tuple[Kind | str, ...] = (Kind.FORWARD, Kind.BACKWARD, "data", "tensor", "weights")
NOTHING = len(KINDS)  # the rows by which a rank has fewer spans than another
Span = tuple[Kind | str, int, int, Any, Any]


@dataclass
class Measured:
    """What this rank did in its last whole step: (kind, stage, microbatch, begin, end), with marks of the stopwatch.

    A forward or backward begins when what it needs has arrived; "data" is the sum of gradients, from when the first is
    posted to when the last is there. Inside a forward or backward "tensor" is an all-reduce over the tensor ranks, from
    when it is posted to when its result is taken, and "weights" the gradients that are computed meanwhile, if any.
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

    def add_exposed(self, begin: Any) -> None:
        """An all-reduce over the tensor ranks, with nothing beside it, began at the mark `begin` and ends now."""
        self._running.append(("tensor", 0, 0, begin, self.stopwatch.mark()))

    def add_hidden(self, begin: Any, computed: Any) -> None:
        """An all-reduce was posted at the mark `begin` and ends now, beside gradients that ended at `computed`."""
        self.add_exposed(begin)
        self._running.append(("weights", 0, 0, begin, computed))

    def finish(self) -> None:
        """The step is whole."""
        self.spans = tuple(self._running)
        self.end = self.stopwatch.mark()


def gather_measured(
    measured: Measured, pipeline: Group, device: torch.device
) -> tuple[tuple[tuple[TimelineEntry, ...], ...], tuple[Phase, ...]]:
    """A row per pipeline rank, and what it did beside, in seconds from the first begin of any.

    Every rank of the `pipeline` must call it, after a step of all; `device` is where its tensors live.
    """
    count = len(measured.spans)
    marks = measured.stopwatch.read([span[i] for i in (3, 4) for span in measured.spans])
    rows = [
        [KINDS.index(kind), stage, microbatch, begin, end]
        for (kind, stage, microbatch, *_), begin, end in zip(
            measured.spans, marks[:count], marks[count:], strict=True
        )
    ]
    most = pipeline.all_reduce(torch.tensor([count], device=device), "max").item()
    rows += [[NOTHING] * 5] * (int(most) - count)
    own = torch.tensor(rows, dtype=torch.float64, device=device)
    tables = [[row for row in table.tolist() if row[0] != NOTHING] for table in pipeline.all_gather(own)]
    origin = min(row[3] for table in tables for row in table)
    entries = tuple(tuple(_read_entries(index, table, origin)) for index, table in enumerate(tables))
    phases = tuple(
        Phase(index, str(KINDS[int(row[0])]), row[3] - origin, row[4] - origin)
        for index, table in enumerate(tables)
        for row in table
        if row[0] >= KINDS.index("data")
    )
    return entries, phases


def _read_entries(index: int, table: Sequence[Sequence[float]], origin: float) -> Iterator[TimelineEntry]:
    for kind, stage, microbatch, begin, end in table:
        if isinstance(known := KINDS[int(kind)], Kind):
            action = Action(int(stage), known, int(microbatch))
            yield TimelineEntry(index, action, begin - origin, end - origin)
