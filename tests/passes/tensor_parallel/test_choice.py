"""The choice of axes to divide, compared with brute force."""

from __future__ import annotations

import random
from itertools import combinations

import networkx as nx
import pytest

from autoptd.passes.operators.axes import Axis
from autoptd.passes.tensor_parallel.choice import solve


@pytest.mark.parametrize("density", [0.2, 0.5, 0.9])
def test_the_choice_is_the_best_of_all_that_do_not_exclude_one_another(density: float) -> None:
    draw = random.Random(round(10 * density))
    for _ in range(200):
        count = draw.randint(1, 8)
        weights = [draw.randint(1, 4) for _ in range(count)]  # few numbers: many ties
        pairs = {pair for pair in combinations(range(count), 2) if draw.random() < density}
        rivals, leaves = nx.Graph(), [Axis(1) for _ in range(count)]
        rivals.add_nodes_from(leaves)
        rivals.add_edges_from((leaves[i], leaves[j]) for i, j in pairs)
        allowed = [
            taken
            for size in range(count + 1)
            for taken in combinations(range(count), size)
            if pairs.isdisjoint(combinations(taken, 2))
        ]

        def value(taken: tuple[int, ...]) -> int:
            return sum(weights[i] for i in taken)  # noqa: B023

        best = max(map(value, allowed))
        wanted = min(taken for taken in allowed if value(taken) == best)
        assert solve(rivals, dict(zip(leaves, weights, strict=True))) == [leaves[i] for i in wanted]


def test_a_chain_of_many_leaves_is_solved_at_once() -> None:
    leaves = [Axis(1) for _ in range(400)]
    assert solve(nx.path_graph(leaves), dict.fromkeys(leaves, 1)) == leaves[::2]
