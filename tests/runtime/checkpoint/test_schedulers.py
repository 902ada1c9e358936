"""A scheduler's state goes to groups of parameters with the numbers they had, or nowhere."""

from __future__ import annotations

import pytest

from autoptd.runtime.checkpoint.error import CheckpointError
from autoptd.runtime.checkpoint.record import StoredSchedulers
from autoptd.runtime.checkpoint.schedulers import choose_schedulers

ONE = StoredSchedulers((("a", "tied"), ("b",)), {"0": 1})
OTHER = StoredSchedulers((("c",), ("d", "tied")), {"0": 2})
FIRST = StoredSchedulers((("a",), ("b",)), {"0": 1})
LIKE = StoredSchedulers((("c",), ("d",)), {"0": 1})


@pytest.mark.parametrize(
    ("groups", "stored", "found"),
    [
        ([["a", "tied"], ["b"]], [ONE, OTHER], {"0": 1}),
        ([["c"], ["d", "tied"]], [ONE, OTHER], {"0": 2}),
        ([["a"], []], [ONE, OTHER], {"0": 1}),
        ([["a", "c"], ["b", "d"]], [FIRST, LIKE], {"0": 1}),
        ([["c"], ["b"]], [FIRST, LIKE], {"0": 1}),
        ([[], []], [FIRST, LIKE], {"0": 1}),
        ([], [FIRST, LIKE], {"0": 1}),
        ([["a"]], [], {}),
    ],
)
def test_groups_of_the_same_numbers(
    groups: list[list[str]], stored: list[StoredSchedulers], found: dict[str, int]
) -> None:
    assert choose_schedulers(groups, stored, "here") == found


@pytest.mark.parametrize(
    ("groups", "stored"),
    [
        ([["b"], ["a", "tied"]], [ONE]),
        ([["a", "tied", "b"]], [ONE]),
        ([["a"], ["b"], ["new"]], [ONE]),
        ([["a", "c"], ["b", "d", "tied"]], [ONE, OTHER]),
        ([["a", "c"], ["b", "d"]], [FIRST, OTHER]),
        ([["new"], ["other"]], [ONE]),
        ([], [ONE, OTHER]),
    ],
)
def test_others_are_refused(groups: list[list[str]], stored: list[StoredSchedulers]) -> None:
    with pytest.raises(CheckpointError, match="here: schedulers know parameter groups by number"):
        choose_schedulers(groups, stored, "here")
