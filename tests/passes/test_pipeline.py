"""A schedule's microbatches in flight, and walks of many pipelines at once."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest

from autoptd.passes.pipeline import ActionTimes, live_microbatches, walk
from autoptd.runtime.schedule import Schedule, make_schedule
from autoptd.runtime.schedule_check import execution_order

SHAPES = [
    *(("1f1b", p, m, 1) for p, m in ((1, 3), (4, 2), (4, 9))),
    *(("gpipe", p, m, v) for p, m, v in ((1, 4, 1), (3, 5, 2))),
    *(("interleaved_1f1b", p, k * p, v) for p in (1, 2, 3, 4, 8) for k in (1, 2, 5) for v in (2, 3, 4)),
]


def held_bytes(schedule: Schedule, size: list[int]) -> Iterator[int]:
    """The most bytes of each rank, where a microbatch holds `size` of its stage."""
    for actions in schedule:
        now = most = 0
        for stage, kind, _ in actions:
            now += {"F": size[stage], "B": -size[stage]}.get(kind, 0)
            most = max(most, now)
        yield most


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_rank_holds_most_at_one_of_the_moments(shape: tuple[str, int, int, int]) -> None:
    name, p, m, v = shape
    schedule = make_schedule(name, p, m, v)
    moments = live_microbatches(schedule, p * v)
    generator = random.Random(str(shape))
    for _ in range(20):
        size = [generator.choice((0, 1, 2, 50)) for _ in range(p * v)]
        for rank, most in enumerate(held_bytes(schedule, size)):
            assert most == max(sum(row[k] * size[k] for k in range(rank, p * v, p)) for row in moments)


def test_few_moments_are_enough() -> None:
    assert live_microbatches(make_schedule("1f1b", 4, 16), 4) == [[4, 3, 2, 1]]
    assert live_microbatches(make_schedule("gpipe", 2, 5, 2), 4) == [[5, 5, 5, 5]]
    # Rank 0 has four microbatches in its first chunk and one in the other, or three and two.
    moments = live_microbatches(make_schedule("interleaved_1f1b", 2, 16, 2), 4)
    assert sorted({(row[0], row[2]) for row in moments}) == [(3, 2), (4, 1)]
    assert len(live_microbatches(make_schedule("interleaved_1f1b", 8, 64, 3), 24)) <= 8


def test_many_pipelines_at_once_are_each_as_alone() -> None:
    p, v = 3, 2
    order = list(execution_order(make_schedule("interleaved_1f1b", p, 6, v)))
    generator = np.random.default_rng(0)
    forward, backward = generator.integers(1, 50, (2, p * v, 7))
    ahead, back = generator.integers(0, 20, (2, p * v, 7))

    def times(which: slice | int) -> ActionTimes:
        messages = {
            (k, f"SEND_{kind}"): row[which]
            for kind, rows in (("F", ahead), ("B", back))
            for k, row in enumerate(rows)
        }
        return ActionTimes([row[which] for row in forward], [row[which] for row in backward], messages)

    together = list(walk(order, p, times(slice(None)), np.maximum))
    for number in range(7):
        for (*action, start, end), (*same, starts, ends) in zip(
            walk(order, p, times(number)), together, strict=True
        ):
            assert action == same
            assert (start, end) == (np.broadcast_to(starts, 7)[number], ends[number])
