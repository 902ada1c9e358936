"""Schedules: the order in which each pipeline rank runs its stages, as data.

A schedule is one row of `Action`s per pipeline rank, a pure function of its name and of p pipeline ranks, m
microbatches and v model chunks (stages per rank). Stage k lives on pipeline rank k mod p (SC21 §2.2).
"""

from __future__ import annotations

import difflib
import re
from collections import defaultdict
from collections.abc import Sequence
from itertools import chain
from typing import Literal, NamedTuple, cast

Kind = Literal["F", "B", "SEND_F", "RECV_F", "SEND_B", "RECV_B"]
Schedule = tuple[tuple["Action", ...], ...]

SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b")

_TOKEN = re.compile(r"(\d+)(F|B|SEND_F|RECV_F|SEND_B|RECV_B)(\d+)")

# What waits at the other end of a channel, and how many stages away.
_COUNTERPART: dict[Kind, tuple[int, Kind]] = {
    "SEND_F": (1, "RECV_F"),
    "RECV_F": (-1, "SEND_F"),
    "SEND_B": (-1, "RECV_B"),
    "RECV_B": (1, "SEND_B"),
}


class Action(NamedTuple):
    """One step of one pipeline rank, printed as a token: ``2F0``, ``1SEND_F3``.

    `F` and `B` compute a stage forward and backward on a microbatch. `SEND_F` sends the stage's output to
    the next stage's rank, `RECV_F` posts the receive of the stage's input; `SEND_B` sends the gradient of
    the stage's input to the previous stage's rank, `RECV_B` posts the receive of the gradient of the stage's
    output. Sends never wait; a receive is waited for by the `F` or `B` that needs it.
    """

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, token: str) -> Action:
        """Read a token back; ValueError for anything else."""
        match = _TOKEN.fullmatch(token)
        if match is None:
            raise ValueError(
                f"{token!r} is no action: expected a stage, one of F B SEND_F RECV_F SEND_B RECV_B, "
                "and a microbatch, as in 2F0 or 1SEND_F3"
            )
        stage, kind, microbatch = match.groups()
        return cls(int(stage), cast(Kind, kind), int(microbatch))

    @property
    def counterpart(self) -> Action:
        """The action at the other end of the channel; its rank is ``counterpart.stage % p``."""
        if self.kind not in _COUNTERPART:
            raise ValueError(f"{self} computes: only a send or a receive has a counterpart")
        distance, kind = _COUNTERPART[self.kind]
        return Action(self.stage + distance, kind, self.microbatch)


def make_schedule(
    name: str, num_pipeline_ranks: int, num_microbatches: int, num_model_chunks: int = 1
) -> Schedule:
    """Give each pipeline rank its actions, sends and receives included.

    "gpipe": all forwards, then all backwards, chunk by chunk. "1f1b": p - rank - 1 warm-up forwards, then
    one forward and one backward in turn; any number of microbatches. "interleaved_1f1b": the same in groups
    of p microbatches over v chunks, with 2(p - rank - 1) + (v - 1)p warm-up forwards (SC21 §2.2.2); with one
    chunk it is 1F1B itself. Backwards of a stage ascend in microbatches under all three. ValueError for what
    cannot be scheduled.
    """
    p, m, v = num_pipeline_ranks, num_microbatches, num_model_chunks
    _check_shape(name, p, m, v)
    if name == "gpipe":
        orders = [_all_forward_all_backward(rank, p, m, v) for rank in range(p)]
    else:
        orders = [_one_forward_one_backward(rank, p, m, v) for rank in range(p)]
    return _add_transfers(orders, p, p * v - 1)


def peak_in_flight(actions: Sequence[Action]) -> int:
    """Count the most (stage, microbatch) pairs alive at once: forward begun, backward not ended."""
    alive = peak = 0
    for action in actions:
        if action.kind == "F":
            alive += 1
            peak = max(peak, alive)
        elif action.kind == "B":
            alive -= 1
    return peak


