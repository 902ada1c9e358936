"""Every wild model is divided and right, or refused with a way out that is true."""

from __future__ import annotations

import re

import pytest

from autoptd.verification.report import TOLERANCE
from samples.wild.__main__ import CASES, PAGE, judge
from samples.wild.decoder import Case

QUICK = ("logsumexp with a z-loss", "a loss that enters by the backward", "a balance loss on a module")


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[] if c.name in QUICK else [pytest.mark.slow], id=c.name) for c in CASES]
)
def test_each_is_right_or_refused(case: Case) -> None:
    found = judge(case)
    if case.refused:
        assert re.search(case.refused, found.refused), found.refused
    else:
        assert not found.refused
        assert found.error <= TOLERANCE
        assert found.share <= case.share


def test_the_page_has_all() -> None:
    page = PAGE.read_text()
    assert len({case.name for case in CASES}) >= 40
    assert all(f"| {case.name} | {case.style} | {case.written} |" in page for case in CASES)
