"""The record of a job's first failure: a small JSON file on every machine, and a key of torch's store between them."""

import dataclasses
import json
import os
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

KEY = "autoptd/failure"
PATIENCE = 1.0  # seconds to wait for a running request


@dataclass(frozen=True)
class Failure:
    """The first rank to fail, with the reason.

    `place` is its last activity, with its stage; `ranks` has those of the ranks of the writer's machine, by number.
    """

    rank: int
    place: str
    reason: str
    host: str
    coordinates: str
    traceback: str = ""
    ranks: Mapping[str, str] = field(default_factory=dict)


class FailureRecord:
    """The record of the first failure, which the rank that notices it first writes, and the others read.

    `store`, of ``torch.distributed``, reaches the other machines; None if there are none.
    """

    def __init__(self, path: Path, store: Any = None) -> None:
        self.path = path
        self._store = store
        self._asking = threading.Lock()

    def leave_store(self) -> None:
        """Stop using the store, at the end of the process.

        A thread that returns from the store's C++ code after the end of the interpreter aborts the process.
        """
        held = self._asking.acquire(timeout=PATIENCE)
        self._store = None
        if held:
            self._asking.release()

    def claim(self, failure: Failure) -> Failure:
        """Write `failure` unless there is one already; return the one that is recorded."""
        text = json.dumps(dataclasses.asdict(failure), indent=1)
        self._write(self._ask(lambda store: store.compare_set(KEY, "", text)) or text)
        return Failure(**json.loads(self.path.read_text()))

    def read(self) -> Failure | None:
        """Return the failure, if there is one."""
        if not self.path.exists():
            shared = self._ask(lambda store: store.get(KEY) if store.check([KEY]) else b"")
            if not shared:
                return None
            self._write(shared)
        return Failure(**json.loads(self.path.read_text()))

    def _write(self, text: str) -> None:
        """Write `text` to the path, atomically, unless it exists."""
        number, name = tempfile.mkstemp(prefix=self.path.stem, dir=self.path.parent)
        with os.fdopen(number, "w") as file:
            file.write(text)
        try:
            os.link(name, self.path)
        except FileExistsError:
            return
        finally:
            os.unlink(name)

    def _ask(self, request: Callable[[Any], bytes]) -> str:
        """Return the answer of the store to `request`; "" if there is no store, or its server is gone."""
        with self._asking:
            try:
                return "" if self._store is None else request(self._store).decode()
            except RuntimeError:
                self._store = None
                return ""
