"""The choice of axes to divide, compared with brute force."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from autoptd.passes.tensor_parallel.choice import _solve


@pytest.mark.parametrize("density", [0.2, 0.5, 0.9])
def test_the_choice_is_the_best_of_all_that_do_not_exclude_one_another(density: float) -> None:
    draw = random.Random(round(10 * density))
    for _ in range(200):
        count = draw.randint(1, 8)
        weights = [(draw.randint(1, 4), draw.randint(0, 3)) for _ in range(count)]  # few numbers: many ties
        pairs = {pair for pair in combinations(range(count), 2) if draw.random() < density}
        rivals = [frozenset(j for p in pairs if i in p for j in p if j != i) for i in range(count)]
        allowed = [
            taken
            for size in range(count + 1)
            for taken in combinations(range(count), size)
            if pairs.isdisjoint(combinations(taken, 2))
        ]

        def value(taken: tuple[int, ...]) -> tuple[int, int]:
            return sum(weights[i][0] for i in taken), -sum(weights[i][1] for i in taken)  # noqa: B023

        best = max(map(value, allowed))
        assert _solve(weights, rivals) == min(taken for taken in allowed if value(taken) == best)


def test_a_chain_of_many_leaves_is_solved_at_once() -> None:
    count = 400
    rivals = [frozenset({i - 1, i + 1} & set(range(count))) for i in range(count)]
    assert _solve([(1, 0)] * count, rivals) == tuple(range(0, count, 2))
