"""The simulated step against the paper's closed forms, exactly."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from typing import Any

import pytest

from autoptd.runtime.program.schedule import Kind, make_schedule
from autoptd.simulate.schedule import SimulatedStep, simulate_schedule

TIMES = ((Fraction(1), Fraction(2)), (1, 1), (0.01, 0.02))


@pytest.mark.parametrize("p", [*range(1, 17), 24])
def test_bubble_is_the_closed_form(p: int) -> None:
    """(p - 1)/(v·m) of the ideal time, to the last bit, whatever the two times are (SC21 §2.2)."""
    shapes = [
        *((name, m, 1) for name in ("1f1b", "gpipe") for m in (1, p, 2 * p + 1)),
        *(("gpipe", p + 1, v) for v in (2, 3)),
        *(("interleaved_1f1b", n * p, v) for v in (1, 2, 3, 4) for n in (1, 2, 3) if p * v * n <= 100),
    ]
    for index, (name, m, v) in enumerate(shapes):
        forward, backward = TIMES[index % len(TIMES)]
        result = simulate_schedule(name, p=p, m=m, v=v, forward_seconds=forward, backward_seconds=backward)
        both = Fraction(forward) + Fraction(backward)
        assert result.bubble_fraction == float(Fraction(p - 1, v * m)), (name, m, v)
        assert result.bubble_seconds == float(both * (p - 1) / v)
        assert result.step_seconds == float(both * m + both * (p - 1) / v)


@pytest.mark.parametrize(
    ("p", "m", "v", "percent"), [(8, 16, 1, 43.75), (8, 16, 4, 10.9375), (16, 32, 1, 46.875), (16, 32, 2, 23.4375)]
)
def test_worked_examples(p: int, m: int, v: int, percent: float) -> None:
    result = simulate_schedule("interleaved_1f1b", p=p, m=m, v=v, forward_seconds=0.1, backward_seconds=0.2)
    assert 100 * result.bubble_fraction == percent


def test_transfers_delay_plain_1f1b() -> None:
    """p=8, m=24: a message's time is on the critical path 54 times, whatever it is."""

    def simulate(transfer: Fraction) -> SimulatedStep:
        return simulate_schedule("1f1b", p=8, m=24, forward_seconds=1, backward_seconds=2, transfer_seconds=transfer)

    for transfer in (Fraction(1, 8), Fraction(1, 64)):
        assert simulate(transfer).step_seconds - simulate(Fraction(0)).step_seconds == 54 * transfer


def test_slow_channels_bound_the_step() -> None:
    """Messages of one channel follow one another: eight of them take eight times as long."""
    result = simulate_schedule("gpipe", p=2, m=8, forward_seconds=1, backward_seconds=1, transfer_seconds=10)
    forwards, backwards = 1 + 8 * 10 + 1, 1 + 8 * 10 + 1
    assert result.step_seconds == forwards + backwards


def test_timeline_has_every_action_of_the_schedule_in_order() -> None:
    result = simulate_schedule(
        "interleaved_1f1b", p=2, m=4, v=2, forward_seconds=2, backward_seconds=4, transfer_seconds=0.25
    )
    schedule = make_schedule("interleaved_1f1b", 2, 4, 2)
    for rank, (entries, actions) in enumerate(zip(result.timeline, schedule, strict=True)):
        assert [entry.action for entry in entries] == [a for a in actions if a.kind.computes]
        assert {entry.rank for entry in entries} == {rank}
        assert all(entry.end - entry.start == (1 if entry.action.kind is Kind.FORWARD else 2) for entry in entries)
        assert all(one.end <= other.start for one, other in pairwise(entries))
    assert result.step_seconds == max(entries[-1].end for entries in result.timeline)


@pytest.mark.parametrize(
    ("times", "message"),
    [
        ((-1.0, 1.0, 0.0), "forward_seconds=-1.0: expected a finite time of 0 seconds or more"),
        ((1.0, float("nan"), 0.0), "backward_seconds=nan: expected a finite time"),
        ((1.0, 1.0, float("inf")), "transfer_seconds=inf: expected a finite time"),
        ((True, 1.0, 0.0), "forward_seconds=True: expected a finite time"),
        ((1.0, "2", 0.0), "backward_seconds='2': expected a finite time"),
        ((0, 0, 1.0), "forward_seconds and backward_seconds are both 0"),
    ],
)
def test_times_that_cannot_be(times: tuple[Any, Any, Any], message: str) -> None:
    forward, backward, transfer = times
    with pytest.raises(ValueError) as refusal:  # noqa: PT011
        simulate_schedule(
            "1f1b", p=2, m=2, forward_seconds=forward, backward_seconds=backward, transfer_seconds=transfer
        )
    assert str(refusal.value).startswith(message)


@pytest.mark.parametrize(
    ("name", "nearest"), [("interleaved", "interleaved_1f1b"), ("1F1B", "1f1b"), ("gpip", "gpipe")]
)
def test_an_unknown_schedule(name: str, nearest: str) -> None:
    message = f"unknown schedule '{name}'; did you mean '{nearest}'\\? Known schedules: gpipe, 1f1b, inter"
    with pytest.raises(ValueError, match=message):
        simulate_schedule(name, p=4, m=8, forward_seconds=1, backward_seconds=1)


@pytest.mark.parametrize(("name", "count"), [("v", 0), ("p", "2"), ("p", 2.0), ("p", True), ("m", 4.0), ("v", None)])
def test_counts_that_cannot_be(name: str, count: Any) -> None:
    given: Any = {"p": 2, "m": 2, "forward_seconds": 1, "backward_seconds": 1, name: count}
    with pytest.raises(ValueError, match=f"{name} is {count!r}; expected a positive integer"):
        simulate_schedule("1f1b", **given)


def test_a_schedule_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="schedule='1f1b' runs one model chunk per pipeline rank, not 2"):
        simulate_schedule("1f1b", p=2, m=2, v=2, forward_seconds=1, backward_seconds=1)
