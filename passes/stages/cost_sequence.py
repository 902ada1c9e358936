"""A sequence of costs folded to the places where a cut may stand, and the exact moves of cuts along it.

A cut is an array of place numbers, one more than there are stages: stage k runs from ``cut[k]`` to ``cut[k
+ 1]``. All moves are dynamic programmes in fixed order, so that every rank of a job computes the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Prices = Sequence[int | None]  # of a cut before each item; None forbids it

UNREACHED = -(2**61)
UNLIMITED = 2**61


@dataclass(frozen=True)
class Memory:
    """Bytes that items add to their rank: `static` once, `activation` for every microbatch in flight.

    Both have one entry per item. `in_flight` has a row for each moment when a rank may hold most: the microbatches that
    each stage holds then. `reserved` is what each pipeline rank holds whatever its stages are, `limit` the most it may.
    """

    static: Sequence[int]
    activation: Sequence[int]
    in_flight: Sequence[Sequence[int]]
    reserved: Sequence[int]
    limit: int

    def count(self, positions: Sequence[int]) -> list[int]:
        """Return the most bytes that items add to each rank, in stages that begin at 0 and `positions`."""
        static, activation = (np.add.reduceat(row, [0, *positions]) for row in (self.static, self.activation))
        held = static + np.asarray(self.in_flight) * activation
        return [int(most) for most in held.reshape(len(held), -1, len(self.reserved)).sum(1).max(0)]


@dataclass(frozen=True)
class CostSequence:
    """The places of a sequence, both ends included, as arrays over them.

    A stage from place a to place b costs ``end[b] - start[a]``, transfers at its two cuts included, and has
    work in it if ``a < before[b]``. `places` are positions in the caller's sequence; `static` and
    `activation` are the bytes of all items before a place. `in_flight` is [moments, stages]; `reserved` [stages] are
    further bytes of a rank, with its first stage. `limit` is `UNLIMITED` where memory is not limited.
    """

    places: Ints
    start: Ints
    end: Ints
    before: Ints
    static: Ints
    activation: Ints
    in_flight: Ints
    reserved: Ints
    limit: int
    num_ranks: int

    @property
    def num_stages(self) -> int:
        return int(self.in_flight.shape[1])

    @property
    def units(self) -> int:
        """Return the most stages that the sequence can be cut into."""
        return len(np.unique(self.start + self.end)) - 1

    def stage_costs(self, cut: Ints) -> Ints:
        return self.end[cut[1:]] - self.start[cut[:-1]]

    def stage_bytes(self, cut: Ints) -> Ints:
        """Return the bytes of every stage, at every moment."""
        return np.diff(self.static[cut]) + self.in_flight * np.diff(self.activation[cut]) + self.reserved

    def held(self, microbatches: int) -> Ints:
        """Return the bytes of the items before each place, in one stage with so many microbatches in flight."""
        return self.static + self.activation * microbatches

    def rank_sums(self, per_stage: Ints) -> Ints:
        """Sum over each pipeline rank's chunks, along the last dimension: stage k is on rank k mod p."""
        sums: Ints = per_stage.reshape(*per_stage.shape[:-1], -1, self.num_ranks).sum(-2)
        return sums

    def sums_of_ranks(self, per_stage: Ints) -> Ints:
        """Return for each stage the sum of all stages of its rank."""
        return np.tile(self.rank_sums(per_stage), self.num_stages // self.num_ranks)

    def bottleneck(self, cut: Ints) -> int:
        """Return the cost of the slowest pipeline rank."""
        return int(self.rank_sums(self.stage_costs(cut)).max())

    def peaks(self, cut: Ints) -> list[int]:
        """Return the peak bytes of each pipeline rank."""
        return [int(peak) for peak in self.rank_sums(self.stage_bytes(cut)).max(0)]

    def fits(self, cut: Ints) -> bool:
        return max(self.peaks(cut)) <= self.limit

    def take(self, kept: Ints) -> CostSequence:
        """Return the same sequence with the places of numbers `kept` only (ascending)."""
        work = (self.start + self.end)[kept]
        names = ("places", "start", "end", "static", "activation")
        rows = {name: getattr(self, name)[kept] for name in names}
        return replace(self, **rows, before=np.searchsorted(work, work, "left"))


def fold(
    costs: Sequence[int], boundary_costs: Prices, memory: Memory | None, num_stages: int, num_ranks: int
) -> CostSequence:
    """Keep one place in each run of items that cost and hold nothing: the cheapest, the first of equals."""
    none = [0] * len(costs)
    known = memory or Memory(none, none, [[0] * num_stages], [0] * num_ranks, UNLIMITED)
    rows = (np.asarray(row, np.int64) for row in (costs, known.static, known.activation))
    work, static, activation = (np.pad(row.cumsum(), (1, 0)) for row in rows)
    reserved = np.pad(np.asarray(known.reserved, np.int64), (0, num_stages - num_ranks))
    prices = np.array([UNLIMITED if cost is None else cost for cost in boundary_costs], np.int64)
    inside = np.flatnonzero((prices < UNLIMITED) & (work[:-1] > 0) & (work[:-1] < work[-1]))
    alike = [row[inside][1:] == row[inside][:-1] for row in (work, static, activation)]  # none ever falls
    run = np.concatenate([[0], np.cumsum(~np.all(alike, axis=0))])[: len(inside)]
    order = np.lexsort((prices[inside], run))
    cheapest = inside[order[np.unique(run[order], return_index=True)[1]]]
    places = np.concatenate([[0], cheapest, [len(costs)]])
    added = np.concatenate([[0], prices[cheapest], [0]])
    work = work[places]
    before = np.searchsorted(work, work, "left")
    held = static[places], activation[places], np.asarray(known.in_flight, np.int64), reserved
    return CostSequence(places, work - added, work + added, before, *held, known.limit, num_ranks)


def undominated(sequence: CostSequence, kept: Ints) -> Ints:
    """Return the numbers of the places that no other beats on both sides, and those in `kept`.

    A place is beaten when a stage may end at another at no more cost, and the next start there at no more.
    In a GPT this leaves the narrow places of a layer, about five of twenty.
    """
    best = UNREACHED
    keep = np.zeros(len(sequence.places), bool)
    for place in np.lexsort((-sequence.start, sequence.end)).tolist():
        keep[place] = int(sequence.start[place]) > best
        best = max(best, int(sequence.start[place]))
    keep[[0, -1]] = True
    keep[kept] = True
    return np.flatnonzero(keep)


def place_cuts(sequence: CostSequence, limit: int, room: int | Ints = UNLIMITED) -> Ints | None:
    """Return a cut whose stages each cost at most `limit` and hold at most their `room`; None if there is none.

    Walks the stages and keeps every place where the next may start: a stage can end at e if some reached place a before
    it has ``start[a] >= end[e] - limit``. Then walks back by places that leave even shares before, and send little.
    """
    rooms = np.broadcast_to(room, sequence.num_stages)
    start, end, before = sequence.start, sequence.end, sequence.before
    layers = [np.where(np.arange(len(start)) == 0, start, UNREACHED)]
    floors = []
    for stage in range(sequence.num_stages):
        held = sequence.held(int(sequence.in_flight[:, stage].max()))
        floor = np.minimum(np.searchsorted(held, held - rooms[stage], "left"), before)
        best = _range_max(layers[-1], floor, before)
        layers.append(np.where((best > UNREACHED) & (end - limit <= best), start, UNREACHED))
        floors.append(floor)
        if layers[-1].max() == UNREACHED:
            return None
    if layers[-1][-1] == UNREACHED:
        return None
    cut = np.zeros(sequence.num_stages + 1, np.int64)
    cut[-1] = here = len(start) - 1
    work = (start + end) // 2
    for stage in range(sequence.num_stages - 1, 0, -1):
        floor, least = floors[stage][here], max(int(end[here]) - limit, UNREACHED + 1)
        usable = floor + np.flatnonzero(layers[stage][floor : before[here]] >= least)
        far = np.abs(work[usable] - int(work[here]) * stage // (stage + 1)) + (end - start)[usable]
        cut[stage] = here = int(usable[far.argmin()])
    return cut


def minimize_slowest_stage(sequence: CostSequence, room: int | Ints = UNLIMITED) -> Ints | None:
    """Return the cut whose slowest stage costs least, by bisection; None if no cut keeps every stage's `room`."""
    found = place_cuts(sequence, UNLIMITED, room)
    if found is None:
        return None
    low, high = -(-int(sequence.end[-1]) // sequence.num_stages), int(sequence.stage_costs(found).max())
    ends = np.sort(sequence.end)
    while low < high:
        middle = (low + high) // 2
        better = place_cuts(sequence, middle, room)
        if better is None:
            # Up to the next cost that a stage may have, the same stages keep the limit: none is a cut either.
            following = np.searchsorted(ends, sequence.start + middle, "right")
            inside = following < len(ends)
            low = int((ends[following[inside]] - sequence.start[inside]).min())
        else:
            found, high = better, int(sequence.stage_costs(better).max())
    return found


def _range_max(values: Ints, low: Ints, high: Ints) -> Ints:
    """Return the largest of ``values[low[i]:high[i]]`` for each i, or UNREACHED where there is none."""
    if not low.any():
        return np.where(high > 0, np.maximum.accumulate(values)[high - 1], UNREACHED)
    return np.where(low < high, np.maximum.reduceat(values, np.stack([low, high], -1).ravel())[::2], UNREACHED)
