"""The static proof: it accepts every schedule we make, and names what is wrong with those we did not."""

from __future__ import annotations

import pytest

from autoptd.runtime.program.schedule import Action, Schedule, make_schedule
from autoptd.runtime.program.schedule_check import ScheduleError, check_schedule, execution_order

# pipeline ranks p -> schedule, microbatches m, chunks v
SHAPES = {
    p: [
        *(("1f1b", m, 1) for m in (1, p, 2 * p + 1)),
        *(("interleaved_1f1b", n * p, v) for v in (2, 3, 4) for n in (1, 3)),
        *(("gpipe", m, v) for m in (1, p + 1) for v in (1, 3)),
    ]
    for p in range(1, 17)
}
SHAPES[33] = [("1f1b", 70, 1), ("interleaved_1f1b", 66, 2)]


def edited(schedule: Schedule, rank: int, old: str, new: str) -> Schedule:
    """The schedule with `old` tokens, which must be there, replaced in one row."""
    text = " " + " ".join(map(str, schedule[rank])) + " "
    assert f" {old} " in text
    row = tuple(map(Action.parse, text.replace(f" {old} ", f" {new} ").split()))
    return (*schedule[:rank], row, *schedule[rank + 1 :])


@pytest.mark.parametrize("p", SHAPES)
def test_every_schedule_we_make_is_proved(p: int) -> None:
    for name, m, v in SHAPES[p]:
        check_schedule(make_schedule(name, p, m, v), p, v, m)


def test_the_largest_schedule_is_proved() -> None:
    check_schedule(make_schedule("interleaved_1f1b", 64, 512, 2), 64, 2, 512)


@pytest.mark.parametrize(
    ("rank", "old", "new", "message"),
    [
        (1, "1SEND_F3", "", "rank 1: 1SEND_F3 is missing: expected it after 1F3, for 2F3 on rank 2"),
        (2, "2SEND_B3", "", "rank 2: 2SEND_B3 is missing: expected it after 2B3, for 1B3 on rank 1"),
        (2, "2RECV_F3", "", "rank 2: 2F3 comes too early: expected 2RECV_F3 before it"),
        (2, "2B5 2SEND_B5", "", "rank 2: 2B6 is out of turn: expected 2B5, since gradients are added in ascending"),
        (3, "3B7 3SEND_B7", "", "rank 3: 3B7 is missing: expected stage 3 to run each of 8 microbatches once backward"),
        (0, "0F7 0SEND_F7", "", "rank 0: 0B7 comes too early: expected 0F7 before it"),
        (0, "0F3", "0F2", "rank 0: 0F2 comes twice: expected once"),
        (0, "0F3", "1F3", "rank 0: 1F3 does not belong here: expected stage 0 and a microbatch from 0 to 7"),
        (0, "0F7", "0F8", "rank 0: 0F8 does not belong here: expected stage 0 and a microbatch from 0 to 7"),
        (1, "1F3 1SEND_F3", "1SEND_F3 1F3", "rank 1: 1SEND_F3 comes too early: expected 1F3 before it"),
        (1, "1B3 1SEND_B3", "1SEND_B3 1B3", "rank 1: 1SEND_B3 comes too early: expected 1B3 before it"),
        (0, "0F0", "0RECV_F0 0F0", "rank 0: 0RECV_F0 leads nowhere: stage 0 is the first stage"),
        (3, "3F0", "3F0 3SEND_F0", "rank 3: 3SEND_F0 leads nowhere: stage 3 is the last stage"),
        (
            3,
            "3RECV_F0 3F0 3RECV_F1",
            "3RECV_F1 3RECV_F0 3F0",
            "rank 3: 3RECV_F1 is message 0 from rank 2, which sends 2SEND_F0 there: expected 3RECV_F0, "
            "receives in the order of the sends",
        ),
    ],
)
def test_broken_schedules(rank: int, old: str, new: str, message: str) -> None:
    schedule = make_schedule("1f1b", 4, 8)
    with pytest.raises(ScheduleError) as contradiction:
        check_schedule(edited(schedule, rank, old, new), 4, 1, 8)
    assert str(contradiction.value).startswith(message)


