"""A receive proves that a send has arrived only if the other rank had used it before it answered."""

from __future__ import annotations

import pytest
import torch

from autoptd.runtime.comm.connection import Connection, connect
from autoptd.runtime.comm.groups import Group
from autoptd.runtime.comm.point_to_point import ProcessChannel, ThreadChannel
from autoptd.runtime.comm.threads import ThreadWorld
from autoptd.runtime.comm.transfer import RecvBuffer, find_acknowledged
from autoptd.runtime.program.schedule import Action, Kind, Schedule, make_schedule
from autoptd.runtime.program.schedule_check import execution_order
from tests.ranks import run_ranks
from tests.runtime.chain import Chain
from tests.runtime.engine.test_executor import CPU, step

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
        if action.kind.computes:
            sender = action.stage - action.kind.direction
            if 0 <= sender <= last and sender % p != peer:
                sent = Action(sender, action.kind.send, action.microbatch)
                place = schedule[sender % p].index(sent)
                used[peer, sender % p] = max(used[peer, sender % p], place)
        elif action.kind.sends and action.counterpart.stage % p == rank and used[peer, rank] >= 0:
            told[action.counterpart] = schedule[rank][used[peer, rank]]
    return told


@pytest.mark.parametrize(("name", "p", "m", "v"), CASES)
def test_acknowledged_messages_are_the_latest_used(name: str, p: int, m: int, v: int) -> None:
    schedule = make_schedule(name, p, m, v)
    for rank in range(p):
        assert find_acknowledged(schedule, rank) == latest_used(schedule, rank)


def test_the_last_in_the_channels_order_counts() -> None:
    """Rank 1 uses stage 0's second message before its first: its answer to the first proves both."""
    rows = (
        ("0F0", "0SEND_F0", "0F1", "0SEND_F1", "0RECV_B1", "0RECV_B0", "0B1", "0B0"),
        ("1RECV_F0", "1RECV_F1", "1F1", "1B1", "1SEND_B1", "1F0", "1B0", "1SEND_B0"),
    )
    schedule = tuple(tuple(map(Action.parse, row)) for row in rows)
    last = Action.parse("0SEND_F1")
    assert find_acknowledged(schedule, 0) == {Action(0, Kind("RECV_B"), 0): last, Action(0, Kind("RECV_B"), 1): last}


def test_an_empty_message_proves_nothing() -> None:
    """Its receive does not wait for anybody."""
    arrival = RecvBuffer((), ThreadChannel(ThreadWorld(), "channel 0 -> 1"), Group(), False, CPU)
    arrival.acknowledge[0] = lambda: pytest.fail("nothing has arrived")
    arrival.post(0)
    assert arrival.take(0) == []


def test_nobody_answers_a_rank_alone() -> None:
    assert find_acknowledged(make_schedule("1f1b", 1, 4), 0) == {}


@pytest.mark.parametrize(("p", "v"), [(3, 1), (2, 2), (3, 2)])
def test_few_messages_are_held(monkeypatch: pytest.MonkeyPatch, p: int, v: int) -> None:
    """However many microbatches there are: those of a warm-up, not those of a step."""
    m, whole = 8 * p, ProcessChannel.send
    held = [0]

    def send(self: ProcessChannel, x: torch.Tensor) -> int:
        number = whole(self, x)
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


@pytest.mark.parametrize(("name", "p", "v"), [("gpipe", 2, 2), ("1f1b", 3, 1), ("interleaved_1f1b", 3, 2)])
def test_evaluation_between_training_steps_changes_nothing(name: str, p: int, v: int) -> None:
    """Of forwards alone fewer messages are answered, and of none that was not sent."""
    chain = Chain((1, p, 1), name, v, 2 * p)

    def body(rank: int) -> list[tuple[float, float]]:
        connection = connect(chain.manifest, CPU, "same")
        parallel, batch, found = chain.parallel(connection), chain.batch(), []
        for _ in range(3):
            with torch.no_grad():
                evaluated = parallel(**batch)["loss"].item()
            loss = parallel(**batch)["loss"]
            loss.backward()
            found.append((evaluated, loss.item()))
        return found

    for found in run_ranks(body, p):
        assert len({loss for pair in found for loss in pair}) == 1
