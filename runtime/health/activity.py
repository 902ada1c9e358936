"""What a rank is doing, in memory that the ranks of its machine share: it is there still when the rank is not."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from time import monotonic_ns
from typing import NamedTuple

from autoptd.runtime.program.schedule import Action, Kind

KINDS = tuple(str(kind.value) for kind in Kind)
PHASES = (
    "begin",
    "loss",
    "sum of gradients",
    "agreement",
    "norm of the gradient",
    "search for the first operator",
    "comparison of what is sharded",
)
# Methods of a parallel model that every rank must call, of which one that does so alone waits for the others.
STORING = ("full_state_dict", "export_pretrained", "save_checkpoint", "finish_checkpoint", "load_checkpoint")
COLLECTIVE_CALLS = ("bind", "clip_grad_norm_", "save_trace", *STORING)
EVALUATION = len(COLLECTIVE_CALLS) + 1
CALLED = ("a call in training", *COLLECTIVE_CALLS, "an evaluation")
LATEST, COUNTED = 12, 1 << 15  # calls in a rank's history, which is one number: it is read at any time
CLEARED = (
    " (torch's clipping asks no rank whose gradients were cleared: clear them on every rank, or on none)"
)
MARK = "_autoptd_place"  # of an exception
CALLS, STEP, ACTIVITY, SINCE, HEARTBEAT, BUSY, DUTY, HISTORY, SLOTS = range(9)
_NUMBERS = {name: number for number, name in enumerate((*KINDS, *PHASES), 1)}
_NAMES = {number: name for name, number in _NUMBERS.items()}


class Place(NamedTuple):
    """Where a rank was last seen: calls and duties so far, training steps, its activity, and since when it is at it.

    `activity` is an action's token or a phase's name, "" between calls, and `stage` that of the action. `duty` is
    the number, from 1 on, of the one of COLLECTIVE_CALLS that it is in, or EVALUATION. `since` and `heartbeat` are
    seconds of the machine's monotonic clock; `busy` is how many seconds between them its main thread computed.
    """

    calls: int
    step: int
    activity: str
    stage: int | None
    duty: int
    since: float
    heartbeat: float
    busy: float

    def __str__(self) -> str:
        if self.duty == EVALUATION:
            return f"{self.activity or 'begin'} of an evaluation after step {self.step}"
        if self.activity:
            return f"{self.activity} of step {self.step}"
        if self.duty:
            return f"{COLLECTIVE_CALLS[self.duty - 1]} after step {self.step}, which every rank must call"
        return (
            f"the time between steps, after step {self.step}"
            if self.step
            else "the time before its first step"
        )


class Position:
    """The place of this rank, which it keeps up to date; `slots` are SLOTS numbers, shared or its own.

    `peers` are those of other ranks. `compiling` while a call of a kind and input shape runs of which none has ended
    before.
    """

    def __init__(
        self, slots: memoryview | None = None, peers: Mapping[int, memoryview] | None = None
    ) -> None:
        self.slots = memoryview(array("q", [0] * SLOTS)) if slots is None else slots
        self._peers = peers or {}
        self.compiling = False
        self._done: set[tuple[bool, int]] = set()

    def act(self, action: Action) -> None:
        """This action begins. Called for every one: takes well under a microsecond."""
        stage, kind, microbatch = action
        slots = self.slots
        slots[ACTIVITY] = stage << 32 | microbatch << 5 | _NUMBERS[kind.value]
        slots[SINCE] = monotonic_ns()

    def phase(self, name: str) -> None:
        """One of PHASES begins."""
        self.slots[ACTIVITY] = _NUMBERS[name]
        self.slots[SINCE] = monotonic_ns()

    def leave(self) -> None:
        """The call has ended."""
        self.slots[ACTIVITY] = 0
        self.slots[SINCE] = monotonic_ns()

    @contextmanager
    def call(self, training: bool, shape: int) -> Iterator[None]:
        """A call of the parallel model, with a batch of the compiled input shape of this number.

        RuntimeError where a rank of this machine makes another one instead.
        """
        self.slots[STEP] += training
        self.compiling = (training, shape) not in self._done
        with self._at(0 if training else EVALUATION), self.during("begin"):
            self._compare()
            yield
        self._done.add((training, shape))

    @contextmanager
    def duty(self, name: str) -> Iterator[None]:
        """One of COLLECTIVE_CALLS, which may take as long as it does. RuntimeError as for a call."""
        with self._at(1 + COLLECTIVE_CALLS.index(name)):
            self._compare()
            yield

    @contextmanager
    def _at(self, duty: int) -> Iterator[None]:
        self.slots[SINCE] = monotonic_ns()
        self.slots[CALLS] += 1
        self.slots[DUTY] = duty
        # One that fails stays: it does on all ranks, some of which are in it still when others make the next.
        self.slots[HISTORY] = _remember(self.slots[HISTORY], duty)
        try:
            with self._marking():
                yield
        finally:
            self.slots[DUTY] = 0
            self.slots[SINCE] = monotonic_ns()

    def _compare(self) -> None:
        """Refuse to go on where another rank has made another call in place of one: messages of the two would meet."""
        own = self.slots[HISTORY]
        for rank, slots in self._peers.items():
            if (differing := _find_other_call(own, slots[HISTORY])) is not None:
                here, there = differing
                raise RuntimeError(
                    f"{here} of this rank met {there} of rank {rank}, which is at {read_place(slots)}: every rank "
                    "makes each call of the parallel model alike, in training and evaluation, and calls "
                    "full_state_dict, save_checkpoint and the like; what one rank alone is to do goes without the "
                    f"parallel model{CLEARED * ('clip_grad_norm_' in differing)}"
                )

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """What begins with `phase` and is watched."""
        self.phase(phase)
        try:
            with self._marking():
                yield
        finally:
            self.compiling = False
            self.leave()

    @contextmanager
    def _marking(self) -> Iterator[None]:
        """Let an error tell where it broke off what it was raised in."""
        try:
            yield
        except BaseException as error:
            if not hasattr(error, MARK):
                setattr(error, MARK, self.read())
            raise

    def place_of(self, error: BaseException) -> Place:
        """Where `error`, or one that it came of, broke something off; else where the rank is now."""
        cause: BaseException | None = error
        while cause is not None:
            if hasattr(cause, MARK):
                place: Place = getattr(cause, MARK)
                return place
            cause = cause.__cause__ or cause.__context__
        return self.read()

    def read(self) -> Place:
        return read_place(self.slots)


def _remember(history: int, duty: int) -> int:
    """A `history` with a call more: from the right LATEST of them, a digit each, and how many there were."""
    count, calls = divmod(history, 1 << 4 * LATEST)
    calls = (calls << 4 | duty + 1) % (1 << 4 * LATEST)
    return (count + 1) % COUNTED << 4 * LATEST | calls


def _find_other_call(own: int, other: int) -> tuple[str, str] | None:
    """The first calls of the same number that two histories have and that differ; None where none is known."""
    (count, calls), (others, found) = (divmod(history, 1 << 4 * LATEST) for history in (own, other))
    ahead = (others - count + COUNTED // 2) % COUNTED - COUNTED // 2
    if abs(ahead) >= LATEST:
        return None
    calls, found = calls >> 4 * max(0, -ahead), found >> 4 * max(0, ahead)
    for place in reversed(range(LATEST - abs(ahead))):
        one, two = (digits >> 4 * place & 15 for digits in (calls, found))
        if one != two and one and two:
            return CALLED[one - 1], CALLED[two - 1]
    return None


def read_place(slots: memoryview) -> Place:
    """The place that SLOTS numbers stand for."""
    code = slots[ACTIVITY]
    name, stage, microbatch = _NAMES.get(code & 31, ""), code >> 32, code >> 5 & 0x7FFFFFF
    acts = name in KINDS
    activity = f"{stage}{name}{microbatch}" if acts else name
    times = (slots[number] / 1e9 for number in (SINCE, HEARTBEAT, BUSY))
    return Place(slots[CALLS], slots[STEP], activity, stage if acts else None, slots[DUTY], *times)
