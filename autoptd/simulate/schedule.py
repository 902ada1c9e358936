"""Time a training step without a cluster: the schedule's own actions, with given times."""

import math
from dataclasses import dataclass
from fractions import Fraction

from autoptd.options import check_counts, check_modes
from autoptd.passes.cost.schedule_times import ActionTimes, walk, walking_order
from autoptd.runtime.comm.trace import TimelineEntry
from autoptd.runtime.program.schedule import COMPUTING, make_schedule


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
    microbatch; `transfer_seconds` is how long one message occupies its channel (an ordered pair of ranks), while both
    ranks compute on. Times are exact inside and rounded at the end. ValueError for impossible times or schedules.
    """
    check_counts(p=p, m=m, v=v)
    check_modes(schedule=name)
    schedule = make_schedule(name, p, m, v)
    given = {"forward_seconds": forward_seconds, "backward_seconds": backward_seconds}
    for keyword, seconds in (given | {"transfer_seconds": transfer_seconds}).items():
        number = isinstance(seconds, (int, float, Fraction)) and not isinstance(seconds, bool)
        if not number or not math.isfinite(seconds) or seconds < 0:
            raise ValueError(f"{keyword}={seconds!r}: expected a finite time of 0 seconds or more")
    if forward_seconds == backward_seconds == 0:
        raise ValueError("forward_seconds and backward_seconds are both 0: expected some computation")
    exact = [Fraction(forward_seconds) / v, Fraction(backward_seconds) / v, Fraction(transfer_seconds)]
    second = math.lcm(*(seconds.denominator for seconds in exact))  # in whole ticks
    forward, backward, transfer = (int(seconds * second) for seconds in exact)
    kinds = (*COMPUTING, *(kind.send for kind in COMPUTING))
    taken = dict(zip(kinds, (forward, backward, transfer, transfer), strict=True))
    times = ActionTimes({kind: [time] * (p * v) for kind, time in taken.items()})
    rows: list[list[TimelineEntry]] = [[] for _ in schedule]
    step = 0
    for rank, action, start, end in walk(walking_order(schedule), p, times):
        if action.kind.computes:
            rows[rank].append(TimelineEntry(rank, action, start / second, end / second))
            step = max(step, end)
    ideal = m * v * (forward + backward)
    return SimulatedStep(
        step_seconds=step / second,
        bubble_seconds=(step - ideal) / second,
        bubble_fraction=(step - ideal) / ideal,
        timeline=tuple(map(tuple, rows)),
    )
