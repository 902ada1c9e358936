"""Reading a program text: functions and actions out of it, errors with file and line."""

from __future__ import annotations

import traceback

import pytest

from autoptd.runtime.program.program_text import read_program
from autoptd.runtime.program.schedule import Action

TEXT = '''"""A program."""
from autoptd.runtime import aten

SCHEDULE = """
0F0 2F0 2B0
0B0
"""


def stage_0(rank, p, x):
    return aten.mul(x, p["w"])


def stage_2(rank, p, x):
    return (
        x.missing
    )


def constants(p):
    return {}
'''


def test_reads_functions_and_actions() -> None:
    program = read_program(TEXT, "program_00.py")
    assert list(program.stages) == [0, 2]
    assert program.constants({}) == {}
    assert program.actions == tuple(map(Action.parse, ("0F0", "2F0", "2B0", "0B0")))
    assert read_program(TEXT.replace("constants", "other"), "program_00.py").constants({}) == {}


def test_traceback_shows_the_text() -> None:
    stage = read_program(TEXT, "program_77.py").stages[2]
    with pytest.raises(AttributeError) as caught:
        stage(None, {}, 1)
    shown = "".join(traceback.format_exception(caught.value))
    assert 'File "program_77.py", line 16, in stage_2\n    x.missing' in shown


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("return aten.mul(x", "return aten.mul((x", r"program_00\.py:11: '\(' was never closed"),
        ("from autoptd.runtime import aten", "from autoptd.runtime import atem",
         r"program_00\.py:2: ImportError: cannot import name 'atem'"),
        ("2F0", "2G0", r"program_00\.py:4: SCHEDULE: line 2 of the schedule: '2G0' is no action"),
        ("SCHEDULE", "PLAN", r"program_00\.py: no SCHEDULE; expected"),
        ('SCHEDULE = """', 'SCHEDULE = 3\n"""', r"program_00\.py: SCHEDULE of type int; expected"),
        ("def stage", "def part", r"program_00\.py: no stage found"),
    ],
)  # fmt: skip
def test_error_names_file_and_line(old: str, new: str, message: str) -> None:
    assert old in TEXT
    with pytest.raises(ValueError, match=message):
        read_program(TEXT.replace(old, new), "program_00.py")
