"""What a call does outside of its schedule takes as many calls of functions for eight layers as for two."""

from __future__ import annotations

import sys
from types import FrameType

import pytest
import torch

from samples.benchmarks.call_overhead import BATCH, bind_empty, surround_schedule


def count_calls(layers: int) -> tuple[int, int]:
    """Count the functions, of Python and C, that Python calls outside of the schedule, in training and evaluation."""
    parallel = bind_empty(layers)
    counts = []
    calls: list[str] = []

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event in ("call", "c_call"):
            calls.append(frame.f_code.co_name)

    surround_schedule(parallel, lambda: sys.setprofile(None), lambda: sys.setprofile(note))
    for training in (True, False):
        with torch.set_grad_enabled(training):
            for _ in range(3):  # the first keeps what the others find
                calls.clear()
                sys.setprofile(note)
                try:
                    parallel(**BATCH)
                finally:
                    sys.setprofile(None)
        counts.append(len(calls))
    return counts[0], counts[1]


def test_a_call_takes_no_more_calls_with_more_layers() -> None:
    few, many = count_calls(2), count_calls(8)
    assert many == pytest.approx(few, abs=8)
    assert max(many) < 400
