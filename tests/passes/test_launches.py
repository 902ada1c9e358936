"""Launches of a layer's forward, counted from what is compiled, beside their goals."""

from __future__ import annotations

import pytest

from samples.benchmarks.launches import MODELS, count

pytest.importorskip("transformers")


@pytest.mark.parametrize(("name", "most"), [("GPT-2", 20 * 0.5), ("sample GPT", 13 * 0.65)])
def test_a_layer_launches_fewer(name: str, most: float) -> None:
    """The goals were half of 20, and 35 % fewer than 13."""
    assert count(MODELS[name], 0.0, rewritten=True) <= most
