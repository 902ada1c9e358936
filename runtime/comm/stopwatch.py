"""When things happened on a device, by the clock that the ranks of a machine share."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch


class Stopwatch:
    """Marks moments, cheaply; reads them later. On a GPU they are those of its stream, which lags behind the host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> Any:
        """Now: on a GPU, when the stream has done what it was given so far."""
        if self._device.type != "cuda":
            return time.time()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def read(self, marks: Sequence[Any]) -> list[float]:
        """Seconds since the epoch of each mark; waits for the device."""
        if self._device.type != "cuda":
            return list(marks)
        torch.cuda.synchronize(self._device)  # the marks may be another stream's
        last = self.mark()
        last.synchronize()
        now = time.time()
        return [now - mark.elapsed_time(last) / 1000 for mark in marks]
