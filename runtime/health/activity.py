"""The activity of a rank, in memory that the ranks of its machine share, so that it outlives the rank.

This is a flight recorder: the watchdogs of the other ranks read from it where a dead or hanging rank was last.
"""

from array import array
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from time import monotonic_ns
from typing import NamedTuple

from autoptd.runtime.program.schedule import Action, Kind

KINDS = tuple(str(kind.value) for kind in Kind)
PHASES = (
    *("begin", "loss", "sum of gradients", "agreement", "norm of the gradient"),
    *("search for the first operator", "comparison of shards", "whole parameters"),
)
# Methods of a parallel model that every rank must call; a rank that calls one alone waits for the others.
COLLECTIVE_CALLS = (
    *("bind", "clip_grad_norm_", "save_trace", "full_state_dict", "export_pretrained"),
    *("save_checkpoint", "finish_checkpoint", "load_checkpoint", "read an output", "gather_replicas"),
)
EVALUATION = len(COLLECTIVE_CALLS) + 1
CALLED = ("a call in training", *COLLECTIVE_CALLS, "an evaluation")
# Calls in a rank's history: each is one number, its place and its kind, since it is read at any time.
LATEST = 12
CLEARED = " (torch's clipping skips a rank whose gradients were cleared: clear them on all ranks, or none)"
MARK = "_autoptd_place"  # attribute of an exception
CALLS, STEP, ACTIVITY, SINCE, HEARTBEAT, BUSY, COLLECTIVE, HISTORY = range(8)
SLOTS = HISTORY + LATEST
_NAMES = ("", *KINDS, *PHASES)
_NUMBERS = {name: number for number, name in enumerate(_NAMES)}


class Place(NamedTuple):
    """The last known activity of a rank, after so many `calls` of all kinds and training steps.

    `activity` is the token of an action or the name of a phase, "" between calls, and `stage` the stage of the action.
    `collective` is the number, from 1 on, of a running one of COLLECTIVE_CALLS, or EVALUATION. The activity began at
    `since`; that and `heartbeat` are seconds of the monotonic clock, `busy` those that the main thread computed.
    """

    calls: int
    step: int
    activity: str
    stage: int | None
    collective: int
    since: float
    heartbeat: float
    busy: float

    def __str__(self) -> str:
        if self.collective == EVALUATION:
            return f"{self.activity or 'begin'} of an evaluation after step {self.step}"
        if self.activity:
            return f"{self.activity} of step {self.step}"
        if self.collective:
            name = COLLECTIVE_CALLS[self.collective - 1]
            return f"{name} after step {self.step}, which every rank must call"
        if self.step:
            return f"the time between steps, after step {self.step}"
        return "the time before its first step"


class Position:
    """The place of this rank, which it keeps up to date in `slots`: SLOTS numbers, shared or its own.

    `peers` are the slots of other ranks.
    """

    def __init__(self, slots: memoryview | None = None, peers: Mapping[int, memoryview] | None = None) -> None:
        self.slots = memoryview(array("q", [0] * SLOTS)) if slots is None else slots
        self._peers = peers or {}

    def act(self, action: Action) -> None:
        """Begin an action. Called for every one: takes well under a microsecond."""
        stage, kind, microbatch = action
        slots = self.slots
        slots[ACTIVITY] = stage << 32 | microbatch << 5 | _NUMBERS[kind.value]
        slots[SINCE] = monotonic_ns()

    def phase(self, name: str) -> None:
        """Begin one of PHASES; "" ends the activity."""
        self.slots[ACTIVITY] = _NUMBERS[name]
        self.slots[SINCE] = monotonic_ns()

    @contextmanager
    def call(self, training: bool) -> Iterator[None]:
        """Record a call of the parallel model. RuntimeError if a rank of this machine makes another call instead."""
        self.slots[STEP] += training
        with self._at(0 if training else EVALUATION), self.during("begin"):
            self._compare()
            yield

    @contextmanager
    def collective_call(self, name: str) -> Iterator[None]:
        """Record one of COLLECTIVE_CALLS, which may take any time. RuntimeError as for a call."""
        with self._at(1 + COLLECTIVE_CALLS.index(name)):
            self._compare()
            yield

    @contextmanager
    def _at(self, collective: int) -> Iterator[None]:
        self.slots[SINCE] = monotonic_ns()
        self.slots[CALLS] += 1
        self.slots[COLLECTIVE] = collective
        # A failed call stays: it fails on all ranks, of which some may still be in it when others make the next call.
        number = self.slots[CALLS]
        self.slots[HISTORY + number % LATEST] = number << 4 | collective
        try:
            with self._marking():
                yield
        finally:
            self.slots[COLLECTIVE] = 0
            self.slots[SINCE] = monotonic_ns()

    def _compare(self) -> None:
        """Raise RuntimeError if another rank has made another call in place of one: their messages would mix."""
        for rank, slots in self._peers.items():
            if differing := _find_other_call(self.slots, slots):
                here, there = differing
                raise RuntimeError(
                    f"{here} of this rank met {there} of rank {rank}, which is at {read_place(slots)}: every rank "
                    "makes each call of the parallel model, in training and evaluation, and of full_state_dict, "
                    f"save_checkpoint and the like, none alone{CLEARED * ('clip_grad_norm_' in differing)}"
                )

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Record an activity that begins with `phase`; the watchdog watches it."""
        self.phase(phase)
        try:
            with self._marking():
                yield
        finally:
            self.phase("")

    @contextmanager
    def _marking(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            if not hasattr(error, MARK):
                setattr(error, MARK, self.read())
            raise

    def place_of(self, error: BaseException) -> Place:
        """Return the place at which `error`, or its cause, was raised; else the place of the rank now."""
        cause: BaseException | None = error
        while cause is not None:
            if hasattr(cause, MARK):
                place: Place = getattr(cause, MARK)
                return place
            cause = cause.__cause__ or cause.__context__
        return self.read()

    def read(self) -> Place:
        return read_place(self.slots)


def _find_other_call(own: memoryview, other: memoryview) -> tuple[str, str] | None:
    """Return the first two calls of equal number that differ between two ranks; None if none is known."""
    for number in range(own[CALLS] - LATEST + 1, own[CALLS] + 1):
        one, two = (slots[HISTORY + number % LATEST] for slots in (own, other))
        if one >> 4 == two >> 4 == number and one != two:
            return CALLED[one & 15], CALLED[two & 15]
    return None


def read_place(slots: memoryview) -> Place:
    """Decode a place from its SLOTS numbers."""
    code = slots[ACTIVITY]
    name, stage, microbatch = _NAMES[code & 31], code >> 32, code >> 5 & 0x7FFFFFF
    acts = name in KINDS
    activity = f"{stage}{name}{microbatch}" if acts else name
    times = (slots[number] / 1e9 for number in (SINCE, HEARTBEAT, BUSY))
    return Place(slots[CALLS], slots[STEP], activity, stage if acts else None, slots[COLLECTIVE], *times)
