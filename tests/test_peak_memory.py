"""The simulated peak of a rank's memory is that of the tensors which live in a real step."""

from __future__ import annotations

import pytest
import torch

import autoptd
from samples.benchmarks.peak_memory import Case, Sizes, find_peak, measure_peak
from tests.ranks import run_ranks

SIZES = Sizes(hidden=128, layers=8, heads=4, length=128, vocabulary=1024, b=2)


@pytest.mark.parametrize("recompute", ["none", pytest.param("full", marks=pytest.mark.slow)])
def test_a_step_holds_what_is_predicted(recompute: str) -> None:
    case = Case((1, 2, 1), recompute=recompute)
    program = case.compile(SIZES)

    def work(rank: int) -> int:
        torch.manual_seed(0)
        return measure_peak(program, SIZES).live

    predicted = program.simulate(autoptd.Cluster.load("laptop-cpu")).memory_bytes
    assert predicted == pytest.approx(run_ranks(work, 2), rel=0.05)


def test_a_peak_is_the_largest_sum() -> None:
    assert find_peak([3, -2, 5, -6, 4]) == 6
    assert find_peak([]) == 0
