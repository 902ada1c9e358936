"""What captures are tested with is traced each time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.captures import Captures


@pytest.fixture(autouse=True)
def no_shared_captures(captures: Captures) -> Iterator[None]:
    captures.enabled = False
    yield
    captures.enabled = True
