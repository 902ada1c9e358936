"""Cases of parametrized tests: which of them are quick, and which run with the slow tests alone."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """One case, run with the slow tests alone."""
    return pytest.param(*values, marks=pytest.mark.slow)


def slow_but(quick: Container[Any], values: Iterable[Any]) -> list[Any]:
    """All `values` of one parameter in their order; those that are not `quick` run with the slow tests alone."""
    return [value if value in quick else slow(value) for value in values]


def slow_rows_but(quick: Container[Any], rows: Iterable[tuple[Any, ...]]) -> list[Any]:
    """The same of rows, which have a value for each of several parameters."""
    return [row if row in quick else slow(*row) for row in rows]


def cover_pairs(*axes: Iterable[Any]) -> list[Any]:
    """The product of `axes`, with as few quick rows as have every two values of two axes together in one of them.

    The rest of the product runs with the slow tests, and on a GPU.
    """
    values: list[Sequence[Any]] = [list(axis) for axis in axes]
    rows = list(product(*(range(len(axis)) for axis in values)))
    pairs = {row: {((i, row[i]), (j, row[j])) for i, j in combinations(range(len(row)), 2)} for row in rows}
    missing, quick = set[Any]().union(*pairs.values()), set[Any]()
    while missing:
        best = max(rows, key=lambda row: len(pairs[row] & missing))
        quick.add(best)
        missing -= pairs[best]
    named = {row: tuple(axis[i] for axis, i in zip(values, row, strict=True)) for row in rows}
    return [named[row] if row in quick else slow(*named[row]) for row in rows]


def name_case(value: Any) -> str:
    """Return a value's part of a test's name, the same in every process: a function has an address besides."""
    return str(getattr(value, "__name__", value))
