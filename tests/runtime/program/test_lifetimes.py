"""Values of a program's functions end after their last use, and the functions mean what they meant."""

from __future__ import annotations

import ast
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from autoptd.runtime.program.lifetimes import end_values
from autoptd.runtime.program.program_text import read_program

TEXT = '''
SCHEDULE = """
0F0 0B0
"""

def stage_0(rank, p, x):
    a = x + 1
    watch(a)
    b, c = a * 2, a * 3
    watch(b)
    return b - c
'''


def end(text: str) -> str:
    return ast.unparse(end_values(ast.parse(text)))


def test_a_value_ends_after_its_last_use() -> None:
    seen: list[list[bool]] = []
    watched: list[weakref.ref[torch.Tensor]] = []

    def watch(x: torch.Tensor) -> None:
        watched.append(weakref.ref(x))
        seen.append([ref() is not None for ref in watched])

    stage = read_program(TEXT, "ends.py").stages[0]
    stage.__globals__["watch"] = watch
    x = torch.ones(2)
    assert torch.equal(stage(None, {}, x), -(x + 1))
    assert seen == [[True], [False, True]]


KEPT = """
def f(x, n):
    a = x + 1

    def inner(y):
        z = y * a
        return z
    if n:
        b = 2
    for i in range(n):
        d = [a for _ in x]
    e = 1
    del e
    return inner(x)
"""
ENDED = """
def f(x, n):
    a = x
    b = a
    a = b
    del b
    c = a
    del a
    for i in range(n):
        c.view(i)
    del c
    return x
"""


def test_values_read_later_are_not_deleted() -> None:
    """By an inner function or in a loop; and what may not be there is not deleted, nor what is twice."""
    assert end(KEPT) == KEPT.strip()


def test_many_threads_may_read_programs() -> None:
    """Python 3.11 counts the depth of all threads' trees in one place."""
    text = TEXT.replace("return b - c", "return b - c" + " + a * (1 + (2 - (3 + 4)))" * 300)
    with ThreadPoolExecutor(8) as pool:
        programs = list(pool.map(lambda i: read_program(text, f"thread_{i}.py"), range(64)))
    assert all(program.stages.keys() == {0} for program in programs)


def test_a_text_that_is_no_python_is_quoted() -> None:
    with pytest.raises(ValueError, match=r"no.py:3: 'return' outside function: return 1"):
        read_program("x = 1\n\nreturn 1\n", "no.py")


def test_names_may_be_used_again() -> None:
    text = "".join(line + "\n" for line in ENDED.splitlines() if "del " not in line)
    assert end(text) == ENDED.strip()


def test_inner_functions_end_theirs() -> None:
    text = "def f(x):\n\n    def g(y):\n        z = y\n        w = z\n        return w\n    return g(x)"
    assert "w = z\n        del z" in end(text)


def test_lines_stay() -> None:
    text = TEXT.replace("return b - c", "return b - nothing")
    stage = read_program(text.replace("watch(b)", "c.missing"), "lines.py").stages[0]
    stage.__globals__["watch"] = lambda x: None
    try:
        stage(None, {}, torch.ones(2))
    except AttributeError as error:
        frame = error.__traceback__
        assert frame is not None
        assert frame.tb_next is not None
        assert text.splitlines()[frame.tb_next.tb_lineno - 1].strip() == "watch(b)"
    else:
        raise AssertionError("c.missing was found")