def test_swapped_microbatches_of_a_sender() -> None:
    schedule = edited(make_schedule("gpipe", 2, 3), 0, "0SEND_F1", "0SEND_F0")
    with pytest.raises(ScheduleError, match="rank 0: 0SEND_F0 comes twice: expected once"):
        check_schedule(schedule, 2, 1, 3)


def test_channel_shared_by_both_directions() -> None:
    """With two ranks, activations that wrap around and gradients share a channel, in one order."""
    schedule = make_schedule("interleaved_1f1b", 2, 4, 2)
    broken = edited(schedule, 0, "2RECV_F2 2B1 2SEND_B1 0RECV_B0", "0RECV_B0 2RECV_F2 2B1 2SEND_B1")
    with pytest.raises(ScheduleError) as contradiction:
        check_schedule(broken, 2, 2, 4)
    assert str(contradiction.value) == (
        "rank 0: 0RECV_B0 is message 4 from rank 1, which sends 1SEND_F2 there: expected 2RECV_F2, "
        "receives in the order of the sends"
    )


def test_cycle_of_waits() -> None:
    rows = (
        "0F0 0SEND_F0 0RECV_B0 0B0 0F1 0SEND_F1 0RECV_B1 0B1",
        "1RECV_F0 1RECV_F1 1F0 1F1 1B0 1SEND_B0 1B1 1SEND_B1",
    )
    schedule = tuple(tuple(map(Action.parse, row.split())) for row in rows)
    with pytest.raises(ScheduleError) as contradiction:
        check_schedule(schedule, 2, 1, 2)
    assert str(contradiction.value) == (
        "a cycle of waits: rank 0 at 0B0 for 1SEND_B0, rank 1 at 1F1 for 0SEND_F1: expected each value to be "
        "sent before its sender waits"
    )


def test_wait_for_what_is_never_sent() -> None:
    for rank, old, message in (
        (0, "0SEND_F1", "rank 0 at 0B0 for 1SEND_B0, rank 1 at 1F1 for 0SEND_F1, which rank 0 never sends"),
        (1, "1SEND_B1", "rank 0 at 0B1 for 1SEND_B1, which rank 1 never sends"),
    ):
        schedule = edited(make_schedule("1f1b", 3, 2), rank, old, "")
        with pytest.raises(ScheduleError, match=f"^{message}$"):
            list(execution_order(schedule))


def test_one_rank_hands_over_on_the_spot() -> None:
    schedule = make_schedule("interleaved_1f1b", 1, 2, 2)
    with pytest.raises(ScheduleError, match="rank 0: 1F0 comes too early: expected 0F0 before it"):
        check_schedule(edited(schedule, 0, "0F0 1F0", "1F0 0F0"), 1, 2, 2)
    with pytest.raises(ScheduleError, match="rank 0: 0B0 comes too early: expected 1B0 before it"):
        check_schedule(edited(schedule, 0, "1B0 0F1 0B0", "0B0 0F1 1B0"), 1, 2, 2)
    with pytest.raises(ScheduleError, match="rank 0: 0SEND_F0 leads nowhere: all stages are on this one rank"):
        check_schedule(edited(schedule, 0, "0F0", "0F0 0SEND_F0"), 1, 2, 2)


def test_missing_rank() -> None:
    with pytest.raises(ScheduleError, match="it has 3 rows: expected one for each of 4 pipeline ranks"):
        check_schedule(make_schedule("1f1b", 3, 8), 4, 1, 8)


def test_a_random_fault_is_always_found() -> None:
    """Dropping any one action of a whole schedule is a contradiction."""
    schedule = make_schedule("interleaved_1f1b", 3, 6, 2)
    for rank, row in enumerate(schedule):
        for index in range(len(row)):
            broken = (*schedule[:rank], row[:index] + row[index + 1 :], *schedule[rank + 1 :])
            with pytest.raises(ScheduleError):
                check_schedule(broken, 3, 2, 6)
