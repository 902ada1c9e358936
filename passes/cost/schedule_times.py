"""What a schedule makes of its stages: when each action runs, and how many microbatches are alive."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from autoptd.runtime.program.schedule import Action, Schedule
from autoptd.runtime.program.schedule_check import execution_order


@dataclass(frozen=True)
class ActionTimes:
    """How long actions take, in one unit: `forward` and `backward` by stage, a message by its stage and kind.

    Each is a number, or an array of the numbers of several pipelines that run the same schedule.

    A sent message occupies its channel (an ordered pair of ranks). `blocking`: and the sending rank too, as in
    Megatron-LM of 2021; otherwise both ranks compute on, as in our runtime.
    """

    forward: Sequence[Any]
    backward: Sequence[Any]
    messages: Mapping[tuple[int, str], Any]
    blocking: bool = False


def walking_order(schedule: Schedule) -> list[tuple[int, Action]]:
    """Each rank and action that takes time (forwards, backwards, sends), in the order of `execution_order`."""
    return [step for step in execution_order(schedule) if not step[1].kind.startswith("RECV")]


def walk(
    order: Iterable[tuple[int, Action]],
    num_ranks: int,
    times: ActionTimes,
    later: Callable[[Any, Any], Any] = max,
) -> Iterator[tuple[int, Action, Any, Any]]:
    """Yield (rank, action, start, end) of every forward, backward and sent message of a schedule.

    Each is as early as its values allow. `order` is a `walking_order`. Times are in the unit of `times`, and exact
    where that is whole. `later` of two times: for arrays ``np.maximum``.
    """
    free: list[Any] = [0] * num_ranks
    channel_free: dict[tuple[int, int], Any] = {}
    arrival: dict[tuple[int, str, int], Any] = {}
    for rank, action in order:
        stage, kind, microbatch = action
        if kind == "F" or kind == "B":
            # On one rank a stage hands its value over on the spot, and the order of actions is enough.
            start = later(free[rank], arrival.pop(action, 0))
            end = free[rank] = start + (times.forward if kind == "F" else times.backward)[stage]
            yield rank, action, start, end
        else:
            consumer = stage + (1 if kind == "SEND_F" else -1)
            channel = rank, consumer % num_ranks
            start = later(channel_free.get(channel, 0), free[rank])
            end = channel_free[channel] = start + times.messages[stage, kind]
            arrival[consumer, kind[-1], microbatch] = end
            if times.blocking:
                free[rank] = end
            yield rank, action, start, end


def rank_seconds(times: ActionTimes, num_ranks: int) -> list[Any]:
    """What each rank's own actions take on one microbatch: messages too, where they hold up their sender."""
    last = len(times.forward) - 1
    seconds = [forward + backward for forward, backward in zip(times.forward, times.backward, strict=True)]
    if times.blocking and num_ranks > 1:
        for (stage, kind), message in times.messages.items():
            seconds[stage] += message * (stage != (last if kind == "SEND_F" else 0))
    return [sum(seconds[rank::num_ranks]) for rank in range(num_ranks)]


def least_seconds(times: ActionTimes, num_ranks: int, num_microbatches: int) -> Any:
    """What no schedule of these stages is faster than: a rank's work, between what comes before and after it.

    Its first forward has to wait for those of the ranks before it, and its last backward is followed by theirs.
    1F1B of even stages takes just that (SC21 §2.2).
    """
    least = before = after = 0.0
    for rank, work in enumerate(rank_seconds(times, num_ranks)):
        back = times.messages[rank, "SEND_B"] if rank else 0.0
        least = max(least, before + num_microbatches * work + after + (0.0 if times.blocking else back))
        if rank + 1 < num_ranks:
            before += times.forward[rank] + times.messages[rank, "SEND_F"]
            after += times.backward[rank] + back
    return least


def live_microbatches(schedule: Schedule, num_stages: int) -> list[list[int]]:
    """The microbatches that each stage holds (forward begun, backward not ended) when its rank may hold most.

    Row by row a moment of every rank. Where chunks take turns, the peak moves from one to the next in even steps:
    only its ends are there, and whatever a stage's bytes, a rank's peak is at one of them. Ranks with fewer ends
    than others repeat one.
    """
    p = len(schedule)
    peaks = [_find_peaks(actions, range(rank, num_stages, p)) for rank, actions in enumerate(schedule)]
    moments = [[0] * num_stages for _ in range(max(map(len, peaks)))]
    for rank, own in enumerate(peaks):
        for index, row in enumerate(moments):
            row[rank::p] = own[min(index, len(own) - 1)]
    return moments


def _find_peaks(actions: Sequence[Action], stages: range) -> list[tuple[int, ...]]:
    """What each of `stages` holds whenever a forward comes before a backward, but for what lies between two others."""
    computing = [action for action in actions if action.kind in ("F", "B")]
    held = dict.fromkeys(stages, 0)
    peaks: list[tuple[int, ...]] = []
    for action, following in pairwise(computing):
        held[action.stage] += 1 if action.kind == "F" else -1
        if action.kind == "F" and following.kind == "B":
            peaks.append(tuple(held.values()))
    steps = [tuple(b - a for a, b in zip(*pair, strict=True)) for pair in pairwise(peaks)]
    ends = [i for i in range(len(peaks)) if i in (0, len(steps)) or steps[i - 1] != steps[i]]
    return list(dict.fromkeys(peaks[i] for i in ends))
