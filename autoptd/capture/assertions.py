"""Assertions of a forward on its data: a trace takes them to hold."""

import ast
import dis
import linecache
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import FrameType
from typing import Any
from unittest.mock import patch

import sympy
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv

from autoptd.capture.source_lines import user_frame

# Expressions of which a test may be a part.
CHOICES = (ast.IfExp, ast.NamedExpr, ast.Lambda, ast.ListComp, ast.GeneratorExp)
ASSERTING = {"_assert", "_check", "_check_with"}  # functions of torch


@contextmanager
def assuming() -> Iterator[dict[str, None]]:
    """Take the user's assertions on data to hold in this block, of what has no data; yields the lines of these.

    An assertion is an ``assert``, ``torch._assert``, ``torch._check``, or a branch that ends in ``raise``.
    """
    lines: dict[str, None] = {}
    evaluate, defer = ShapeEnv.evaluate_expr, ShapeEnv.guard_or_defer_runtime_assert

    def expect() -> bool | None:
        """Return the value with which the assertion that runs now passes, and note its line; None outside of one."""
        frame, calls = user_frame()
        asserts = not ASSERTING.isdisjoint(calls)
        expected = True if frame and asserts else frame and _find_expected(frame)
        own = asserts and calls[-1] not in ASSERTING  # torch's, of the sizes that an operator is given
        if frame is not None and expected is not None and not own:
            file, line = frame.f_code.co_filename, frame.f_lineno
            lines[f"{os.path.basename(file)}:{line}: {linecache.getline(file, line).strip()}"] = None
        return expected

    def evaluate_or_expect(*args: Any, **kwargs: Any) -> sympy.Basic:
        try:
            return evaluate(*args, **kwargs)
        except GuardOnDataDependentSymNode:
            if (expected := expect()) is None:
                raise
            return sympy.true if expected else sympy.false

    def expect_or_defer(*args: Any, **kwargs: Any) -> bool:
        return expect() is not None or defer(*args, **kwargs)

    patched: Any = {"evaluate_expr": evaluate_or_expect, "guard_or_defer_runtime_assert": expect_or_defer}
    with patch.multiple(ShapeEnv, **patched):  # all, since torch.export makes one of its own
        yield lines


def _find_expected(frame: FrameType) -> bool | None:
    """Return the truth value with which the assertion in `frame` passes that is tested now; None outside of one.

    A wrong one would end the trace, and change no program: an assertion does nothing but raise.
    """
    code, now = frame.f_code, frame.f_lasti
    # The instruction before this one made what is tested. Where pytest wrote an assertion out, all are at its begin.
    line, _, column, _ = list(code.co_positions())[now // 2 - 1]
    spot = line or 0, column or 0
    tested = dis.opname[code.co_code[now + 8 if dis.opname[code.co_code[now]] == "TO_BOOL" else now]]

    def encloses(node: ast.expr) -> bool:
        return (node.lineno, node.col_offset) <= spot <= (node.end_lineno or 0, node.end_col_offset or 0)

    tree = list(ast.walk(_parse(code.co_filename)))
    tried = [node.body for node in tree if isinstance(node, ast.Try) and node.handlers]
    if any(body[0].lineno <= spot[0] <= (body[-1].end_lineno or 0) for body in tried):
        return None  # what is raised may be caught, and the forward go on
    for node in tree:
        if isinstance(node, ast.Assert) and (node.lineno, node.col_offset) == spot:
            return tested != "UNARY_NOT"
        raises = isinstance(node, ast.If) and isinstance(node.body[-1], ast.Raise)
        if isinstance(node, ast.Assert | ast.If) and encloses(node.test):
            if any(isinstance(part, CHOICES) and encloses(part) for part in ast.walk(node.test)):
                return None
            parts = [part for part in ast.walk(node.test) if isinstance(part, ast.UnaryOp)]
            inverted = sum(isinstance(part.op, ast.Not) and encloses(part.operand) for part in parts) % 2 == 1
            return inverted == raises if raises or isinstance(node, ast.Assert) else None
    return None


@cache
def _parse(file: str) -> ast.AST:
    return ast.parse("".join(linecache.getlines(file)))
