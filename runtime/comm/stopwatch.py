"""Times of events on a device, by the clock that the ranks of a machine share."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch


class Stopwatch:
    """A clock whose marks are cheap to set and are read later; on a GPU they are times of its stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> Any:
        """Return a mark of this moment: on a GPU, of the moment when its stream has finished the work so far."""
        if self._device.type != "cuda":
            return time.time()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def read(self, marks: Sequence[Any]) -> list[float]:
        """Return the seconds since the epoch of each mark; wait for the device."""
        if self._device.type != "cuda":
            return list(marks)
        torch.cuda.synchronize(self._device)  # the marks may belong to another stream
        last = self.mark()
        last.synchronize()
        now = time.time()
        return [now - mark.elapsed_time(last) / 1000 for mark in marks]
