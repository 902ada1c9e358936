"""Progress of long work: one line on a terminal that says what is being done; silent elsewhere."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

Say = Callable[[str], None]


@contextmanager
def show_progress(title: str) -> Iterator[Say]:
    """``with show_progress("compile") as say: say("capture")`` shows the title, and what is being done now.

    Shows nothing where standard error is no terminal, or on another rank than 0.
    """
    console = Console(stderr=True)
    if not console.is_terminal or os.environ.get("RANK", "0") != "0":
        yield lambda what: None
        return
    with console.status(title) as status:
        yield lambda what: status.update(f"{title}: {what}")
