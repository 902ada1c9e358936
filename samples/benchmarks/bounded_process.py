"""A process of its own whose answers are waited for no longer than a limit: what hangs is a row that says so."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any

PATIENCE = 10.0  # seconds for a process that has answered everything to end


class BoundedProcess:
    """Runs `target(*arguments, connection)`, which answers what the connection brings, each within `limit` seconds.

    `failure` says why there are no more answers: it ended, and said why on stderr, or it took too long and was killed.
    """

    def __init__(self, target: Callable[..., None], *arguments: object, limit: float) -> None:
        spawning = multiprocessing.get_context("spawn")
        self._own, other = spawning.Pipe()
        self._process = spawning.Process(target=target, args=(*arguments, other))
        self._process.start()
        other.close()  # so that its end is an error here
        self._limit, self.failure = limit, ""

    def ask(self, question: object = True) -> Any:
        """Return the answer, or None if there is none."""
        if self.failure:
            return None
        try:
            self._own.send(question)
            if self._own.poll(self._limit):
                return self._own.recv()
            self.failure = f"no answer in {self._limit:g} s"
        except (EOFError, OSError):
            self.failure = "failed"
        self._end()
        return None

    def _end(self) -> None:
        self._process.kill()
        self._process.join()

    def __enter__(self) -> BoundedProcess:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with suppress(OSError):  # it has ended
            self._own.send(None)  # there are no more questions
        self._process.join(min(self._limit, PATIENCE))
        self._end()
