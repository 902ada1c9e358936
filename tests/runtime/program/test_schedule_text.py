"""Schedules as text: round trips, length, and golden texts and grids (REFRESH_GOLDEN=1 writes them anew)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoptd.runtime.program.schedule import Action, Kind, make_schedule
from autoptd.runtime.program.schedule_text import format_schedule, parse_schedule
from autoptd.text.folder import schedule_grid

GOLDEN = Path(__file__).parent / "golden"
SHAPES = [("1f1b", 4, 8, 1), ("interleaved_1f1b", 2, 4, 2), ("interleaved_1f1b", 4, 32, 2), ("gpipe", 2, 4, 2)]

actions = st.builds(Action, st.integers(0, 3), st.sampled_from(Kind), st.integers(0, 9))
# Short patterns that come again, which is what the writer looks for.
repeats = st.lists(
    st.builds(
        lambda part, times, step: [a._replace(microbatch=a.microbatch + i * step) for i in range(times) for a in part],
        st.lists(actions, min_size=1, max_size=5),
        st.integers(1, 6),
        st.integers(0, 3),
    ),
    max_size=5,
).map(lambda parts: [action for part in parts for action in part])


def compare_with_golden(name: str, text: str) -> None:
    path = GOLDEN / name
    if os.environ.get("REFRESH_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_golden(shape: tuple[str, int, int, int]) -> None:
    name, p, m, v = shape
    schedule = make_schedule(name, p, m, v)
    texts = "\n".join(f"rank {rank}\n{format_schedule(row)}\n" for rank, row in enumerate(schedule))
    compare_with_golden(f"schedule_{name}_p{p}_m{m}_v{v}.txt", f"{schedule_grid(schedule)}\n{texts}")


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.lists(actions, max_size=30), repeats))
def test_any_actions_come_back(row: list[Action]) -> None:
    text = format_schedule(row)
    assert parse_schedule(text) == tuple(row)
    assert all(len(line) < 110 for line in text.splitlines())


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["gpipe", "1f1b", "interleaved_1f1b"]), st.integers(1, 6), st.integers(1, 6), st.integers(1, 4))
def test_any_schedule_comes_back(name: str, p: int, rounds: int, v: int) -> None:
    for row in make_schedule(name, p, rounds * p, 1 if name == "1f1b" else v):
        text = format_schedule(row)
        assert parse_schedule(text) == row
        assert all(len(line) < 110 for line in text.splitlines())


@pytest.mark.parametrize(
    ("shape", "bound"),
    [
        (("interleaved_1f1b", 64, 512, 2), 1300),
        (("1f1b", 16, 512, 1), 350),
        (("gpipe", 16, 512, 2), 350),
        (("interleaved_1f1b", 4, 512, 2), 900),
        (("interleaved_1f1b", 2, 512, 4), 1300),
        (("interleaved_1f1b", 8, 256, 4), 2400),
        (("interleaved_1f1b", 1, 512, 4), 200),
    ],
    ids=str,
)
def test_long_schedules_are_short_texts(shape: tuple[str, int, int, int], bound: int) -> None:
    schedule = make_schedule(*shape)
    texts = [format_schedule(row) for row in schedule]
    assert max(map(len, texts)) <= bound
    assert tuple(map(parse_schedule, texts)) == schedule


def test_steady_state_of_1f1b_is_one_group() -> None:
    assert format_schedule(make_schedule("1f1b", 4, 512)[1]).splitlines() == [
        "warm-up: 1RECV_F0 1RECV_F1 1F0 1SEND_F0 1RECV_F2 1F1 1SEND_F1",
        "steady: (1RECV_B0 1F2 1SEND_F2 1RECV_F3 1B0 1SEND_B0) x509 +1 1RECV_B509 1F511 1SEND_F511 1RECV_B510 1B509",
        "    1SEND_B509",
        "cool-down: 1RECV_B511 1B510 1SEND_B510 1B511 1SEND_B511",
    ]


def test_a_person_may_write_it_shorter() -> None:
    assert parse_schedule("") == ()
    assert parse_schedule("0F0 1SEND_F3") == (Action(0, Kind("F"), 0), Action(1, Kind("SEND_F"), 3))
    nested = parse_schedule("forward: ((0F0)x2 +1 1F0) x2 +10\nsteady: (0B0) x2 +1")
    assert " ".join(map(str, nested)) == "0F0 0F1 1F0 0F10 0F11 1F10 0B0 0B1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0\n2G0", "line 2 of the schedule: '2G0' is no action: expected a stage"),
        ("warm-up 0F0", "line 1 of the schedule: 'warm-up' is no action"),
        ("0F0 (0F1", "line 1 of the schedule: the schedule ends inside a '('; a group reads (0F1 0SEND_F1) x6 +1"),
        ("0F0) x2 +1", "line 1 of the schedule: ') x2 +1' is out of place; a group reads"),
        ("0F0\n\n(0F1) 0F2", "line 3 of the schedule: ')' is out of place; a group reads"),
        ("(0F0 steady: 0F1) x2 +1", "line 1 of the schedule: 'steady:' is out of place"),
    ],
)
def test_malformed_schedule_texts_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError) as refusal:  # noqa: PT011
        parse_schedule(text)
    assert str(refusal.value).startswith(message)


def test_grid_of_no_steps() -> None:
    assert schedule_grid(((), ())) == "step  rank 0  rank 1\n"
