"""Choose the cut with the shortest step: candidates, each balanced in another way, and the schedule to judge them.

The slowest rank's work bounds the speed of a pipeline. With several chunks per rank (SC21 §2.2), the speed also
depends on where they are uneven: ranks with equal sums wait for each other. So the step itself decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from autoptd.passes.cost.schedule_times import ActionTimes, walk, walking_order
from autoptd.passes.stages.cost_sequence import CostSequence, Ints, Memory, fold, undominated
from autoptd.passes.stages.solver import Cut, cut_sequence
from autoptd.runtime.program.schedule import Action, Kind, make_schedule

# The ceiling of stages and the effort that `cut_sequence` gets for each candidate: the even cut of the dynamic
# programme; balanced ranks of stages about as even; balanced ranks of any stages, as beside a heavy head.
SEARCHES: tuple[tuple[float | None, float], ...] = ((1.0, 0.0), (1.0, 0.4), (None, 0.4))
STRIDES = (1, 2, 4, 8, 16, 32)  # places that a cut is moved by
WALKED = 100_000  # actions that are simulated to move the cuts, however many moves are tried at once


@dataclass(frozen=True)
class ItemTimes:
    """Nanoseconds of the items of a row: of the forward and the backward of each, and of sending what lives before it
    `ahead`, and its gradients `back`. `fit` says where a cut may stand. `apart` is what the forward, and the backward,
    of either stage at a cut take longer for the kernel that it parts."""

    forward: Sequence[int]
    backward: Sequence[int]
    ahead: Sequence[int]
    back: Sequence[int]
    fit: Sequence[bool]
    apart: tuple[Sequence[int], Sequence[int]]

    @property
    def costs(self) -> list[int]:
        return [ahead + back for ahead, back in zip(self.forward, self.backward, strict=True)]

    @property
    def boundary_costs(self) -> list[int | None]:
        """Of a cut before each item, on either side of it."""
        rows = zip(self.fit, self.ahead, self.back, *self.apart, strict=True)
        return [sum(times) if fit else None for fit, *times in rows]


@dataclass(frozen=True)
class Pipeline:
    """The steps of `m` microbatches on p ranks with v chunks, for any cut of a row.

    Of a long step four microbatches a rank are walked, and the rest takes as long as the last two of them, or as the
    slowest rank's work.
    """

    times: ItemTimes
    schedule: str
    p: int
    m: int
    v: int

    @cached_property
    def _orders(self) -> dict[int, list[tuple[int, Action]]]:
        counts = (self.m,) if self.m <= 4 * self.p else (2 * self.p, 4 * self.p)
        return {count: walking_order(make_schedule(self.schedule, self.p, count, self.v)) for count in counts}

    @cached_property
    def _sums(self) -> tuple[Ints, Ints]:
        forward, backward = (
            np.concatenate([[0], np.cumsum(np.asarray(row, np.int64))])
            for row in (self.times.forward, self.times.backward)
        )
        return forward, backward

    @property
    def num_actions(self) -> int:
        """Return the number of actions that a walk takes, for one cut or for many."""
        return sum(map(len, self._orders.values()))

    def of_cuts(self, positions: Ints) -> Ints:
        """Nanoseconds of a step for each row of `positions`."""
        count = len(positions)
        ends = np.hstack(
            [np.zeros((count, 1), np.int64), positions, np.full((count, 1), len(self.times.forward))]
        )
        forward, backward = (np.diff(sums[ends], axis=1).T for sums in self._sums)
        for stages, apart in zip((forward, backward), self.times.apart, strict=True):
            more = np.asarray(apart, np.int64)[positions].T
            stages[1:] += more
            stages[:-1] += more
        ahead, back = (np.asarray(row, np.int64)[positions].T for row in (self.times.ahead, self.times.back))
        none = np.zeros(count, np.int64)
        actions = ActionTimes(
            {
                Kind.FORWARD: list(forward),
                Kind.BACKWARD: list(backward),
                Kind.SEND_OUTPUT: [*ahead, none],
                Kind.SEND_GRADIENT: [none, *back],
            }
        )
        steps = []
        for order in self._orders.values():
            last: dict[int, Ints] = {}
            for rank, action, _, end in walk(order, self.p, actions, np.maximum):
                if action.kind.computes:
                    last[rank] = end
            steps.append(np.max(list(last.values()), axis=0))
        work = (forward + backward).reshape(self.v, self.p, count).sum(0).max(0)
        each = np.maximum((steps[-1] - steps[0]) // (2 * self.p), work)
        walked: Ints = steps[-1] + max(0, self.m - 4 * self.p) * each
        return walked


@dataclass(frozen=True)
class Choice:
    """A cut, its step in nanoseconds (0 where none was simulated), and of the candidates the one with the least
    slowest rank."""

    cut: Cut
    step: int
    lightest: Cut
    lightest_step: int

    def __str__(self) -> str:
        if not self.step:
            return self.cut.method
        text = f"{self.cut.method}, chosen by its step"
        if self.lightest.bottleneck >= self.cut.bottleneck:
            return text
        lighter = 1 - self.lightest.bottleneck / self.cut.bottleneck
        longer = self.lightest_step / self.step - 1
        return f"{text}: one with a slowest rank {lighter:.1%} lighter takes {longer:.1%} longer"


def choose_cut(
    times: ItemTimes,
    memory: Memory | None,
    *,
    num_stages: int,
    num_pipeline_ranks: int,
    schedule: str,
    num_microbatches: int,
    memory_limit: int | None,
) -> Choice:
    """Return the cut whose simulated step is shortest, among those that fit in memory if any does.

    With one chunk per rank it is the cut with the fastest slowest rank, which a dynamic programme finds. With several,
    the cut of each of the `SEARCHES` is moved as long as its step becomes shorter, and the best is taken. Raises
    ValueError for more stages than units (see `cut_sequence`).
    """
    found: dict[tuple[int, ...], Cut] = {}
    for ceiling, effort in SEARCHES if num_stages > num_pipeline_ranks else SEARCHES[:1]:
        cut = cut_sequence(
            times.costs,
            times.boundary_costs,
            memory,
            num_stages=num_stages,
            num_pipeline_ranks=num_pipeline_ranks,
            memory_limit=memory_limit,
            stage_ceiling=ceiling,
            effort=effort,
        )
        found.setdefault(cut.positions, cut)
    fitting = [cut for cut in found.values() if not cut.overflow] or list(found.values())
    if num_stages == num_pipeline_ranks or num_pipeline_ranks == 1:
        return Choice(fitting[0], 0, fitting[0], 0)
    chunks = num_stages // num_pipeline_ranks
    pipeline = Pipeline(times, schedule, num_pipeline_ranks, num_microbatches, chunks)
    steps = pipeline.of_cuts(np.array([cut.positions for cut in fitting])).tolist()
    lightest = min(range(len(fitting)), key=lambda i: (fitting[i].bottleneck, steps[i]))
    limit = None if fitting[0].overflow else memory_limit
    sequence = fold(times.costs, times.boundary_costs, memory, num_stages, num_pipeline_ranks)
    moved = [_move(cut, step, pipeline, sequence, limit) for cut, step in zip(fitting, steps, strict=True)]
    cut, step = min(moved, key=lambda found: (found[1], found[0].bottleneck))
    return Choice(cut, step, fitting[lightest], steps[lightest])


def _move(
    cut: Cut, step: int, pipeline: Pipeline, sequence: CostSequence, memory_limit: int | None
) -> tuple[Cut, int]:
    """Take the move that shortens the step most, again and again; the cut that is reached, and its step."""
    here = np.searchsorted(sequence.places, [0, *cut.positions, sequence.places[-1]])
    kept = undominated(sequence, here)
    places, here = sequence.take(kept), np.searchsorted(kept, here)
    before, stopped, turns = step, ", as far as its limit", WALKED // pipeline.num_actions
    if not turns:
        return replace(cut, method=f"{cut.method}, too long to move"), step
    for _ in range(turns):
        moves = _neighbours(places, here)
        steps = pipeline.of_cuts(places.places[moves[:, 1:-1]])
        for index in np.argsort(steps, kind="stable").tolist():
            if steps[index] >= step or memory_limit is None or places.fullest(moves[index]) <= memory_limit:
                break
        if steps[index] >= step:
            stopped = ""
            break
        here, step = moves[index], int(steps[index])
    if step == before:
        return cut, step
    positions, stages = tuple(places.places[here[1:-1]].tolist()), tuple(places.stage_costs(here).tolist())
    method = f"{cut.method}, then moved{stopped}"
    moved = replace(cut, positions=positions, stage_costs=stages, bottleneck=places.bottleneck(here))
    return replace(moved, method=method), step


def _neighbours(sequence: CostSequence, cut: Ints) -> Ints:
    """Cuts near `cut`: one of its positions moved, or one and the next, or one and all behind; every stage with
    work. The first is `cut` itself."""
    found = [cut]
    last = len(cut) - 2
    for first in range(1, last + 1):
        for end in sorted({first, min(first + 1, last), last}):
            for stride in (*STRIDES, *(-stride for stride in STRIDES)):
                moved = cut.copy()
                moved[first : end + 1] += stride
                if moved[first] > 0 and moved[end] < len(sequence.places) - 1:
                    found.append(moved)
    moves = np.array(found)
    valid: Ints = moves[(moves[:, :-1] < sequence.before[moves[:, 1:]]).all(1)]
    return valid
