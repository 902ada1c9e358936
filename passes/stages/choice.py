"""Choose the cut with the shortest step: candidates, each balanced in another way, and the schedule to judge them.

The slowest rank's work bounds the speed of a pipeline. With several chunks per rank (SC21 §2.2), the speed also
depends on where they are uneven: ranks with equal sums wait for each other. So the step itself decides.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from autoptd.passes.cost.schedule_times import ActionTimes, Order, step_seconds, walking_order
from autoptd.passes.stages.cost_sequence import CostSequence, Ints, Memory, fold, undominated
from autoptd.passes.stages.solver import Cut, cut_sequence
from autoptd.runtime.program.schedule import COMPUTING, Kind, make_schedule

# The ceiling of stages and the effort of `cut_sequence` for each candidate: the dynamic programme's even cut; balanced
# ranks of stages about as even; and of any stages, as on a slow network, whose step is often short only after moves.
SEARCHES: tuple[tuple[float | None, float], ...] = ((1.0, 0.0), (1.0, 0.4), (None, 0.4))
STRIDES = (1, 2, 4, 8, 16, 32)  # places that a cut is moved by
WALKED = 100_000  # actions that are simulated to move the cuts, however many moves are tried at once


@dataclass(frozen=True)
class ItemTimes:
    """The nanoseconds of the items of a row: each item's forward and backward, and sending the values that live before
    it `ahead` and their gradients `back`. `may_cut` says where a cut may stand. `split_penalty` is the time that a cut
    adds to the forward, and to the backward, of the stage on either side, for the kernel that it splits."""

    forward: Sequence[int]
    backward: Sequence[int]
    ahead: Sequence[int]
    back: Sequence[int]
    may_cut: Sequence[bool]
    split_penalty: tuple[Sequence[int], Sequence[int]]

    @property
    def costs(self) -> list[int]:
        return [ahead + back for ahead, back in zip(self.forward, self.backward, strict=True)]

    @property
    def boundary_costs(self) -> list[int | None]:
        """Of a cut before each item, on either side of it."""
        rows = zip(self.may_cut, self.ahead, self.back, *self.split_penalty, strict=True)
        return [sum(times) if may_cut else None for may_cut, *times in rows]


@dataclass(frozen=True)
class Pipeline:
    """The steps of `m` microbatches on p ranks with v chunks, for any cut of a row.

    Of a long step four microbatches a rank are walked; the rest takes as long as the last two, or the slowest rank.
    """

    times: ItemTimes
    schedule: str
    p: int
    m: int
    v: int

    @cached_property
    def _orders(self) -> list[Order]:
        counts = (self.m,) if self.m <= 4 * self.p else (2 * self.p, 4 * self.p)
        return [walking_order(make_schedule(self.schedule, self.p, count, self.v)) for count in counts]

    @property
    def moves(self) -> int:
        """Return how often a cut may be moved: a walk takes its time for one cut and for many."""
        return WALKED // sum(map(len, self._orders))

    def of_cuts(self, positions: Ints) -> Ints:
        """Return the nanoseconds of a step for each row of `positions`."""
        times, count, none = self.times, len(positions), np.zeros(len(positions), np.int64)
        ends = np.pad(positions, ((0, 0), (1, 1)), constant_values=((0, 0), (0, len(times.forward))))
        taken: dict[Kind, Any] = {}
        sides = zip(COMPUTING, (times.forward, times.backward), times.split_penalty, strict=True)
        for kind, row, penalty in sides:
            stages = np.diff(np.pad(np.cumsum(row), (1, 0))[ends], axis=1).T
            more = np.asarray(penalty, np.int64)[positions].T
            stages[1:] += more
            stages[:-1] += more
            taken[kind] = stages
        work = sum(taken.values()).reshape(self.v, self.p, count).sum(0).max(0)
        ahead, back = (np.asarray(row, np.int64)[positions].T for row in (times.ahead, times.back))
        taken |= {Kind.SEND_OUTPUT: [*ahead, none], Kind.SEND_GRADIENT: [none, *back]}
        steps = [step_seconds(order, self.p, ActionTimes(taken), np.maximum) for order in self._orders]
        each = np.maximum((steps[-1] - steps[0]) // (2 * self.p), work)
        walked: Ints = steps[-1] + max(0, self.m - 4 * self.p) * each
        return walked


def choose_cut(pipeline: Pipeline, memory: Memory | None = None, *, search: bool = True) -> Cut:
    """Return the cut whose simulated step is shortest, among those that fit in memory if any does.

    With one chunk per rank, or without `search`, it is the cut with the fastest slowest stage, which a dynamic
    programme finds. With several, the cut of each of the `SEARCHES` is moved as long as its step becomes shorter, and
    the best is taken. Raises ValueError for more stages than units (see `cut_sequence`).
    """
    rows, p, v = (pipeline.times.costs, pipeline.times.boundary_costs), pipeline.p, pipeline.v
    found: dict[tuple[int, ...], Cut] = {}
    single = v == 1 or p == 1 or not search
    for ceiling, effort in SEARCHES[: 1 if single else 3 if pipeline.moves else 2]:
        own: Any = {"stage_ceiling": ceiling, "effort": effort}
        cut = cut_sequence(*rows, memory, num_stages=p * v, num_pipeline_ranks=p, **own)
        found.setdefault(cut.positions, cut)
    fitting = [cut for cut in found.values() if cut.fits]
    if single or not fitting:
        return (fitting or list(found.values()))[0]
    steps = pipeline.of_cuts(np.array([cut.positions for cut in fitting])).tolist()
    sequence = fold(*rows, memory, p * v, p)
    moved = [_move(cut, step, pipeline, sequence) for cut, step in zip(fitting, steps, strict=True)]
    return min(moved, key=lambda cut: (cut.step, cut.bottleneck))


def _move(cut: Cut, step: int, pipeline: Pipeline, sequence: CostSequence) -> Cut:
    """Take the move that shortens the step most, again and again; return the last cut, with its step."""
    here = np.searchsorted(sequence.places, [0, *cut.positions, sequence.places[-1]])
    kept = undominated(sequence, here)
    places, here = sequence.take(kept), np.searchsorted(kept, here)
    first, words = here, "chosen by its step"
    for _ in range(pipeline.moves):
        moves = _neighbours(places, here)
        steps = pipeline.of_cuts(places.places[moves[:, 1:-1]])
        order = np.argsort(steps, kind="stable").tolist()  # the cut itself is among them
        index = next(i for i in order if steps[i] >= step or places.fits(moves[i]))
        if steps[index] >= step:
            break
        here, step = moves[index], int(steps[index])
    if here is first:
        return replace(cut, step=step, method=f"{cut.method}, {words}")
    moved = Cut.of(places, here, cut.lower_bound, f"{cut.method}, then moved, {words}")
    return replace(moved, step=step)


def _neighbours(sequence: CostSequence, cut: Ints) -> Ints:
    """Return `cut` and those near it, where every stage has work: one position moved, or it and the next, or all."""
    found = [cut]
    last = len(cut) - 2
    for first in range(1, last + 1):
        for end in sorted({first, min(first + 1, last), last}):
            for stride in (*STRIDES, *(-stride for stride in STRIDES)):
                moved = cut.copy()
                moved[first : end + 1] += stride
                if moved[first] > 0 and moved[end] < len(sequence.places) - 1:
                    found.append(moved)
    moves: Ints = np.array(found)
    return moves[(moves[:, :-1] < sequence.before[moves[:, 1:]]).all(1)]
