"""A layer keeps no more for its backward than the paper says, byte for byte."""

from __future__ import annotations

import pytest

from samples.benchmarks.activation_memory import SIZES, expect, list_operators, measure_layer, solve
from tests.marks import slow

STATISTICS = 16  # bytes a token: two numbers of at most 4 bytes for each of two layer norms


@pytest.mark.parametrize("tensor", [slow(1), 2])
@pytest.mark.parametrize("recompute", [slow("none"), "selective", slow("full")])
def test_a_layer_keeps_what_the_paper_says(recompute: str, tensor: int) -> None:
    found, paper = dict(measure_layer(recompute, tensor)), expect(recompute, tensor)
    assert found.pop("sb", 0) <= (0 if recompute == "full" else STATISTICS)
    assert set(found) <= set(paper)
    # Masks that are drawn again need no storage: 2 sbh and as²b less.
    for name, number in found.items():
        stored = {"sbh": 2, "as²b": 1 / tensor}[name] if recompute != "full" else 0
        assert paper[name] - stored <= number <= paper[name]


@pytest.mark.slow
def test_operators_add_up_to_the_layer() -> None:
    totals: dict[str, float] = {}
    for terms in list_operators().values():
        for name, number in terms.items():
            totals[name] = totals.get(name, 0) + number
    assert totals.pop("sb") == STATISTICS
    layer = dict(measure_layer("none", 1))
    layer.pop("sb")
    assert totals == layer


def test_bytes_that_are_no_sum_of_terms_are_refused() -> None:
    with pytest.raises(ValueError, match="bytes are no sum of sbh, as²b, sb"):
        solve([z.h**2 for z in SIZES])
