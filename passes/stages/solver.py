"""Cut a sequence of costs into contiguous stages so that the slowest pipeline rank is as fast as can be.

Stage k is on pipeline rank k mod p; a rank's load is the sum of its v chunks (SC21 §2.2), and a cut costs its transfer
time to both neighbours. For v = 1 a dynamic programme is exact. For v > 1 CP-SAT improves its cut in a window round it.
Fixed seed, one worker and a deterministic time limit: ranks that compile for themselves get the same cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from ortools.sat.python import cp_model

from autoptd.passes.stages import cost_sequence
from autoptd.passes.stages.cost_sequence import UNLIMITED, CostSequence, Ints, Memory

WINDOW = 4  # places worth a cut to either side of the hint: most of a transformer layer
WHOLE = 400  # stages x places up to which the window is the whole sequence
ROUNDS = 3  # windows, each round the last one's result
PRECISION = 24  # bits of the costs and bytes that the solver sees


@dataclass(frozen=True)
class Cut:
    """Stage k is items ``positions[k - 1]`` to ``positions[k]``; costs are of one microbatch, with transfers.

    `bottleneck` is the slowest pipeline rank's cost. `lower_bound` holds for every contiguous cut (of those that fit,
    where memory is limited), also outside the window and above the ceiling of the search. `fits` is False where no cut
    was found to fit. A step with this cut takes `step` nanoseconds; 0 where none was simulated.
    """

    positions: tuple[int, ...]
    stage_costs: tuple[int, ...]
    bottleneck: int
    lower_bound: int
    method: str
    fits: bool = True
    step: int = 0

    @classmethod
    def of(cls, sequence: CostSequence, cut: Ints, lower_bound: int, method: str) -> Cut:
        positions, costs = sequence.places[cut[1:-1]].tolist(), sequence.stage_costs(cut).tolist()
        numbers = sequence.bottleneck(cut), lower_bound, method, sequence.fits(cut)
        return cls(tuple(positions), tuple(costs), *numbers)

    @property
    def gap(self) -> float:
        """Return how far the slowest rank is above the lower bound, as a fraction of it."""
        return self.bottleneck / self.lower_bound - 1


def cut_sequence(
    costs: Sequence[int],
    boundary_costs: Sequence[int | None],
    memory: Memory | None = None,
    *,
    num_stages: int,
    num_pipeline_ranks: int,
    stage_ceiling: float | None = 1.0,
    effort: float = 0.4,
) -> Cut:
    """Find the cut into `num_stages` whose slowest pipeline rank costs least.

    `costs` are integers, one per item, their sum below 2**60; `boundary_costs` what a cut before item i adds to the
    stage on either side, None forbids it. If no cut is found to fit in `memory`, the result says so. For v > 1 no
    stage costs more than `stage_ceiling` times the least possible slowest one; None: any stages, but ranks balanced out
    of uneven chunks may wait for each other (see `choose_cut`). `effort` are the deterministic seconds of each CP-SAT
    round; 0: the dynamic programme alone.

    Every stage gets an item of positive cost. Raises ValueError if the sequence has fewer units than stages.
    """
    sequence = cost_sequence.fold(costs, boundary_costs, memory, num_stages, num_pipeline_ranks)
    if sequence.units < num_stages:
        raise ValueError(
            f"the graph cannot be cut into {num_stages} stages: it has {sequence.units} cuttable units; "
            f"choose pipeline ranks x model chunks of at most {sequence.units}"
        )
    start = _first_cut(sequence, lean=effort > 0)
    slowest = int(sequence.stage_costs(start).max())
    bound = _lower_bound(sequence, slowest if memory is None else 0)
    if num_stages == num_pipeline_ranks:
        cut, bound, method = start, slowest, "dynamic programme, exact"
    elif sequence.bottleneck(start) == bound and sequence.fits(start):
        cut, method = start, "dynamic programme, equal to the lower bound"
    elif not effort:
        cut, method = start, "dynamic programme"
    else:
        ceiling = UNLIMITED if stage_ceiling is None else int(slowest * stage_ceiling)
        cut, method = _improve(sequence, start, ceiling, bound, effort)
    return Cut.of(sequence, cut, bound, method)


def _first_cut(sequence: CostSequence, *, lean: bool) -> Ints:
    """Return the cut with the least slowest *stage* that fits, or any where none is found to.

    For v > 1 a rank's memory is divided over its stages in two ways: evenly, and as the fastest cut fills it. If
    neither fits, the cut is one with little memory if it is to be `lean`, for a search that begins there.
    """
    fastest = cost_sequence.minimize_slowest_stage(sequence)
    assert fastest is not None, "there are as many units as stages"
    if sequence.fits(fastest):
        return fastest
    shares = [np.ones(sequence.num_stages, np.int64), sequence.stage_bytes(fastest).max(0) + 1]
    single = sequence.num_stages == sequence.num_ranks  # one chunk has all of its rank's
    for share in shares[: 1 if single else 2]:
        room = _divide_room(sequence, share, sequence.limit)
        fitting = cost_sequence.minimize_slowest_stage(sequence, room)
        if fitting is not None:
            return fitting
    if single or not lean:
        return fastest
    least = [_least_memory(sequence, fastest, share, sequence.limit) for share in shares]
    return min(least, key=lambda cut: max(sequence.peaks(cut)))


def _divide_room(sequence: CostSequence, share: Ints, limit: int) -> Ints:
    """Return each stage's part of its rank's memory, in proportion to its `share`."""
    left, whole = limit - sequence.sums_of_ranks(sequence.reserved), sequence.sums_of_ranks(share)
    rows = zip(left.tolist(), share.tolist(), whole.tolist(), strict=True)
    return np.array([most * part // rank for most, part, rank in rows])


def _least_memory(sequence: CostSequence, fastest: Ints, share: Ints, low: int) -> Ints:
    """Return the cut whose fullest rank holds the fewest bytes, above `low` and to a thousandth, divided as `share`."""
    best, high = fastest, max(sequence.peaks(fastest))
    while high - low > high >> 10:
        middle = (low + high) // 2
        cut = cost_sequence.place_cuts(sequence, UNLIMITED, _divide_room(sequence, share, middle))
        if cut is None:
            low = middle + 1
        else:
            best, high = cut, middle
    return best


def _lower_bound(sequence: CostSequence, slowest_stage: int) -> int:
    """Return a bound for any cut: the even share of work and the cheapest transfers, or the slowest stage's rank.

    `slowest_stage` is the least possible, or 0 where that is not known.
    """
    transfers = int(np.sort((sequence.end - sequence.start)[1:-1])[: sequence.num_stages - 1].sum())
    share = -(-(int(sequence.end[-1]) + transfers) // sequence.num_ranks)
    work = np.unique(sequence.start + sequence.end) // 2
    chunks = sequence.num_stages // sequence.num_ranks
    return max(share, slowest_stage + (chunks - 1) * int(np.diff(work).min()))


def _improve(sequence: CostSequence, start: Ints, ceiling: int, bound: int, effort: float) -> tuple[Ints, str]:
    """Improve a cut for several chunks a rank; return it and the method."""
    whole = sequence.num_stages * len(sequence.places) <= WHOLE
    kept = np.arange(len(sequence.places)) if whole else cost_sequence.undominated(sequence, start)
    places, cut, method = sequence.take(kept), np.searchsorted(kept, start), ""
    window = len(kept) if whole else WINDOW
    for _ in range(1 if whole else ROUNDS):
        fits = places.fits(cut)
        found = _Search(places, cut, window, ceiling if fits else UNLIMITED, bound).solve(effort)
        if found is None:
            return kept[cut], method or "dynamic programme; CP-SAT found nothing within its limit"
        method = "CP-SAT" if whole else "CP-SAT in a window"
        gain = places.bottleneck(cut) - places.bottleneck(found)
        if fits and gain <= 0:
            break
        cut = found
        if fits and gain * 1000 < bound:
            break
    return kept[cut], method


class _Search:
    """The CP-SAT model of all cuts within `window` places of `hint`, no stage above `ceiling`.

    Where each cut stands is a variable; the costs there are elements of the prefix sums; the slowest rank is
    the objective. Costs are rounded to `PRECISION` bits, upwards.
    """

    def __init__(self, sequence: CostSequence, hint: Ints, window: int, ceiling: int, bound: int) -> None:
        self.sequence, self.hint = sequence, hint
        self.model = cp_model.CpModel()
        last = len(sequence.places) - 1
        self.low = np.maximum(hint - window, 1)
        self.high = np.minimum(hint + window, last - 1)
        self.low[[0, -1]] = self.high[[0, -1]] = 0, last
        bounds = zip(self.low.tolist(), self.high.tolist(), strict=True)
        self.index = [self.model.new_int_var(low, high, "") for low, high in bounds]
        for variable, place in zip(self.index, hint.tolist(), strict=True):
            self.model.add_hint(variable, place)
        shift = max(0, int(sequence.end.max()).bit_length() - PRECISION)
        start, end = sequence.start >> shift, -(-sequence.end >> shift)
        model, stages, ranks = self.model, sequence.num_stages, sequence.num_ranks
        hinted = end[hint[1:]] - start[hint[:-1]]
        # The hint stays a solution, whatever rounding did.
        ceiling = max(-(-ceiling >> shift), int(hinted.max()))
        cost = [self._at(end, k + 1) - self._at(start, k) for k in range(stages)]
        for k in range(stages):
            model.add(cost[k] <= min(ceiling, int(end[-1] - start[0]) + 2 * int((end - start).max())))
            if sequence.before[self.low[k + 1]] <= self.high[k]:
                model.add(self.index[k] < self._at(sequence.before, k + 1))
        slowest = int(sequence.rank_sums(hinted).max())
        bottleneck = model.new_int_var(min(bound >> shift, slowest), UNLIMITED >> PRECISION, "")
        model.add_hint(bottleneck, slowest)
        for rank in range(ranks):
            model.add(sum(cost[rank::ranks]) <= bottleneck)
        model.minimize(bottleneck)
        if sequence.limit < UNLIMITED:
            self._limit_memory(sequence.limit)

    def _limit_memory(self, limit: int) -> None:
        """Hold each rank's stages within `limit` bytes at every moment, less what rounding may hide."""
        sequence = self.sequence
        shift = max(0, limit.bit_length() - PRECISION)
        hidden = sequence.num_stages // sequence.num_ranks if shift else 0
        held = {}
        for k, n in sorted({(k, n) for row in sequence.in_flight.tolist() for k, n in enumerate(row)}):
            bytes_before = sequence.held(n) >> shift
            held[k, n] = self._at(bytes_before, k + 1) - self._at(bytes_before, k)
        for row in sequence.in_flight.tolist():
            for rank in range(sequence.num_ranks):
                total = sum(held[k, row[k]] for k in range(rank, sequence.num_stages, sequence.num_ranks))
                self.model.add(total <= (limit - int(sequence.reserved[rank]) >> shift) - hidden)

    def _at(self, prefix: Ints, cut: int) -> cp_model.IntVar:
        low = int(self.low[cut])
        values = prefix[low : self.high[cut] + 1].tolist()
        value = self.model.new_int_var(min(values), max(values), "")
        self.model.add_element(self.index[cut] - low, values, value)
        self.model.add_hint(value, values[int(self.hint[cut]) - low])
        return value

    def solve(self, effort: float) -> Ints | None:
        """Return the best cut found in `effort` deterministic seconds."""
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = 0
        solver.parameters.max_deterministic_time = effort
        # No linear relaxation, quick restarts: found the best cuts soonest on models of 24 to 256 layers.
        solver.parameters.linearization_level = 0
        solver.parameters.search_branching = cp_model.PORTFOLIO_WITH_QUICK_RESTART_SEARCH
        status = solver.solve(self.model)
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None
        return np.array([solver.value(variable) for variable in self.index], np.int64)
