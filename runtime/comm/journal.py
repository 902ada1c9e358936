"""AUTOPTD_TRACE: a file per rank with a line for each start and end of an action or collective, for hangs."""

import json
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from autoptd.runtime.comm.connection import Connection
from autoptd.runtime.comm.groups import Group
from autoptd.runtime.health.activity import Position
from autoptd.runtime.program.schedule import Action

CALLS = ("all_reduce", "all_gather", "broadcast", "post_all_reduce", "post_reduce_scatter", "post_all_gather")


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
        groups = {**connection.rank.groups, "world": connection.world}
        groups |= {f"tied {list(owners)}": group for owners, group in connection.tied.items()}
        for name, group in groups.items():
            if group.size > 1:
                self.trace(group, name)

    def trace(self, group: Group, name: str) -> None:
        """Write the calls of a `group` to the journal under its `name`."""
        for call in CALLS:
            setattr(group, call, partial(self._note_call, name, call, getattr(group, call)))

    def _note_call(self, group: str, call: str, run: Callable[..., Any], given: Any, *rest: Any) -> Any:
        """Run a collective of `given` tensors, and note its post, or its begin and, unless it fails, its end."""
        posted, tensors = call.startswith("post_"), [given] if isinstance(given, Tensor) else given
        shape = list(tensors[0].shape) if len(tensors) == 1 else [sum(x.numel() for x in tensors)]
        what = " ".join([call.removeprefix("post_"), *(str(x) for x in rest if not isinstance(x, Tensor))])
        about = {"group": group, "shape": shape, "dtype": str(tensors[0].dtype)}
        self.journal.write(self.read().step, **{"post" if posted else "begin": what}, **about)
        result = run(given, *rest)
        if not posted:
            self.journal.write(self.read().step, end=what, **about)
        return result
