"""A schedule's microbatches in flight, and walks of many pipelines at once."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest

from autoptd.passes.cost.schedule_times import ActionTimes, live_microbatches, walk, walking_order
from autoptd.planning.estimator import rank_seconds
from autoptd.runtime.program.schedule import COMPUTING, Kind, Schedule, assign_slots, make_schedule

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
            now += kind.computes * kind.direction * size[stage]
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
    slots = [{*assign_slots(schedule[k % p])[k].values()} for k in range(p * v)]
    assert live_microbatches(schedule, p * v, lasting=True) == [list(map(len, slots))]


def test_few_moments_are_enough() -> None:
    assert live_microbatches(make_schedule("1f1b", 4, 16), 4) == [[4, 3, 2, 1]]
    assert live_microbatches(make_schedule("gpipe", 2, 5, 2), 4) == [[5, 5, 5, 5]]
    # Rank 0 has four microbatches in its first chunk and one in the other, or three and two.
    moments = live_microbatches(make_schedule("interleaved_1f1b", 2, 16, 2), 4)
    assert sorted({(row[0], row[2]) for row in moments}) == [(3, 2), (4, 1)]
    assert len(live_microbatches(make_schedule("interleaved_1f1b", 8, 64, 3), 24)) <= 8


def draw_times(generator: random.Random, stages: int, blocking: bool) -> ActionTimes:
    """Whole numbers."""
    forward, backward = ([generator.randint(1, 50) for _ in range(stages)] for _ in "FB")
    messages = {kind.send: [generator.randint(0, 20) for _ in range(stages)] for kind in COMPUTING}
    return ActionTimes({Kind.FORWARD: forward, Kind.BACKWARD: backward, **messages}, blocking)


def walk_seconds(shape: tuple[str, int, int, int], times: ActionTimes) -> tuple[int, list[int]]:
    """The whole step, and what each rank is busy in it."""
    _, p, *_ = shape
    busy, step = [0] * p, 0
    for rank, action, start, end in walk(walking_order(make_schedule(*shape)), p, times):
        step = max(step, end)
        if times.blocking or action.kind.computes:
            busy[rank] += end - start
    return step, busy


@pytest.mark.parametrize("blocking", [False, True], ids=["overlapped", "blocking"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_no_step_is_shorter_than_a_rank_s_work(shape: tuple[str, int, int, int], blocking: bool) -> None:
    _, p, m, v = shape
    generator = random.Random(str(shape))
    for _ in range(20):
        times = draw_times(generator, p * v, blocking)
        step, busy = walk_seconds(shape, times)
        assert busy == [m * seconds for seconds in rank_seconds(times, p)]
        assert max(busy) <= step


@pytest.mark.parametrize(("p", "m"), [(1, 3), (4, 2), (4, 9), (8, 32)])
def test_the_step_of_even_stages(p: int, m: int) -> None:
    """Equation: (m + p - 1)(tf + tb), SC21 §2.2.1."""
    taken = {Kind.FORWARD: 3, Kind.BACKWARD: 7, Kind.SEND_OUTPUT: 0, Kind.SEND_GRADIENT: 0}
    times = ActionTimes({kind: [time] * p for kind, time in taken.items()})
    step, _ = walk_seconds(("1f1b", p, m, 1), times)
    assert step == (m + p - 1) * 10


def test_many_pipelines_at_once_are_each_as_alone() -> None:
    p, v = 3, 2
    order = walking_order(make_schedule("interleaved_1f1b", p, 6, v))
    generator = np.random.default_rng(0)
    forward, backward = generator.integers(1, 50, (2, p * v, 7))
    ahead, back = generator.integers(0, 20, (2, p * v, 7))

    def times(which: slice | int) -> ActionTimes:
        kinds = (*COMPUTING, *(kind.send for kind in COMPUTING))
        taken = zip(kinds, (forward, backward, ahead, back), strict=True)
        return ActionTimes({kind: [row[which] for row in rows] for kind, rows in taken})

    together = list(walk(order, p, times(slice(None)), np.maximum))
    for number in range(7):
        for (*action, start, end), (*same, starts, ends) in zip(walk(order, p, times(number)), together, strict=True):
            assert action == same
            assert (start, end) == (np.broadcast_to(starts, 7)[number], ends[number])
