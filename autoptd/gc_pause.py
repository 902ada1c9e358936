"""Python's garbage collector, which waits while much is made that has few cycles."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collector() -> Iterator[None]:
    """Round a call, or a function: what it makes is collected after it, if the collector was on.

    Graphs and schedules are millions of small tuples: walking them again and again as they grow takes a third of the
    time of a compilation, and four fifths of a long schedule's.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
