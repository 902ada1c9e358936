"""Warnings are shown at the user's line."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from autoptd.runtime.user_warnings import warn_caller


def define(package: str, call: Callable[[str], None]) -> Callable[[str], None]:
    """A function of `package` that leads to `call`."""
    names: dict[str, Any] = {"__name__": package, "call": call}
    exec("def lead(text): call(text)", names)
    lead: Callable[[str], None] = names["lead"]
    return lead


@pytest.mark.parametrize("packages", [["autoptd"], ["autoptd.runtime.module.parallel", "torch.optim.optimizer"]])
def test_warnings_point_at_the_first_line_outside_of_the_library(packages: list[str]) -> None:
    call: Callable[[str], None] = warn_caller
    for package in packages:
        call = define(package, call)
    with pytest.warns(UserWarning, match="words") as said:
        call("words")
    lines, first = inspect.getsourcelines(test_warnings_point_at_the_first_line_outside_of_the_library)
    assert said[0].filename == __file__
    assert lines[said[0].lineno - first].strip() == 'call("words")'


def test_a_context_manager_is_no_line_of_the_users() -> None:
    names: dict[str, Any] = {"__name__": "autoptd", "call": warn_caller}
    exec("def work():\n    yield\n    call('words')", names)
    manage = contextlib.contextmanager(names["work"])
    with pytest.warns(UserWarning, match="words") as said, manage():
        pass
    assert said[0].filename == __file__


def test_warnings_are_shown_once_a_line() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            define("autoptd", warn_caller)("only once")
    assert len(caught) == 1
