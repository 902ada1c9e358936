"""The measured times of the last step, gathered from the ranks of a pipeline."""

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
NOTHING = len(KINDS)  # of a row that fills the table of a rank with fewer spans
Span = tuple[Kind | str, int, int, Any, Any]


@dataclass
class Measured:
    """The spans of this rank's last whole step: (kind, stage, microbatch, begin, end), with marks of the stopwatch.

    A forward or backward begins when its inputs have arrived; "data" is the sum of gradients, from the post of the
    first to the result of the last. Inside a forward or backward, "tensor" is an all-reduce over the tensor ranks, from
    its post to its result, and "weights" the computation of weight gradients meanwhile, if any.
    """

    stopwatch: Stopwatch
    spans: tuple[Span, ...] = ()
    begin: Any = None  # of the step, and its end: marks
    end: Any = None
    _running: list[Span] = field(default_factory=list)

    def start(self) -> None:
        """Begin a step and forget the one before."""
        self.spans = ()
        self.begin = self.stopwatch.mark()
        self._running.clear()

    def add(self, action: Action, begin: Any) -> None:
        """Record `action`, which began at the mark `begin` and ends now."""
        self._running.append((action.kind, action.stage, action.microbatch, begin, self.stopwatch.mark()))

    def add_sums(self, begin: Any) -> None:
        """Record the sum of gradients, which began at the mark `begin` and ends now."""
        self._running.append(("data", 0, 0, begin, self.stopwatch.mark()))

    def add_exposed(self, begin: Any) -> None:
        """Record an all-reduce over the tensor ranks, which began at the mark `begin` and ends now."""
        self._running.append(("tensor", 0, 0, begin, self.stopwatch.mark()))

    def add_hidden(self, begin: Any, computed: Any) -> None:
        """Record an all-reduce from the mark `begin` to now, beside weight gradients from `begin` to `computed`."""
        self.add_exposed(begin)
        self._running.append(("weights", 0, 0, begin, computed))

    def finish(self) -> None:
        """End the step."""
        self.spans = tuple(self._running)
        self.end = self.stopwatch.mark()


def gather_measured(
    measured: Measured, pipeline: Group, device: torch.device
) -> tuple[tuple[tuple[TimelineEntry, ...], ...], tuple[Phase, ...]]:
    """Return a row of entries per pipeline rank, and the phases, in seconds from the first begin of any.

    Every rank of the `pipeline` must call it, after a step of all; `device` holds its tensors.
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
