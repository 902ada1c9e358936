"""The record of a job's first failure: one small JSON file on every machine that sees it, and one key between them."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

KEY = "autoptd/failure"
PATIENCE = 1.0  # seconds, with a question that is under way


@dataclass(frozen=True)
class Failure:
    """Which rank failed first, and how.

    `place` is what it was doing, with its stage; `ranks` what the ranks of the writer's machine were doing, by number.
    """

    rank: int
    place: str
    reason: str
    host: str
    coordinates: str
    traceback: str = ""
    ranks: Mapping[str, str] = field(default_factory=dict)


class Record:
    """Where the first failure is written, by whoever sees it first; the rest read it.

    `store`, of ``torch.distributed``, reaches the other machines; None where there are none.
    """

    def __init__(self, path: Path, store: Any = None) -> None:
        self.path = path
        self._store = store
        self._asking = threading.Lock()

    def leave_store(self) -> None:
        """Ask the other machines nothing more; for a process's end.

        A thread that comes back from the store's C++ into an interpreter that is gone aborts the process.
        """
        held = self._asking.acquire(timeout=PATIENCE)
        self._store = None
        if held:
            self._asking.release()

    def claim(self, failure: Failure) -> Failure:
        """Write `failure` unless there is one; give the one that is there now."""
        text = json.dumps(dataclasses.asdict(failure), indent=1)
        text = self._share(text)
        self._write(text)
        return _parse(self.path.read_text())

    def read(self) -> Failure | None:
        """The failure, if there is one."""
        if not self.path.exists():
            shared = self._share("") if self._is_shared() else ""
            if not shared:
                return None
            self._write(shared)
        return _parse(self.path.read_text())

    def _write(self, text: str) -> None:
        """Put `text` at the path, whole and at once, unless something is there."""
        number, name = tempfile.mkstemp(prefix=self.path.stem, dir=self.path.parent)
        with os.fdopen(number, "w") as file:
            file.write(text)
        try:
            os.link(name, self.path)
        except FileExistsError:
            return
        finally:
            os.unlink(name)

    def _is_shared(self) -> bool:
        with self._asking:
            try:
                return self._store is not None and bool(self._store.check([KEY]))
            except RuntimeError:  # its server is gone, and with it what it knew
                self._store = None
                return False

    def _share(self, text: str) -> str:
        """What the store has, which is `text` if it had nothing."""
        with self._asking:
            try:
                shared = "" if self._store is None else self._store.compare_set(KEY, "", text).decode()
            except RuntimeError:
                self._store, shared = None, ""
        return shared or text


def _parse(text: str) -> Failure:
    return Failure(**json.loads(text))
