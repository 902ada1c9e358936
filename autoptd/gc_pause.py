"""Python's garbage collector, paused while a call makes many objects and few cycles."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collector() -> Iterator[None]:
    """Pause the garbage collector, round a call or a function, and set aside the objects that exist already.

    Graphs and schedules are millions of small tuples: walking them again and again as they grow takes a third of the
    time of a compilation, and four fifths of a long schedule's. `collect_garbage` collects what the call made so far.
    """
    collecting = gc.isenabled()
    # Asked by the outermost pause alone: torch's and the user's objects are counted one by one.
    freezing = collecting and gc.get_freeze_count() == 0
    gc.disable()
    if freezing:
        gc.freeze()
    try:
        yield
    finally:
        if freezing:
            gc.freeze()  # What the call made is old by now, and not walked when the collector starts again.
            gc.unfreeze()
        if collecting:
            gc.enable()


def collect_garbage() -> None:
    """Collect the cycles that a paused call has made since it last did: the graphs that passes have replaced."""
    gc.collect(1)  # the younger generations: older objects are walked by the first collection after the call
