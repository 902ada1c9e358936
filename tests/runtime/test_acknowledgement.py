"""A receive proves that a send has arrived only if the other rank had used it before it answered."""

from __future__ import annotations

import pytest

from autoptd.runtime.acknowledgement import find_acknowledged
from autoptd.runtime.channel import ProcessChannel
from autoptd.runtime.connection import Connection, connect
from autoptd.runtime.schedule import Action, Schedule, make_schedule
from autoptd.runtime.schedule_check import execution_order
from tests.ranks import run_ranks
from tests.runtime.chain import Chain
from tests.runtime.test_executor import CPU, step

CASES = [
    (name, p, m, v)
    for name in ("gpipe", "1f1b", "interleaved_1f1b")
    for p in (2, 3, 4)
    for m in (p, 2 * p, 4 * p)
    for v in ((1,) if name == "1f1b" else (1, 2, 3))
]


def latest_used(schedule: Schedule, rank: int) -> dict[Action, Action]:
    """As `find_acknowledged`, but by running the schedule and noting what each message could tell."""
    p, told = len(schedule), {}
    last = p * len({action.stage for action in schedule[0]}) - 1
    used = {(peer, sender): -1 for peer in range(p) for sender in range(p)}
    for peer, action in execution_order(schedule):
        if action.kind in ("F", "B"):
            sender = action.stage + (-1 if action.kind == "F" else 1)
            if 0 <= sender <= last and sender % p != peer:
                sent = Action(sender, "SEND_F" if action.kind == "F" else "SEND_B", action.microbatch)
                place = schedule[sender % p].index(sent)
                used[peer, sender % p] = max(used[peer, sender % p], place)
        elif (
            action.kind.startswith("SEND") and action.counterpart.stage % p == rank and used[peer, rank] >= 0
        ):
            told[action.counterpart] = schedule[rank][used[peer, rank]]
    return told


@pytest.mark.parametrize(("name", "p", "m", "v"), CASES)
def test_what_is_acknowledged_was_used(name: str, p: int, m: int, v: int) -> None:
    schedule = make_schedule(name, p, m, v)
    for rank in range(p):
        assert find_acknowledged(schedule, rank) == latest_used(schedule, rank)


def test_nobody_answers_a_rank_alone() -> None:
    assert find_acknowledged(make_schedule("1f1b", 1, 4), 0) == {}


@pytest.mark.parametrize(("p", "v"), [(3, 1), (2, 2), (3, 2)])
def test_few_messages_are_held(monkeypatch: pytest.MonkeyPatch, p: int, v: int) -> None:
    """However many microbatches there are: those of a warm-up, not those of a step."""
    m, whole = 8 * p, ProcessChannel.send
    held = [0]

    def send(self: ProcessChannel, x: object) -> int:
        number = whole(self, x)  # type: ignore[arg-type]
        held[0] = max(held[0], len(self._sent))
        return number

    monkeypatch.setattr(ProcessChannel, "send", send)
    chain = Chain((1, p, 1), "interleaved_1f1b", v, m)

    def body(rank: int) -> int:
        connection: Connection = connect(chain.manifest, CPU, "same")
        held[0] = 0
        step(chain, connection)
        return held[0]

    tensors = 3  # that cross a boundary forwards
    assert max(run_ranks(body, p)) <= tensors * 2 * p * v
