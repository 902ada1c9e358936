"""Progress of long work: one line on a terminal that says what is being done; silent elsewhere."""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any

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
        self._status: Status | nullcontext[None] = console.status(title) if shown else nullcontext()

    def __enter__(self) -> Watch:
        self._status.__enter__()
        return self

    def say(self, what: str) -> None:
        """Show `what` as what is being done now."""
        if isinstance(self._status, Status):
            self._status.update(f"{self._title}: {what}")

    def __exit__(self, *error: Any) -> None:
        self._status.__exit__(*error)
