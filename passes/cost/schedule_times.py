"""Time a schedule of given stages: when each action runs, and how many microbatches are alive."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from itertools import pairwise
from typing import Any

from autoptd.runtime.program.schedule import Action, Kind, Schedule, find_in_flight, make_schedule
from autoptd.runtime.program.schedule_check import execution_order

Order = Sequence[tuple[int, Action]]  # actions, each with its rank


@dataclass(frozen=True)
class ActionTimes:
    """The times of actions in one unit: one for each stage, by the kinds that compute or send.

    Each is a number, or an array with the numbers of several pipelines that run the same schedule. A sent message
    occupies its channel (an ordered pair of ranks); with `blocking` it occupies the sending rank too, as in
    Megatron-LM of 2021. Otherwise both ranks compute on, as in our runtime.
    """

    by_kind: Mapping[Kind, Sequence[Any]]
    blocking: bool = False


def walking_order(schedule: Schedule) -> Order:
    """Return each rank and action that takes time (forwards, backwards, sends), in the order of `execution_order`."""
    return [step for step in execution_order(schedule) if not step[1].kind.receives]


@lru_cache(maxsize=48)
def order_actions(name: str, pipeline: int, microbatches: int, chunks: int) -> tuple[Schedule, Order]:
    """Return a schedule and its `walking_order`."""
    schedule = make_schedule(name, pipeline, microbatches, chunks)
    return schedule, walking_order(schedule)


def walk(
    order: Order, num_ranks: int, times: ActionTimes, later: Callable[..., Any] = max
) -> Iterator[tuple[int, Action, Any, Any]]:
    """Yield (rank, action, start, end) of every forward, backward and sent message of a schedule.

    Each is as early as its values allow. `order` is a `walking_order`. Times are in the unit of `times`, and exact
    where that is whole. `later` of two times: for arrays ``np.maximum``.
    """
    free: list[Any] = [0] * num_ranks
    channel_free: dict[tuple[int, int], Any] = {}
    arrival: dict[tuple[int, Kind, int], Any] = {}
    for rank, action in order:
        stage, kind, microbatch = action
        if kind.computes:
            # On one rank a stage hands its value over on the spot, and the order of actions is enough.
            start = later(free[rank], arrival.pop(action, 0))
            end = free[rank] = start + times.by_kind[kind][stage]
        else:
            consumer = stage + kind.direction
            channel = rank, consumer % num_ranks
            start = later(channel_free.get(channel, 0), free[rank])
            end = channel_free[channel] = start + times.by_kind[kind][stage]
            arrival[consumer, kind.compute, microbatch] = end
            if times.blocking:
                free[rank] = end
        yield rank, action, start, end


def step_seconds(order: Order, num_ranks: int, times: ActionTimes, later: Callable[..., Any] = max) -> Any:
    """Return the end of the last forward or backward of a `walk`."""
    walked = walk(order, num_ranks, times, later)
    return reduce(later, {rank: end for rank, action, _, end in walked if action.kind.computes}.values())


def live_microbatches(schedule: Schedule, num_stages: int, *, lasting: bool = False) -> list[list[int]]:
    """Return the microbatches that each stage has in flight when its rank may hold most: a row a moment.

    Where chunks take turns, the peak moves from one chunk to the next in even steps. Only the ends of such a move are
    returned: whatever the bytes of each stage, a rank's peak is at one of them. Ranks with fewer moments repeat one.
    `lasting`: the one moment of stages whose slots hold their memory all the time, as those of CUDA graphs do.
    """
    p = len(schedule)
    peaks = [_find_peaks(actions, range(rank, num_stages, p)) for rank, actions in enumerate(schedule)]
    moments = [[0] * num_stages for _ in range(max(map(len, peaks)))]
    for rank, own in enumerate(peaks):
        for index, row in enumerate(moments):
            row[rank::p] = own[min(index, len(own) - 1)]
    return [list(map(max, zip(*moments, strict=True)))] if lasting else moments


def _find_peaks(actions: Sequence[Action], stages: range) -> list[tuple[int, ...]]:
    """List what `stages` hold at the peaks of one rank, without peaks that lie evenly between two others."""
    peaks = [tuple(held.get(stage, 0) for stage in stages) for held in find_in_flight(actions)]
    steps = [tuple(b - a for a, b in zip(*pair, strict=True)) for pair in pairwise(peaks)]
    ends = [i for i in range(len(peaks)) if i in (0, len(steps)) or steps[i - 1] != steps[i]]
    return list(dict.fromkeys(peaks[i] for i in ends))
