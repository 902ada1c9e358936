"""The order of dimensions: where batch and sequence are, through views and broadcasts."""

from __future__ import annotations

import pytest

from autoptd.passes.operators.layout import (
    BATCH,
    SEQUENCE,
    Dim,
    DimOrder,
    broadcast,
    plain_order,
    regroup,
    size_of,
)

B, S, H = ((BATCH, 2),), ((SEQUENCE, 3),), (("", 12),)
ONE_B: Dim = ((BATCH, 1),)


@pytest.mark.parametrize(
    ("dims", "pair"),
    [
        ((B, S, H), (0, False)),
        ((H, B, S), (1, False)),
        ((B + S, H), (0, True)),
        ((B + S + H,), (0, True)),
        ((B, H, S), None),
        ((S, B, H), None),
        ((B, S + H), None),
        ((B + H, S), None),
        ((H,), None),
    ],
)
def test_batch_and_sequence_pairs_that_may_be_exchanged(
    dims: tuple[Dim, ...], pair: tuple[int, bool] | None
) -> None:
    assert DimOrder(dims).pair == pair


def test_permutation_of_the_transposed() -> None:
    order = DimOrder((H, B, S), transposed=True)
    assert order.permutation == [0, 2, 1]
    assert order.arrange(order.shape) == [12, 3, 2]
    assert [order.place(d) for d in (0, 1, 2, -1)] == [0, 2, 1, 1]
    assert [order.holds(d) for d in (0, 1, -1)] == [False, True, True]
    assert DimOrder((B + S, H), transposed=True).permutation == [0, 1]


@pytest.mark.parametrize(
    ("dims", "shape", "expected"),
    [
        ((B, S, H), [6, 12], (B + S, H)),
        ((B + S, H), [2, 3, 12], (B, S, H)),
        ((B, S, H), [2, 3, 4, 3], (B, S, (("", 4),), (("", 3),))),
        ((B, S, H), [24, 3], (B + S + (("", 4),), (("", 3),))),
        ((B, S, H), [2, 36], (B, S + H)),
        ((ONE_B, S, H), [3, 12], (ONE_B + S, H)),
        ((ONE_B + S, H), [1, 3, 12], (ONE_B, S, H)),
        ((B, ((SEQUENCE, 4),)), [2, 2, 2], (B, (("", 2),), (("", 2),))),
        (((("", 6),), (("", 4),)), [8, 3], ((("", 8),), (("", 3),))),
    ],
)
def test_regroup(dims: tuple[Dim, ...], shape: list[int], expected: tuple[Dim, ...]) -> None:
    found = regroup(dims, shape)
    assert found == expected
    assert [size_of(dim) for dim in found] == shape


def test_broadcast() -> None:
    assert broadcast([DimOrder((B, S, H)), plain_order([1, 3, 12]), plain_order([12])], [2, 3, 12]) == (
        B,
        S,
        H,
    )
    assert broadcast([DimOrder((B, S)), DimOrder((S,))], [2, 3]) == (B, S)
    assert broadcast([DimOrder((B, ((SEQUENCE, 2),))), DimOrder((B,))], [2, 2]) == (
        B,
        (("", 2),),
    )  # they disagree
