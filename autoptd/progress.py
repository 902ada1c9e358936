"""Progress of long work: one line on a terminal that says what is being done; silent elsewhere."""

from __future__ import annotations

import os
from types import TracebackType

from rich.console import Console
from rich.status import Status


class Watch:
    """``with Watch("compile") as watch: watch.say("capture")``.

    Shows nothing where standard error is no terminal, or on another rank than 0.
    """

    def __init__(self, title: str) -> None:
        console = Console(stderr=True)
        shown = console.is_terminal and os.environ.get("RANK", "0") == "0"
        self._title = title
        self._status: Status | None = console.status(title) if shown else None

    def __enter__(self) -> Watch:
        if self._status is not None:
            self._status.start()
        return self

    def say(self, what: str) -> None:
        """Show `what` as what is being done now."""
        if self._status is not None:
            self._status.update(f"{self._title}: {what}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._status is not None:
            self._status.stop()