def _check_shape(name: str, p: int, m: int, v: int) -> None:
    if name not in SCHEDULES:
        nearest = difflib.get_close_matches(str(name), SCHEDULES, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"schedule={name!r} is unknown: did you mean {nearest!r}? Known: {', '.join(SCHEDULES)}"
        )
    for value, noun in ((p, "pipeline ranks"), (m, "microbatches"), (v, "model chunks per pipeline rank")):
        if value < 1:
            raise ValueError(f"{value} {noun}: a schedule needs at least 1")
    if name == "1f1b" and v > 1:
        raise ValueError(
            f"schedule='1f1b' runs one model chunk per pipeline rank, not {v}: "
            "use schedule='interleaved_1f1b' or num_model_chunks=1"
        )
    if name == "interleaved_1f1b" and m % p:
        above = m + p - m % p
        counts = f"{above - p} or {above}" if above > p else f"{above}"
        raise ValueError(
            f"schedule='interleaved_1f1b' takes microbatches in groups of the {p} pipeline ranks, and {m} "
            f"microbatches are no multiple of {p}: use num_microbatches={counts}, or schedule='1f1b', "
            "which takes any number"
        )


def _all_forward_all_backward(rank: int, p: int, m: int, v: int) -> list[Action]:
    """GPipe, chunk by chunk, so that a later chunk finds its input waiting."""
    stages = range(rank, p * v, p)
    forwards = [Action(stage, "F", microbatch) for stage in stages for microbatch in range(m)]
    backwards = [Action(stage, "B", microbatch) for stage in reversed(stages) for microbatch in range(m)]
    return forwards + backwards


def _one_forward_one_backward(rank: int, p: int, m: int, v: int) -> list[Action]:
    """1F1B, interleaved when v > 1: warm-up, one forward and one backward in turn, cool-down."""
    group = p if v > 1 else m
    stages = range(rank, p * v, p)
    groups = [range(first, first + group) for first in range(0, m, group)]
    forwards = [Action(stage, "F", i) for microbatches in groups for stage in stages for i in microbatches]
    backwards = [
        Action(stage, "B", i) for microbatches in groups for stage in reversed(stages) for i in microbatches
    ]
    # With several chunks the first gradient comes back later: two steps for each rank behind this one.
    warm_up = p - rank - 1 if v == 1 else 2 * (p - rank - 1) + (v - 1) * p
    warm_up = min(warm_up, m * v)
    steady = chain.from_iterable(zip(forwards[warm_up:], backwards, strict=False))
    return [*forwards[:warm_up], *steady, *backwards[m * v - warm_up :]]


def _add_transfers(orders: list[list[Action]], p: int, last: int) -> Schedule:
    """Put each send right after the action that makes its value, and each receive ahead of its need.

    One compute action ahead, so that it is already posted when the peer sends.
    """
    if p == 1:  # every stage hands its value over on the spot
        return tuple(tuple(order) for order in orders)
    posts = _receive_slots(orders, p, last)
    schedule: list[tuple[Action, ...]] = []
    for order, receives in zip(orders, posts, strict=True):
        actions: list[Action] = []
        for slot, action in enumerate(order):
            actions += receives.get(slot, ())
            actions.append(action)
            stage, kind, microbatch = action
            if kind == "F" and stage < last:
                actions.append(Action(stage, "SEND_F", microbatch))
            elif kind == "B" and stage > 0:
                actions.append(Action(stage, "SEND_B", microbatch))
        schedule.append(tuple(actions))
    return tuple(schedule)


def _receive_slots(orders: list[list[Action]], p: int, last: int) -> list[dict[int, list[Action]]]:
    """Find, per rank, the receives to post before its n-th compute action.

    A channel (an ordered pair of ranks) is first in first out, so its receives are posted in the order its
    sender sends: one whose successor is needed sooner is posted with the successor.
    """
    slots: dict[tuple[int, str, int], int] = {}
    for order in orders:
        for index, (stage, kind, microbatch) in enumerate(order):
            slots[stage, kind, microbatch] = max(index - 1, 0)
    channels: dict[tuple[int, int], list[tuple[int, Action]]] = defaultdict(list)
    for source, order in enumerate(orders):
        for stage, kind, microbatch in order:
            if kind == "F" and stage < last:
                receive, consumer = Action(stage + 1, "RECV_F", microbatch), (stage + 1, "F", microbatch)
            elif kind == "B" and stage > 0:
                receive, consumer = Action(stage - 1, "RECV_B", microbatch), (stage - 1, "B", microbatch)
            else:
                continue
            channels[source, receive.stage % p].append((slots[consumer], receive))
    posts: list[dict[int, list[Action]]] = [defaultdict(list) for _ in orders]
    for (_, destination), messages in channels.items():
        earliest = len(orders[destination])
        posted: list[tuple[int, Action]] = []
        for slot, receive in reversed(messages):
            earliest = min(earliest, slot)
            posted.append((earliest, receive))
        for slot, receive in reversed(posted):
            posts[destination][slot].append(receive)
    return posts
