"""Schedules: the order in which each pipeline rank runs its stages, as data.

A schedule is one row of `Action`s per pipeline rank, a pure function of its name and of p pipeline ranks, m
microbatches and v model chunks (stages per rank). Stage k lives on pipeline rank k mod p (SC21 §2.2). A named schedule
only orders what a rank computes; transfers, peaks in flight and completion are derived from the actions.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from itertools import accumulate, islice, zip_longest
from typing import NamedTuple

Schedule = tuple[tuple["Action", ...], ...]

SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b")


class Kind(Enum):
    """The kind of an action; its value is its word in a token.

    An action either `computes`, `sends` or `receives`. Its `direction` is 1 where values go to the next stage, -1 where
    gradients go to the previous one. One that `produces_gradients` adds to those of the stage's parameters. Of its
    direction, `compute` is the kind that computes a value or with it, `send` and `receive` those that move the value.
    """

    compute: Kind
    send: Kind
    receive: Kind

    FORWARD = "F"
    BACKWARD = "B"
    SEND_OUTPUT = "SEND_F"
    RECEIVE_INPUT = "RECV_F"
    SEND_GRADIENT = "SEND_B"
    RECEIVE_GRADIENT = "RECV_B"

    def __init__(self, word: str) -> None:
        self.sends = word.startswith("SEND")
        self.receives = word.startswith("RECV")
        self.computes = not self.sends and not self.receives
        self.direction = 1 if word[-1] == "F" else -1
        self.produces_gradients = word == "B"

    __hash__ = object.__hash__  # in C: sets of actions are large


for _kind in Kind:
    _word = _kind.value[-1]
    _kind.compute, _kind.send, _kind.receive = Kind(_word), Kind(f"SEND_{_word}"), Kind(f"RECV_{_word}")
COMPUTING = tuple(kind for kind in Kind if kind.computes)
_KINDS = {str(kind.value): kind for kind in Kind}
_TOKEN = re.compile(rf"(\d+)({'|'.join(_KINDS)})(\d+)")


class Action(NamedTuple):
    """One step of one pipeline rank, printed as a token: ``2F0``, ``1SEND_F3``.

    `F` and `B` compute a stage forward and backward on a microbatch. `SEND_F` sends the stage's output to
    the next stage's rank, `RECV_F` posts the receive of the stage's input; `SEND_B` sends the gradient of
    the stage's input to the previous stage's rank, `RECV_B` posts the receive of the gradient of the stage's
    output. Sends never wait; the `F` or `B` that needs a received value waits for it.
    """

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"

    @classmethod
    def parse(cls, token: str) -> Action:
        """Read a token back; ValueError for anything else."""
        match = _TOKEN.fullmatch(token)
        if match is None:
            raise ValueError(
                f"{token!r} is no action: expected a stage, one of {' '.join(_KINDS)}, and a microbatch, as in 2F0 "
                "or 1SEND_F3"
            )
        return cls(int(match[1]), _KINDS[match[2]], int(match[3]))

    @property
    def compute(self) -> Action:
        """The forward or backward that makes what is sent, or needs what is received."""
        return Action(self.stage, self.kind.compute, self.microbatch)

    @property
    def receive(self) -> Action:
        """The receive of what this forward or backward needs."""
        return Action(self.stage, self.kind.receive, self.microbatch)

    @property
    def counterpart(self) -> Action:
        """The action at the other end of a send's or receive's channel; its rank is ``counterpart.stage % p``."""
        kind = self.kind
        if kind.sends:
            return Action(self.stage + kind.direction, kind.receive, self.microbatch)
        return Action(self.stage - kind.direction, kind.send, self.microbatch)


def make_schedule(name: str, p: int, m: int, v: int = 1) -> Schedule:
    """Return each pipeline rank's actions, sends and receives included: p ranks, m microbatches, v model chunks.

    "gpipe": all forwards, then all backwards, chunk by chunk. "1f1b": p - rank - 1 warm-up forwards, then one forward
    and one backward in turn; any number of microbatches. "interleaved_1f1b": the same in groups of p microbatches over
    v chunks, with 2(p - rank - 1) + (v - 1)p warm-up forwards (SC21 §2.2.2); with one chunk it is 1F1B itself.
    Backwards of a stage ascend in microbatches under all three. ValueError for what cannot be scheduled.
    """
    check_shape(name, p, m, v)
    return _add_transfers([list(compute_order(name, rank, p, m, v)) for rank in range(p)], p * v - 1)


def compute_order(name: str, rank: int, p: int, m: int, v: int) -> Iterator[Action]:
    """Yield the forwards and backwards of one pipeline rank under a named schedule."""
    stages = range(rank, p * v, p)
    # Chunks take turns after as many microbatches; under GPipe a later chunk finds its input waiting.
    group = p if v > 1 and name != "gpipe" else m
    groups = [range(first, first + group) for first in range(0, m, group)]
    forwards = (Action(k, Kind.FORWARD, i) for numbers in groups for k in stages for i in numbers)
    backwards = (Action(k, Kind.BACKWARD, i) for numbers in groups for k in reversed(stages) for i in numbers)
    # With several chunks the first gradient comes back later: two steps for each rank behind this one.
    warm_up = p - rank - 1 if v == 1 else 2 * (p - rank - 1) + (v - 1) * p
    yield from islice(forwards, m * v if name == "gpipe" else warm_up)
    for forward in forwards:
        yield forward
        yield next(backwards)
    yield from backwards


def find_in_flight(actions: Iterable[Action]) -> Iterator[dict[int, int]]:
    """Yield the microbatches that each stage holds whenever a backward follows a forward.

    A stage holds a microbatch from the begin of its forward to the end of its backward, so a rank holds most then.
    """
    computing = [action for action in actions if action.kind.computes]
    held: dict[int, int] = defaultdict(int)
    for action, following in zip_longest(computing, computing[1:]):
        held[action.stage] += action.kind.direction
        if action.kind is Kind.FORWARD and (following is None or following.kind is Kind.BACKWARD):
            yield dict(held)


def assign_slots(actions: Iterable[Action]) -> dict[int, dict[int, int]]:
    """Return, by stage and microbatch, its slot, the lowest that is free: a stage has as many as it has in flight."""
    taken: dict[int, dict[int, int]] = defaultdict(dict)
    found: dict[int, dict[int, int]] = defaultdict(dict)
    for stage, kind, microbatch in actions:
        if kind is Kind.FORWARD:
            slot = next(i for i in range(len(taken[stage]) + 1) if i not in taken[stage].values())
            taken[stage][microbatch] = found[stage][microbatch] = slot
        elif kind is Kind.BACKWARD:
            taken[stage].pop(microbatch, None)
    return found


def last_gradients(actions: Sequence[Action]) -> dict[int, int]:
    """Return, by stage, the position of the action after which the stage's gradients are complete."""
    return {action.stage: i for i, action in enumerate(actions) if action.kind.produces_gradients}


