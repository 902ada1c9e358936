"""Cuts of plain sequences: against brute force, within memory, reproducible, quick at a hundred stages."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autoptd.passes.stages.cost_sequence import Memory
from autoptd.passes.stages.solver import Cut, cut_sequence

Tolls = list[int | None]


def stage_costs(costs: list[int], tolls: Tolls, positions: tuple[int, ...]) -> list[int]:
    ends = (0, *positions, len(costs))
    charged = [0, *(tolls[i] or 0 for i in positions), 0]
    return [sum(costs[a:b]) + charged[k] + charged[k + 1] for k, (a, b) in enumerate(itertools.pairwise(ends))]


def rank_sums(per_stage: list[int], ranks: int) -> list[int]:
    return [sum(per_stage[rank::ranks]) for rank in range(ranks)]


def stage_bytes(memory: Memory, positions: tuple[int, ...]) -> list[int]:
    ends = (0, *positions, len(memory.static))
    (in_flight,) = memory.in_flight
    reserved = [*memory.reserved, *[0] * len(positions)]
    return [
        sum(memory.static[a:b]) + sum(memory.activation[a:b]) * in_flight[k] + reserved[k]
        for k, (a, b) in enumerate(itertools.pairwise(ends))
    ]


def all_cuts(costs: list[int], tolls: Tolls, stages: int) -> Iterator[tuple[int, ...]]:
    allowed = [i for i in range(1, len(costs)) if tolls[i] is not None]
    for positions in itertools.combinations(allowed, stages - 1):
        ends = (0, *positions, len(costs))
        if all(sum(costs[a:b]) > 0 for a, b in itertools.pairwise(ends)):
            yield positions


@st.composite
def sequences(draw: st.DrawFn, longest: int = 11) -> tuple[list[int], Tolls]:
    costs = draw(st.lists(st.sampled_from([1, 0, 1, 2, 3, 5, 8, 30]), min_size=longest - 4, max_size=longest))
    tolls = st.sampled_from([0, 1, 2, 2, 4, 6, 9, None])
    return costs, draw(st.lists(tolls, min_size=len(costs), max_size=len(costs)))


@given(sequences(), st.integers(1, 5))
@settings(max_examples=300, deadline=None)
def test_one_chunk_a_rank_is_exact(sequence: tuple[list[int], Tolls], stages: int) -> None:
    costs, tolls = sequence
    best = min((max(stage_costs(costs, tolls, c)) for c in all_cuts(costs, tolls, stages)), default=None)
    assume(best is not None)
    cut = cut_sequence(costs, tolls, num_stages=stages, num_pipeline_ranks=stages)
    assert cut.bottleneck == best == cut.lower_bound
    assert list(cut.stage_costs) == stage_costs(costs, tolls, cut.positions)
    assert cut.method == "dynamic programme, exact"


@given(sequences(), st.sampled_from([(1, 2), (2, 2), (2, 3), (3, 2)]))
@settings(max_examples=100, deadline=None)
def test_several_chunks_a_rank_of_a_short_sequence_are_optimal(
    sequence: tuple[list[int], Tolls], shape: tuple[int, int]
) -> None:
    costs, tolls = sequence
    ranks, chunks = shape
    cuts = list(all_cuts(costs, tolls, ranks * chunks))
    assume(cuts)
    best = min(max(rank_sums(stage_costs(costs, tolls, c), ranks)) for c in cuts)
    cut = cut_sequence(costs, tolls, num_stages=ranks * chunks, num_pipeline_ranks=ranks, stage_ceiling=None)
    assert cut.bottleneck == max(rank_sums(stage_costs(costs, tolls, cut.positions), ranks))
    assert cut.lower_bound <= best == cut.bottleneck
    assert cut.method == "CP-SAT" or cut.bottleneck == cut.lower_bound


@given(sequences(), st.sampled_from([(2, 2), (2, 3), (3, 2)]))
@settings(max_examples=60, deadline=None)
def test_no_stage_is_above_the_ceiling(sequence: tuple[list[int], Tolls], shape: tuple[int, int]) -> None:
    costs, tolls = sequence
    ranks, chunks = shape
    cuts = list(all_cuts(costs, tolls, ranks * chunks))
    assume(cuts)
    least = min(max(stage_costs(costs, tolls, c)) for c in cuts)
    level = [c for c in cuts if max(stage_costs(costs, tolls, c)) == least]
    best = min(max(rank_sums(stage_costs(costs, tolls, c), ranks)) for c in level)
    cut = cut_sequence(costs, tolls, num_stages=ranks * chunks, num_pipeline_ranks=ranks)
    assert max(cut.stage_costs) == least
    assert cut.bottleneck == best
    assert cut.lower_bound <= best


@given(sequences(9), st.integers(2, 4), st.data())
@settings(max_examples=200, deadline=None)
def test_memory_is_a_hard_limit(sequence: tuple[list[int], Tolls], stages: int, data: st.DataObject) -> None:
    costs, tolls = sequence
    cuts = list(all_cuts(costs, tolls, stages))
    assume(cuts)
    sizes = st.lists(st.integers(0, 9), min_size=len(costs), max_size=len(costs))
    reserved = data.draw(st.lists(st.integers(0, 20), min_size=stages, max_size=stages))
    limit = data.draw(st.integers(1, 200))
    memory = Memory(data.draw(sizes), data.draw(sizes), [range(stages, 0, -1)], reserved, limit)
    fitting = [c for c in cuts if max(stage_bytes(memory, c)) <= limit]

    def solve() -> Cut:
        return cut_sequence(costs, tolls, memory, num_stages=stages, num_pipeline_ranks=stages)

    cut = solve()
    assert cut.fits == bool(fitting)
    if not fitting:
        unlimited = cut_sequence(costs, tolls, num_stages=stages, num_pipeline_ranks=stages)
        assert cut.positions == unlimited.positions
        return
    assert max(stage_bytes(memory, cut.positions)) <= limit
    assert cut.bottleneck == min(max(stage_costs(costs, tolls, c)) for c in fitting)


def test_chunks_of_a_rank_share_its_memory() -> None:
    costs = [10] * 12
    memory = Memory([1, 1, 1, 9, 9, 9, 1, 1, 1, 1, 1, 1], [0] * 12, [[1] * 4], [0] * 2, 20)
    cut = cut_sequence(costs, [0] * 12, memory, num_stages=4, num_pipeline_ranks=2, stage_ceiling=None)
    assert max(rank_sums(stage_bytes(memory, cut.positions), 2)) <= 20


@given(sequences(9), st.data())
@settings(max_examples=60, deadline=None)
def test_memory_of_chunks_is_never_exceeded(sequence: tuple[list[int], Tolls], data: st.DataObject) -> None:
    costs, tolls = sequence
    cuts = list(all_cuts(costs, tolls, 4))
    assume(cuts)
    sizes = st.lists(st.integers(0, 9), min_size=len(costs), max_size=len(costs))
    reserved = data.draw(st.lists(st.integers(0, 20), min_size=2, max_size=2))
    limit = data.draw(st.integers(10, 100))
    memory = Memory(data.draw(sizes), data.draw(sizes), [[4, 3, 2, 1]], reserved, limit)
    fitting = [c for c in cuts if max(rank_sums(stage_bytes(memory, c), 2)) <= limit]
    cut = cut_sequence(costs, tolls, memory, num_stages=4, num_pipeline_ranks=2, stage_ceiling=None)
    assert cut.fits == bool(fitting)
    held = rank_sums(stage_bytes(memory, cut.positions), 2)
    assert [own + more for own, more in zip(memory.count(cut.positions), reserved, strict=True)] == held
    if not fitting:
        return
    assert max(held) <= limit
    assert cut.bottleneck == min(max(rank_sums(stage_costs(costs, tolls, c), 2)) for c in fitting)


def test_equal_bottlenecks_go_to_even_stages_and_narrow_cuts() -> None:
    # The item of 100 decides; the rest is cut in the middle, where it is narrow.
    cut = cut_sequence([*[10] * 8, 100], [1] * 9, num_stages=3, num_pipeline_ranks=3)
    assert cut.positions == (4, 8)
    cut = cut_sequence([*[10] * 8, 100], [9, 9, 9, 1, 9, 9, 9, 9, 1], num_stages=3, num_pipeline_ranks=3)
    assert cut.positions == (3, 8)


def test_the_cheapest_of_equal_places_is_taken() -> None:
    costs = [10, 0, 0, 0, 10]
    assert cut_sequence(costs, [0, 5, 2, 2, 4], num_stages=2, num_pipeline_ranks=2).positions == (2,)


def test_too_few_units() -> None:
    with pytest.raises(ValueError, match=r"cannot be cut into 6 stages: it has 3 cuttable units; .* at most 3"):
        cut_sequence([5, 5, 0, 5, 5], [0, 0, 0, 0, None], num_stages=6, num_pipeline_ranks=3)


def test_without_time_the_dynamic_programme_stands_and_says_so() -> None:
    costs, tolls = transformer(24)
    cut = cut_sequence(costs, tolls, num_stages=12, num_pipeline_ranks=4, effort=0.0)
    assert cut.method == "dynamic programme"
    brief = cut_sequence(costs, tolls, num_stages=12, num_pipeline_ranks=4, effort=1e-9)
    assert brief.method == "dynamic programme; CP-SAT found nothing within its limit"
    assert brief.positions == cut.positions
    assert cut.bottleneck >= cut.lower_bound
    better = cut_sequence(costs, tolls, num_stages=12, num_pipeline_ranks=4)
    assert better.method == "CP-SAT in a window"
    assert better.bottleneck <= cut.bottleneck


def transformer(layers: int) -> tuple[list[int], Tolls]:
    """About a GPT of hidden size 12288 at t = 8, in microseconds: small operators between the GEMMs."""
    layer = [90, 150, 0, 5400, 0, 0, 800, 0, 1800, None, 160, 0, 120, 90, 150, 7200, 60, 30, 30, 7200, None, 160, 120]
    wide = dict.fromkeys(range(3, 7), 700) | dict.fromkeys(range(7, 10), 400) | dict.fromkeys(range(16, 21), 800)
    costs: list[int] = [400, 160]
    tolls: Tolls = [None, None]
    for _ in range(layers):
        costs += [150 if c is None else c for c in layer]
        tolls += [None if layer[i - 1] is None else wide.get(i, 260) for i in range(len(layer))]
    return [*costs, 90, 4800, 300], [*tolls, 260, 260, None]


@pytest.mark.parametrize(("layers", "ranks", "chunks"), [(128, 64, 1), (128, 64, 2), (96, 12, 4), (300, 64, 2)])
def test_many_stages_are_cut_well(layers: int, ranks: int, chunks: int) -> None:
    costs, tolls = transformer(layers)
    assert cut_sequence(costs, tolls, num_stages=ranks * chunks, num_pipeline_ranks=ranks).gap < 0.1


def test_every_process_makes_the_same_cut() -> None:
    code = (
        "from tests.passes.stages.test_solver import transformer\n"
        "from autoptd.passes.stages.solver import cut_sequence\n"
        "print(cut_sequence(*transformer(24), num_stages=12, num_pipeline_ranks=4))"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PATH": ""},
            capture_output=True,
            text=True,
            check=True,
        )
        for seed in ("1", "2")
    ]
    assert runs[0].stdout == runs[1].stdout != ""
