"""Golden texts: kept beside the tests, compared line by line, written anew by ``pytest --update-golden``."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden texts anew")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """``golden(name, text)``: compare with the file `name` in the test's folder ``golden/``."""
    folder = request.path.parent / "golden"

    def compare(name: str, text: str) -> None:
        compare_golden(folder / name, text, update=request.config.getoption("--update-golden"))

    return compare


def compare_golden(file: Path, text: str, *, update: bool) -> None:
    if update:
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8", newline="\n")
        return
    expected = file.read_text(encoding="utf-8") if file.exists() else ""
    if text != expected:
        lines = difflib.unified_diff(expected.splitlines(), text.splitlines(), file.name, "now", lineterm="")
        pytest.fail("\n".join([*lines, "if this is meant: pytest --update-golden"]), pytrace=False)
