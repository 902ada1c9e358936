"""The cut that the schedule chooses: its steps are those of the schedule walked, and no candidate's is shorter."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest

from autoptd.passes.cost.schedule_times import ActionTimes, live_microbatches, walk, walking_order
from autoptd.passes.stages.choice import SEARCHES, ItemTimes, Pipeline, choose_cut
from autoptd.passes.stages.cost_sequence import Memory
from autoptd.passes.stages.solver import Cut, cut_sequence
from autoptd.runtime.program.schedule import Kind, make_schedule


def make_times(layers: int, head: int, seed: int = 0) -> ItemTimes:
    """Layers of five operators, then a head; a cut is dear inside a layer, and none may stand before its last."""
    generator = random.Random(seed)
    forward: list[int] = []
    for _ in range(layers):
        forward += [generator.randrange(1, 5), *generator.choices((20, 40, 60), k=3), 1]
    forward += [head, head // 4]
    tolls = [2, 6, 6, 4, 5] * layers + [2, head]
    may_cut = [True, True, True, True, False] * layers + [True, True]
    parted = generator.choices((0, 0, 3), k=len(forward)), generator.choices((0, 0, 5), k=len(forward))
    return ItemTimes(forward, [2 * time for time in forward], tolls, tolls, may_cut, parted)


def choose(times: ItemTimes, p: int, v: int, m: int, schedule: str = "interleaved_1f1b") -> Cut:
    return choose_cut(Pipeline(times, schedule, p, m, v), None)


def walk_cut(times: ItemTimes, positions: tuple[int, ...], schedule: str, p: int, m: int, v: int) -> int:
    ends = (0, *positions, len(times.forward))
    spans = list(itertools.pairwise(ends))
    forward, backward = (
        [sum(own[a:b]) + sum(more[at] for at in (a, b) if at in positions) for a, b in spans]
        for own, more in zip((times.forward, times.backward), times.split_penalty, strict=True)
    )
    sent = {
        Kind.SEND_OUTPUT: [times.ahead[at] for at in positions],
        Kind.SEND_GRADIENT: [0, *(times.back[at] for at in positions)],
    }
    actions = ActionTimes({Kind.FORWARD: forward, Kind.BACKWARD: backward, **sent})
    order = walking_order(make_schedule(schedule, p, m, v))
    return int(max(end for _, action, _, end in walk(order, p, actions) if action.kind.computes))


@pytest.mark.parametrize(
    ("schedule", "p", "v", "m"),
    [("1f1b", 3, 1, 7), ("gpipe", 2, 2, 5), ("interleaved_1f1b", 2, 2, 8), ("interleaved_1f1b", 4, 3, 16)],
)
def test_steps_are_those_of_the_schedule(schedule: str, p: int, v: int, m: int) -> None:
    times = make_times(6, 100)
    generator = random.Random(1)
    places = [i for i in range(1, len(times.may_cut)) if times.may_cut[i]]
    cuts = [tuple(sorted(generator.sample(places, p * v - 1))) for _ in range(20)]
    steps = Pipeline(times, schedule, p, m, v).of_cuts(np.array(cuts)).tolist()
    assert steps == [walk_cut(times, cut, schedule, p, m, v) for cut in cuts]


@pytest.mark.parametrize("head", [40, 900])
@pytest.mark.parametrize("v", [1, 2])
def test_a_long_step_goes_on_as_its_middle(head: int, v: int) -> None:
    times, p, m = make_times(16, head), 4, 64
    cut = choose(times, p, v, m).positions
    (step,) = Pipeline(times, "interleaved_1f1b", p, m, v).of_cuts(np.array([cut])).tolist()
    assert step == pytest.approx(walk_cut(times, cut, "interleaved_1f1b", p, m, v), rel=0.02)


@pytest.mark.parametrize("head", [40, 300, 1500])
@pytest.mark.parametrize(("p", "v"), [(2, 2), (2, 3), (4, 2), (3, 3)])
def test_no_candidate_has_a_shorter_step(head: int, p: int, v: int) -> None:
    times, m = make_times(14, head), 4 * p
    choice = choose(times, p, v, m)
    for ceiling, effort in SEARCHES:
        options: Any = {"num_stages": p * v, "num_pipeline_ranks": p}
        cut = cut_sequence(times.costs, times.boundary_costs, stage_ceiling=ceiling, effort=effort, **options)
        assert choice.step <= walk_cut(times, cut.positions, "interleaved_1f1b", p, m, v)
    assert choice.step == walk_cut(times, choice.positions, "interleaved_1f1b", p, m, v)
    tolls = [times.boundary_costs[at] or 0 for at in choice.positions]
    ends = (0, *choice.positions, len(times.costs))
    stages = [sum(times.costs[a:b]) for a, b in itertools.pairwise(ends)]
    charged = [cost + before + behind for cost, before, behind in zip(stages, [0, *tolls], [*tolls, 0], strict=True)]
    assert list(choice.stage_costs) == charged
    assert choice.bottleneck == max(sum(charged[rank::p]) for rank in range(p)) >= choice.lower_bound


def test_few_items_are_cut_within_little_of_the_best() -> None:
    """Against every cut there is: eleven seeds of three layers on two ranks of two chunks."""
    excess = []
    for seed in range(11):
        times, m = make_times(3, 100, seed), 8
        places = [i for i in range(1, len(times.may_cut)) if times.may_cut[i]]
        every = [walk_cut(times, cut, "interleaved_1f1b", 2, m, 2) for cut in itertools.combinations(places, 3)]
        excess.append(choose(times, 2, 2, m).step / min(every) - 1)
    assert min(excess) >= 0
    assert max(excess) < 0.05
    assert sorted(excess)[5] < 0.01


def test_a_heavy_head_has_a_rank_of_small_stages_beside_it() -> None:
    times, p = make_times(16, 1200), 2
    even = cut_sequence(times.costs, times.boundary_costs, num_stages=4, num_pipeline_ranks=p, effort=0.0)
    choice = choose(times, p, 2, 16)
    assert choice.step < 0.95 * walk_cut(times, even.positions, "interleaved_1f1b", p, 16, 2)
    assert choice.stage_costs[1] < min(choice.stage_costs[::2])
    assert "chosen by its step" in choice.method


def test_one_chunk_a_rank_needs_no_steps() -> None:
    choice = choose(make_times(8, 300), 4, 1, 16)
    assert (choice.step, choice.method) == (0, "dynamic programme, exact")
    assert choice.bottleneck == choice.lower_bound


@pytest.mark.parametrize("slack", [0, 40])
def test_moves_stay_in_memory(slack: int) -> None:
    times, p, v, m = make_times(14, 300), 2, 2, 8
    moments = live_microbatches(make_schedule("interleaved_1f1b", p, m, v), p * v)

    def fullest(choice: Cut) -> int:
        ends = (0, *choice.positions, len(times.forward))
        items = [b - a for a, b in itertools.pairwise(ends)]
        held = [[n * (3 + alive) for n, alive in zip(items, row, strict=True)] for row in moments]
        return max(sum(row[rank::p]) for row in held for rank in range(p))

    free = fullest(choose(times, p, v, m))
    limit = free - 60 + slack
    memory = Memory([3] * len(times.forward), [1] * len(times.forward), moments, [0] * p, limit)
    bound = choose_cut(Pipeline(times, "interleaved_1f1b", p, m, v), memory)
    assert bound.fits
    assert fullest(bound) <= limit < free


@pytest.mark.parametrize("v", [1, 2])
def test_where_no_candidate_fits_the_cut_says_so(v: int) -> None:
    """Two ranks hold 3 bytes of each item and 1 for each microbatch in flight: more than 10 in any cut."""
    times, p, m = make_times(8, 300), 2, 8
    moments = live_microbatches(make_schedule("interleaved_1f1b", p, m, v), p * v)
    memory = Memory([3] * len(times.forward), [1] * len(times.forward), moments, [0] * p, 10)
    assert choose(times, p, v, m).fits
    assert not choose_cut(Pipeline(times, "interleaved_1f1b", p, m, v), memory).fits


def test_without_a_search_stages_are_even() -> None:
    times, p = make_times(16, 1200), 2
    even = cut_sequence(times.costs, times.boundary_costs, num_stages=4, num_pipeline_ranks=p, effort=0.0)
    pipeline = Pipeline(times, "interleaved_1f1b", p, 16, 2)
    assert choose_cut(pipeline, search=False) == even != choose_cut(pipeline)