def check_shape(name: str, p: int, m: int, v: int) -> None:
    """Raise ValueError unless the named schedule can run v chunks on each of p pipeline ranks with m microbatches."""
    if name == "1f1b" and v > 1:
        raise ValueError(
            f"schedule='1f1b' runs one model chunk per pipeline rank, not {v}: "
            "use schedule='interleaved_1f1b' or num_model_chunks=1"
        )
    if name == "interleaved_1f1b" and m % p:
        above = m + p - m % p
        counts = f"{above - p} or {above}" if above > p else f"{above}"
        raise ValueError(
            f"schedule='interleaved_1f1b' takes microbatches in groups of the {p} pipeline ranks, and {m} microbatches "
            f"are no multiple of {p}: use num_microbatches={counts}, or schedule='1f1b', which takes any number"
        )


def _add_transfers(orders: list[list[Action]], last: int) -> Schedule:
    """Put a send right after what makes its value, a receive one compute action ahead, posted when the peer sends."""
    if len(orders) == 1:  # every stage hands its value over on the spot
        return (tuple(orders[0]),)
    schedule: list[tuple[Action, ...]] = []
    for order, receives in zip(orders, _receive_slots(orders, last), strict=True):
        actions: list[Action] = []
        for slot, action in enumerate(order):
            actions += receives.get(slot, ())
            actions.append(action)
            if 0 <= action.stage + action.kind.direction <= last:
                actions.append(Action(action.stage, action.kind.send, action.microbatch))
        schedule.append(tuple(actions))
    return tuple(schedule)


def _receive_slots(orders: list[list[Action]], last: int) -> list[dict[int, list[Action]]]:
    """Find, per rank, the receives to post before its n-th compute action.

    A channel (an ordered pair of ranks) is first in first out, so its receives are posted in the order its
    sender sends: one whose successor is needed sooner is posted with the successor.
    """
    p = len(orders)
    slots: dict[tuple[int, Kind, int], int] = {}
    slots |= {action: max(index - 1, 0) for order in orders for index, action in enumerate(order)}
    channels: dict[tuple[int, int], list[tuple[int, Action]]] = defaultdict(list)
    for source, order in enumerate(orders):
        for stage, kind, microbatch in order:
            consumer = stage + kind.direction
            if 0 <= consumer <= last:
                message = slots[consumer, kind, microbatch], Action(consumer, kind.receive, microbatch)
                channels[source, consumer % p].append(message)
    posts: list[dict[int, list[Action]]] = [defaultdict(list) for _ in orders]
    for (_, destination), messages in channels.items():
        latest = accumulate((slot for slot, _ in reversed(messages)), min)
        for slot, (_, receive) in reversed(list(zip(latest, reversed(messages), strict=True))):
            posts[destination][slot].append(receive)
    return posts
