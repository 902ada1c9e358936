"""Cases of parametrized tests that run with the slow tests alone."""

from __future__ import annotations

from collections.abc import Container, Iterable
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
