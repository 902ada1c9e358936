"""AUTOPTD_TRACE: a file per rank with a line for each start and end of an action or collective, for hangs."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from autoptd.runtime.comm.connection import Connection
from autoptd.runtime.comm.groups import Group, Posted, Reduction
from autoptd.runtime.health.activity import Position
from autoptd.runtime.program.schedule import Action


class Journal:
    """A writer of lines to ``rank_00003.jsonl`` in a folder; each is on file as soon as it is written."""

    def __init__(self, folder: Path, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / f"rank_{rank:05d}.jsonl").open("a", buffering=1)

    def write(self, step: int, **fields: object) -> None:
        self._file.write(json.dumps({"time": time.time(), "step": step, **fields}) + "\n")


class TracedPosition(Position):
    """A position that writes its changes to a journal."""

    def __init__(self, slots: memoryview | None, peers: Mapping[int, memoryview], journal: Journal) -> None:
        super().__init__(slots, peers)
        self.journal = journal
        self._begun = ""

    def act(self, action: Action) -> None:
        super().act(action)
        self._note()

    def phase(self, name: str) -> None:
        super().phase(name)
        self._note()

    def _note(self) -> None:
        place = self.read()
        if self._begun:
            self.journal.write(place.step, end=self._begun)
        self._begun = place.activity
        if self._begun:
            self.journal.write(place.step, begin=self._begun)

    def trace_groups(self, connection: Connection) -> None:
        """Write the collectives of `connection` to the journal too."""
        rank = connection.rank
        rank.groups = {axis: TracedGroup(group, axis, self) for axis, group in rank.groups.items()}
        connection.world = TracedGroup(connection.world, "world", self)
        tied = connection.tied.items()
        connection.tied = {owners: TracedGroup(group, f"tied {list(owners)}", self) for owners, group in tied}


class TracedGroup(Group):
    """A group whose calls are written to a journal under its name."""

    def __init__(self, group: Group, name: str, position: TracedPosition) -> None:
        super().__init__(group.size, group.index)
        self.counts, self.elements = group.counts, group.elements
        self._group, self._name, self._position = group, name, position

    def all_reduce(self, x: Tensor, op: Reduction = "sum") -> Tensor:
        with self._noting(f"all_reduce {op}", x):
            return self._group.all_reduce(x, op)

    def all_gather(self, x: Tensor) -> list[Tensor]:
        with self._noting("all_gather", x):
            return self._group.all_gather(x)

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        with self._noting(f"broadcast from {source}", x):
            return self._group.broadcast(x, source)

    def post_all_reduce(self, tensors: Sequence[Tensor]) -> Posted[list[Tensor]]:
        self._note("post", "all_reduce sum", *tensors)
        return self._group.post_all_reduce(tensors)

    def post_reduce_scatter(self, x: Tensor) -> Posted[list[Tensor]]:
        self._note("post", "reduce_scatter", x)
        return self._group.post_reduce_scatter(x)

    def post_all_gather(self, x: Tensor, into: Tensor) -> Posted[Tensor]:
        self._note("post", "all_gather", x)
        return self._group.post_all_gather(x, into)

    @contextmanager
    def _noting(self, what: str, x: Tensor) -> Iterator[None]:
        self._note("begin", what, x)
        yield  # a call that fails has no end
        self._note("end", what, x)

    def _note(self, event: str, what: str, *tensors: Tensor) -> None:
        if self.size > 1:
            shape = list(tensors[0].shape) if len(tensors) == 1 else [sum(x.numel() for x in tensors)]
            fields = {event: what, "group": self._name, "shape": shape, "dtype": str(tensors[0].dtype)}
            self._position.journal.write(self._position.read().step, **fields)
