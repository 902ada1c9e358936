"""The zoo of wrong gradients: each published fault is found, by `check`, `verify` or a step, with its place."""

from __future__ import annotations

import re

import pytest

from samples.packed_reader import make_batch, make_program
from samples.wrong_gradients import FAULTS, PAGE, Fault, find

QUICK = ("a pipeline's gradients are not divided by the number of tokens", "tensor ranks read different data")
PLACE = r"program_0\d\.py:\d+|schedule: rank 1: |norm of the gradient|argument idx differs|optimizer has 52"


def test_the_program_without_a_fault_is_right() -> None:
    report = make_program(2, 2, 2).verify(batch=make_batch(8))
    assert report.passed, report


@pytest.mark.parametrize(
    "fault", [pytest.param(f, marks=[] if f.name in QUICK else [pytest.mark.slow], id=f.name) for f in FAULTS]
)
def test_each_is_found_with_its_place(fault: Fault) -> None:
    found = find(fault)
    assert found.by
    assert re.search(PLACE, found.said), found.said


def test_the_page_has_each_and_nothing_is_silent() -> None:
    page = PAGE.read_text()
    assert sum(bool(fault.published) for fault in FAULTS) >= 20
    assert all(f"| {fault.name} | {fault.published} |" in page for fault in FAULTS)
    assert "NOTHING" not in page
