"""Gradients that autograd left in one memory, and those that share none."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autoptd.runtime.engine.gradient_aliasing import separate_gradients

SPANS = [
    [(0, 4), (0, 4)],
    [(0, 4), (0, 4), (0, 4)],
    [(0, 4), (2, 6)],
    [(2, 6), (0, 4), (5, 8)],
    [(0, 8), (1, 2), (6, 7), (9, 12), (3, 11)],
    [(0, 4), (4, 8), (8, 8)],
    [(3, 5), (0, 6), (2, 8)],  # the first one is in both of the others, of which one is copied
    [(2, 3), (0, 4), (0, 8)],
    [(6, 7), (9, 10), (0, 8), (1, 12)],
]


@pytest.mark.parametrize("spans", SPANS)
@pytest.mark.parametrize("crossing", [0, 1, 2])
def test_adding_into_a_gradient_changes_no_overlapping_one(
    spans: list[tuple[int, int]], crossing: int
) -> None:
    """The first `crossing` of them are no leaf's."""
    memory = torch.arange(12.0)
    views = [memory[begin:end] for begin, end in spans]
    others = views[:crossing]
    leaves = [torch.zeros(view.shape, requires_grad=True) for view in views[crossing:]]
    for leaf, view in zip(leaves, views[crossing:], strict=True):
        leaf.grad = view
    expected = [view.clone() for view in views]
    separate_gradients(leaves, others)
    held: list[Tensor] = [*others, *(leaf.grad for leaf in leaves if leaf.grad is not None)]
    assert all(torch.equal(x, y) for x, y in zip(held, expected, strict=True))
    for changed in range(crossing, len(held)):
        held[changed].fill_(-1.0)
        rest = [i for i in range(len(held)) if i < crossing or i > changed]
        assert all(torch.equal(held[i], expected[i]) for i in rest)


def test_one_that_is_alone_stays_where_it_is() -> None:
    memory = torch.arange(12.0)
    leaves = [torch.zeros(6, requires_grad=True) for _ in range(3)]
    leaves[0].grad, leaves[1].grad = memory[:6], memory[6:]
    separate_gradients(leaves, [torch.zeros(6)])
    assert leaves[0].grad.data_ptr() == memory.data_ptr()
    assert leaves[1].grad.data_ptr() == memory[6:].data_ptr()
    assert leaves[2].grad is None
