"""AUTOPTD_TRACE: a file per rank with a line for each start and end of an action or collective, for hangs."""

import json
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from autoptd.runtime.health.activity import Position
from autoptd.runtime.program.schedule import Action

CALLS = ("all_reduce", "all_gather", "broadcast", "post_all_reduce", "post_reduce_scatter", "post_all_gather")


class TracedPosition(Position):
    """A position that writes its changes to ``rank_00003.jsonl`` in a folder, each line as soon as there is one."""

    def __init__(self, slots: memoryview | None, peers: Mapping[int, memoryview], folder: Path, rank: int) -> None:
        super().__init__(slots, peers)
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / f"rank_{rank:05d}.jsonl").open("a", buffering=1)
        self._begun = ""

    def _write(self, **fields: object) -> None:
        about = {"time": time.time(), "step": self.read().step, **fields}
        self._file.write(json.dumps(about) + "\n")

    def act(self, action: Action) -> None:
        super().act(action)
        self._note()

    def phase(self, name: str) -> None:
        super().phase(name)
        self._note()

    def _note(self) -> None:
        if self._begun:
            self._write(end=self._begun)
        self._begun = self.read().activity
        if self._begun:
            self._write(begin=self._begun)

    def trace(self, groups: Mapping[str, Any]) -> None:
        """Write the collectives of `groups` of ranks to the journal too, under their names."""
        for name, group in groups.items():
            for call in CALLS if group.size > 1 else ():
                setattr(group, call, partial(self._note_call, name, call, getattr(group, call)))

    def _note_call(self, group: str, call: str, run: Callable[..., Any], given: Any, *rest: Any) -> Any:
        """Run a collective of `given` tensors, and note its post, or its begin and, unless it fails, its end."""
        posted, tensors = call.startswith("post_"), [given] if isinstance(given, Tensor) else given
        shape = list(tensors[0].shape) if len(tensors) == 1 else [sum(x.numel() for x in tensors)]
        what = " ".join([call.removeprefix("post_"), *(str(x) for x in rest if not isinstance(x, Tensor))])
        about = {"group": group, "shape": shape, "dtype": str(tensors[0].dtype)}
        self._write(**{"post" if posted else "begin": what}, **about)
        result = run(given, *rest)
        if not posted:
            self._write(end=what, **about)
        return result
