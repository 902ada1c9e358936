"""Time a training step without a cluster: the schedule's own actions, with given times."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from autoptd.options import check_counts
from autoptd.passes.cost.schedule_times import ActionTimes, walk, walking_order
from autoptd.runtime.comm.trace import TimelineEntry
from autoptd.runtime.program.schedule import Kind, make_schedule


@dataclass(frozen=True)
class SimulatedStep:
    """One step of a simulated pipeline.

    `bubble_seconds` is what the step takes over the ideal m (tf + tb), `bubble_fraction` the same over that
    ideal (SC21 §2.2; over the whole step it would be smaller). `timeline` has a row per pipeline rank.
    """

    step_seconds: float
    bubble_seconds: float
    bubble_fraction: float
    timeline: tuple[tuple[TimelineEntry, ...], ...]


def simulate_schedule(
    name: str,
    *,
    p: int,
    m: int,
    v: int = 1,
    forward_seconds: float | Fraction,
    backward_seconds: float | Fraction,
    transfer_seconds: float | Fraction = 0.0,
) -> SimulatedStep:
    """Time one step of m microbatches on p pipeline ranks with v model chunks each.

    `forward_seconds` and `backward_seconds` are those of one whole pipeline rank, all v chunks of it, on one
    microbatch; `transfer_seconds` is how long one message occupies its channel (an ordered pair of ranks),
    while both ranks compute on. Times are exact inside and rounded once, at the end. ValueError for times or
    a schedule that cannot be.
    """
    check_counts(p=p, m=m, v=v)
    schedule = make_schedule(name, p, m, v)
    forward, backward, transfer, tick = _whole_ticks(v, forward_seconds, backward_seconds, transfer_seconds)
    taken = {
        Kind.FORWARD: forward,
        Kind.BACKWARD: backward,
        Kind.SEND_OUTPUT: transfer,
        Kind.SEND_GRADIENT: transfer,
    }
    times = ActionTimes({kind: [time] * (p * v) for kind, time in taken.items()})
    rows: list[list[TimelineEntry]] = [[] for _ in schedule]
    step = 0
    for rank, action, start, end in walk(walking_order(schedule), p, times):
        if action.kind.computes:
            rows[rank].append(TimelineEntry(rank, action, float(start * tick), float(end * tick)))
            step = max(step, int(end))
    ideal = m * v * (forward + backward)
    return SimulatedStep(
        step_seconds=float(step * tick),
        bubble_seconds=float((step - ideal) * tick),
        bubble_fraction=(step - ideal) / ideal,
        timeline=tuple(map(tuple, rows)),
    )


def _whole_ticks(
    v: int,
    forward_seconds: float | Fraction,
    backward_seconds: float | Fraction,
    transfer_seconds: float | Fraction,
) -> tuple[int, int, int, Fraction]:
    """Express one chunk's forward and backward, and a transfer, in whole ticks; the tick is in seconds."""
    times = {
        "forward_seconds": forward_seconds,
        "backward_seconds": backward_seconds,
        "transfer_seconds": transfer_seconds,
    }
    for keyword, seconds in times.items():
        number = isinstance(seconds, (int, float, Fraction)) and not isinstance(seconds, bool)
        if not number or not math.isfinite(seconds) or seconds < 0:
            raise ValueError(f"{keyword}={seconds!r}: expected a finite time of 0 seconds or more")
    if forward_seconds == backward_seconds == 0:
        raise ValueError("forward_seconds and backward_seconds are both 0: expected some computation")
    forward, backward = Fraction(forward_seconds) / v, Fraction(backward_seconds) / v
    transfer = Fraction(transfer_seconds)
    per_second = math.lcm(forward.denominator, backward.denominator, transfer.denominator)
    ticks = [int(time * per_second) for time in (forward, backward, transfer)]
    return ticks[0], ticks[1], ticks[2], Fraction(1, per_second)
