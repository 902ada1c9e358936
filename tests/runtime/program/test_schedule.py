"""The orders themselves: counts, peaks, the field's oracle, and channels that are first in, first out."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch.distributed.pipelining import Schedule1F1B, ScheduleInterleaved1F1B

from autoptd.runtime.program.schedule import Action, Kind, Schedule, assign_slots, find_in_flight, make_schedule

RANKS = [*range(1, 17), 24]
Shape = tuple[str, int, int, int]


def one_forward_one_backward(p: int) -> list[Shape]:
    return [("1f1b", p, m, 1) for m in sorted({1, 2, max(p - 1, 1), p, p + 3, 3 * p})]


def interleaved(p: int) -> list[Shape]:
    return [("interleaved_1f1b", p, n * p, v) for v in (2, 3, 4) for n in (1, 2, 3) if p * v * n <= 100]


def gpipe(p: int) -> list[Shape]:
    return [("gpipe", p, m, v) for m in (1, p, p + 1) for v in (1, 2, 4)]


SMALL = [shape for p in range(1, 6) for make in (one_forward_one_backward, interleaved, gpipe) for shape in make(p)]

made = cache(make_schedule)


def computes(actions: tuple[Action, ...]) -> list[str]:
    """The forwards and backwards of one rank, as tokens."""
    return [str(action) for action in actions if action.kind.computes]


def test_action_prints_as_a_token_and_is_read_back() -> None:
    for kind in Kind:
        action = Action(12, kind, 345)
        assert Action.parse(str(action)) == action
    assert str(Action(2, Kind("F"), 0)) == "2F0"
    assert str(Action(1, Kind("SEND_F"), 3)) == "1SEND_F3"


@pytest.mark.parametrize("token", ["", "F0", "2F", "2G0", "2F0 ", "-1F0", "2f0", "2SEND0"])
def test_anything_else_is_no_action(token: str) -> None:
    with pytest.raises(ValueError, match="is no action: expected a stage, one of F B SEND_F"):
        Action.parse(token)


def test_counterparts_are_mutual() -> None:
    for token, other in (("1SEND_F3", "2RECV_F3"), ("1SEND_B3", "0RECV_B3")):
        assert Action.parse(token).counterpart == Action.parse(other)
        assert Action.parse(other).counterpart == Action.parse(token)


def test_one_rank_of_1f1b_in_full() -> None:
    assert " ".join(map(str, make_schedule("1f1b", 2, 3)[0])) == (
        "0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0B0 0RECV_B1 0F2 0SEND_F2 0RECV_B2 0B1 0B2"
    )


@pytest.mark.parametrize("p", [1, 2, 5])
def test_interleaving_one_chunk_is_1f1b(p: int) -> None:
    assert make_schedule("interleaved_1f1b", p, 3 * p, 1) == make_schedule("1f1b", p, 3 * p)


def test_interleaved_order_of_the_paper() -> None:
    """Rank 0 of p=4, m=8, v=2: 10 warm-up forwards, four microbatches a chunk (SC21, Figure 4)."""
    assert " ".join(computes(make_schedule("interleaved_1f1b", 4, 8, 2)[0])) == (
        "0F0 0F1 0F2 0F3 4F0 4F1 4F2 4F3 0F4 0F5 0F6 4B0 0F7 4B1 4F4 4B2 4F5 4B3 4F6 0B0 4F7 0B1 "
        "0B2 0B3 4B4 4B5 4B6 4B7 0B4 0B5 0B6 0B7"
    )


@pytest.mark.parametrize("p", RANKS[1:])
def test_order_equals_torch_interleaved(p: int) -> None:
    for shape in interleaved(p):
        _, _, m, v = shape
        stages = [
            SimpleNamespace(group_size=p, group_rank=0, num_stages=p * v, stage_index=chunk * p, is_last=False)
            for chunk in range(v)
        ]
        theirs = ScheduleInterleaved1F1B(cast(Any, stages), m).pipeline_order
        for rank, actions in enumerate(made(*shape)):
            assert computes(actions) == [str(action) for action in theirs[rank] if action is not None], shape


@pytest.mark.parametrize("p", RANKS[1:])
def test_order_equals_torch_1f1b(p: int) -> None:
    stage = SimpleNamespace(group_size=p, group_rank=0, num_stages=p, stage_index=0, is_last=False, has_backward=False)
    for shape in one_forward_one_backward(p):
        if shape[2] < p:  # torch refuses
            continue
        theirs = cast(Any, Schedule1F1B(cast(Any, stage), shape[2]))._get_pipeline_order()
        for rank, actions in enumerate(made(*shape)):
            expected = [a for a in theirs[rank] if a is not None and a.microbatch_index is not None]
            # torch 2.13 prints the last rank's forwards counted from 1; it runs them from 0.
            late = expected[0].microbatch_index if rank == p - 1 else 0
            assert computes(actions) == [
                f"{a.stage_index}F{a.microbatch_index - late}" if "F" in str(a) else str(a) for a in expected
            ], shape


def peak_in_flight(actions: Sequence[Action]) -> int:
    """Count the most (stage, microbatch) pairs that are in flight at once."""
    return max(sum(held.values()) for held in find_in_flight(actions))


@pytest.mark.parametrize("p", RANKS)
def test_peak_in_flight(p: int) -> None:
    for shape in one_forward_one_backward(p):
        m = shape[2]
        assert [peak_in_flight(row) for row in made(*shape)] == [min(p - rank, m) for rank in range(p)], shape
    for shape in interleaved(p):
        _, _, m, v = shape
        expected = [min(2 * (p - rank - 1) + (v - 1) * p + 1, m * v) for rank in range(p)]
        assert [peak_in_flight(row) for row in made(*shape)] == expected, shape


def test_peak_in_flight_of_gpipe() -> None:
    assert [peak_in_flight(row) for row in make_schedule("gpipe", 3, 5, 2)] == [10, 10, 10]


@pytest.mark.parametrize(
    ("name", "p", "m", "v"), [("gpipe", 3, 5, 1), ("1f1b", 4, 9, 1), ("interleaved_1f1b", 4, 8, 3)]
)
def test_no_two_microbatches_in_flight_share_a_slot(name: str, p: int, m: int, v: int) -> None:
    """And a stage has no more slots than microbatches in flight at its peak."""
    for actions in make_schedule(name, p, m, v):
        slots = assign_slots(actions)
        held: dict[int, set[int]] = {stage: set() for stage in slots}
        peaks = dict.fromkeys(slots, 0)
        for stage, kind, microbatch in actions:
            if kind is Kind.FORWARD:
                assert slots[stage][microbatch] not in held[stage]
                held[stage].add(slots[stage][microbatch])
                peaks[stage] = max(peaks[stage], len(held[stage]))
            elif kind is Kind.BACKWARD:
                held[stage].remove(slots[stage][microbatch])
        assert {stage: max(own.values()) + 1 for stage, own in slots.items()} == peaks


def test_receives_are_posted_one_compute_action_ahead() -> None:
    for shape in SMALL:
        for row in made(*shape):
            for index, action in enumerate(row):
                if not action.kind.receives:
                    continue
                consumer = row.index(action.compute)
                between = computes(row[index:consumer])
                assert len(between) == 1 or (len(between) == 0 and not computes(row[:index])), (shape, action)


def run_in_random_order(schedule: Schedule, seed: int) -> None:
    """Run the ranks with channels that deliver in order, but whenever they like; assert that all end."""
    p, chance = len(schedule), random.Random(seed)
    position = [0] * p
    travelling: dict[tuple[int, int], deque[Action]] = {(a, b): deque() for a in range(p) for b in range(p)}
    posted: dict[tuple[int, int], deque[Action]] = {(a, b): deque() for a in range(p) for b in range(p)}
    outstanding: set[Action] = set()
    while True:
        moves: list[tuple[str, Any]] = [("deliver", c) for c in travelling if travelling[c] and posted[c]]
        for rank in range(p):
            if position[rank] < len(schedule[rank]) and schedule[rank][position[rank]] not in outstanding:
                moves.append(("advance", rank))
        if not moves:
            break
        move, where = chance.choice(moves)
        if move == "deliver":
            receive = posted[where].popleft()
            assert travelling[where].popleft() == receive.counterpart
            outstanding.remove(receive.compute)
            continue
        action = schedule[where][position[where]]
        position[where] += 1
        if action.kind.receives:
            posted[action.counterpart.stage % p, where].append(action)
            outstanding.add(action.compute)
        elif action.kind.sends:
            travelling[where, action.counterpart.stage % p].append(action)
    assert position == [len(row) for row in schedule]
    assert not outstanding
    assert not any(travelling.values())


def test_every_delay_ends_well() -> None:
    for seed, shape in enumerate(SMALL):
        run_in_random_order(made(*shape), seed)


def test_forwards_run_alone() -> None:
    """Without gradients a rank skips its backward actions; the rest is still a schedule."""
    for seed, shape in enumerate(SMALL):
        forwards = tuple(tuple(a for a in row if a.kind.compute is Kind.FORWARD) for row in made(*shape))
        run_in_random_order(forwards, seed)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (
            ("1f1b", 4, 8, 2),
            "schedule='1f1b' runs one model chunk per pipeline rank, not 2: use schedule='interleaved_1f1b' "
            "or num_model_chunks=1",
        ),
        (
            ("interleaved_1f1b", 4, 6, 2),
            "schedule='interleaved_1f1b' takes microbatches in groups of the 4 pipeline ranks, and 6 "
            "microbatches are no multiple of 4: use num_microbatches=4 or 8, or schedule='1f1b', "
            "which takes any number",
        ),
        (("interleaved_1f1b", 4, 3, 2), "are no multiple of 4: use num_microbatches=4, or schedule='1f1b'"),
    ],
)
def test_refusals(shape: Shape, message: str) -> None:
    with pytest.raises(ValueError) as refusal:  # noqa: PT011
        make_schedule(*shape)
    assert message in str(refusal.value)
