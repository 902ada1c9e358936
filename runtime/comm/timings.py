"""The measured times of the last step, gathered from the ranks of a pipeline."""

import time
from dataclasses import dataclass, field
from typing import Any

import torch

from autoptd.runtime.comm.groups import Group
from autoptd.runtime.comm.trace import Phase, TimelineEntry
from autoptd.runtime.program.schedule import Action, Kind

KINDS: tuple[Kind | str, ...] = (Kind.FORWARD, Kind.BACKWARD, "data", "tensor", "products")
NOTHING = len(KINDS)  # of a row that fills the table of a rank with fewer spans
Span = tuple[Kind | str, int, int, Any, Any]


@dataclass
class Measured:
    """The spans of this rank's last whole step: (kind, stage, microbatch, begin, end), with marks of `device`.

    A forward or backward begins when its inputs have arrived; "data" is the sum of gradients, from the post of the
    first to the result of the last. Inside a forward or backward, "tensor" is a message of the tensor ranks, from its
    post to its result, and "products" those of weight gradients, or of pieces, that are computed meanwhile, if any.
    """

    device: torch.device
    spans: list[Span] = field(default_factory=list)
    begin: Any = None  # of the step, and its end: marks
    end: Any = None

    def mark(self) -> Any:
        """Return a mark of this moment, to be read later: on a GPU, of when its stream has finished the work so far."""
        if self.device.type != "cuda":
            return time.time()
        if torch.cuda.is_current_stream_capturing():
            return None  # a replay has no marks
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def read(self) -> tuple[float, float, list[Span]]:
        """Return the step's begin, its end and its spans, in seconds since the epoch; wait for the device."""
        if self.device.type != "cuda":
            return self.begin, self.end, self.spans
        torch.cuda.synchronize(self.device)  # the marks may belong to another stream
        last = self.mark()
        last.synchronize()
        now = time.time()

        def seconds(mark: Any) -> float:
            return now - mark.elapsed_time(last) / 1000  # type: ignore[no-any-return]

        spans: list[Span] = [(*span[:3], seconds(span[3]), seconds(span[4])) for span in self.spans]
        return seconds(self.begin), seconds(self.end), spans

    def start(self) -> None:
        """Begin a step and forget the one before."""
        self.spans = []
        self.begin = self.mark()

    def add(self, kind: Kind | str, begin: Any, end: Any = None, stage: int = 0, microbatch: int = 0) -> None:
        """Record a span that began at the mark `begin` and ends at `end`, or now; none in a graph."""
        if begin is not None:
            self.spans.append((kind, stage, microbatch, begin, self.mark() if end is None else end))


def gather_measured(measured: Measured, pipeline: Group) -> tuple[list[list[TimelineEntry]], list[Phase]]:
    """Return entries by rank, and phases, from the first begin on; all of `pipeline` call it after a step of all."""
    device = measured.device
    own = [[KINDS.index(kind), *rest] for kind, *rest in measured.read()[2]]
    most = pipeline.all_reduce(torch.tensor([len(own)], device=device), "max").item()
    own += [[NOTHING] * 5] * (int(most) - len(own))
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
