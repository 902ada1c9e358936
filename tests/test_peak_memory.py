"""The simulated peak of a rank's memory is that of the tensors which live in a real step."""

from __future__ import annotations

import pytest
import torch

from samples.benchmarks.peak_memory import Case, Sizes, find_peak, measure_peak
from tests.marks import slow_but
from tests.ranks import run_ranks

# Losses, and kernels of half precision, have some rows beside the others, which nobody predicts and which count at such
# sizes: so there are few classes, and few tokens in half precision.
SIZES = Sizes(hidden=128, layers=8, heads=4, length=128, vocabulary=512, b=2)
FEW_TOKENS = Sizes(hidden=192, layers=8, heads=4, length=64, vocabulary=256, b=4)
# Most is held while gradients are scattered.
LARGE_WEIGHTS = Sizes(hidden=256, layers=8, heads=4, length=32, vocabulary=512, b=2)


CASES = {
    "nothing recomputed": Case((1, 2, 1)),
    "all recomputed": Case((1, 2, 1), recompute="full"),
    "sharded": Case((1, 1, 2), sharded=True),
    "sharded, half precision": Case((1, 1, 2), dtype=torch.bfloat16, sharded=True),
    "sharded, one replica": Case((1, 1, 1), sharded=True),
    "sharded, two chunks": Case((1, 2, 2), num_model_chunks=2, sharded=True),
}


@pytest.mark.parametrize("name", slow_but(["sharded, half precision"], CASES))
def test_a_step_holds_what_is_predicted(name: str) -> None:
    case = CASES[name]
    sizes = FEW_TOKENS if case.dtype is torch.bfloat16 else SIZES
    if case.num_model_chunks > 1:
        sizes = LARGE_WEIGHTS
    program = case.compile(sizes)

    def work(rank: int) -> int:
        torch.manual_seed(0)
        return measure_peak(program, sizes, case.sharded).live

    live = run_ranks(work, program.mesh.size)
    most = [0] * program.mesh.pipeline
    for rank, peak in enumerate(live):
        stage = program.mesh.coordinates(rank).pipeline
        most[stage] = max(most[stage], peak)
    assert case.predict(program) == pytest.approx(most, rel=0.05)


def test_a_peak_is_the_largest_sum() -> None:
    assert find_peak([3, -2, 5, -6, 4]) == 6
    assert find_peak([]) == 0
