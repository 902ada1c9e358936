"""A rank program ready to run: its compiled text, its stage functions and its schedule."""

import ast
import linecache
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from traceback import walk_tb
from typing import Any

from autoptd.runtime.program.lifetimes import end_values
from autoptd.runtime.program.schedule import Action
from autoptd.runtime.program.schedule_text import parse_schedule

# Python 3.11 counts the depth of all threads' trees in one place.
_PARSER = threading.Lock()
_STAGE = re.compile(r"stage_(0|[1-9]\d*)")


@dataclass(frozen=True)
class ProgramText:
    """The program of one pipeline rank, read from its `text`.

    `stages`: index -> ``stage_<index>(rank, p, *received, *inputs)``. `constants`: ``constants(p)``, which
    makes the tensors that depend on no data. `actions`: its SCHEDULE.
    """

    text: str
    filename: str
    stages: Mapping[int, Callable[..., Any]]
    constants: Callable[..., dict[str, Any]]
    actions: tuple[Action, ...]


def read_program(text: str, filename: str) -> ProgramText:
    """Compile and execute a program `text`; `filename` is what tracebacks show, with the text's own lines.

    This runs the text's code. Raises ValueError with file and line if it is no rank program.
    """
    try:
        with _PARSER:
            code = compile(end_values(ast.parse(text, filename)), filename, "exec", dont_inherit=True)
    except SyntaxError as error:
        shown = "".join(text.splitlines()[(error.lineno or 0) - 1 : error.lineno]).strip()
        raise ValueError(f"{filename}:{error.lineno}: {error.msg}: {shown}") from error
    # An entry without a modification time is kept: the text need not lie on disk.
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    namespace: dict[str, Any] = {"__name__": filename.removesuffix(".py"), "__file__": filename}
    exec("def constants(p): return {}", namespace)  # unless the text has its own
    try:
        exec(code, namespace)
    except Exception as error:
        raise ValueError(f"{filename}:{line_of(error, filename)}: {type(error).__name__}: {error}") from error
    named = ((_STAGE.fullmatch(name), value) for name, value in namespace.items())
    stages = {int(match[1]): value for match, value in named if match and callable(value)}
    if not stages:
        raise ValueError(f"{filename}: no stage found; expected functions stage_<k>(rank, p, ...)")
    actions = _read_schedule(text, filename, namespace.get("SCHEDULE"))
    return ProgramText(text, filename, dict(sorted(stages.items())), namespace["constants"], actions)


def line_of(error: BaseException, filename: str) -> int:
    """Return the line of `filename` that raised `error`, in its innermost frame there; 0 if it has none."""
    lines = [line for frame, line in walk_tb(error.__traceback__) if frame.f_code.co_filename == filename]
    return lines[-1] if lines else 0


def _read_schedule(text: str, filename: str, schedule: Any) -> tuple[Action, ...]:
    if not isinstance(schedule, str):
        found = "no SCHEDULE" if schedule is None else f"SCHEDULE of type {type(schedule).__name__}"
        raise ValueError(f'{filename}: {found}; expected SCHEDULE = "1RECV_F0 1F0 ..."')
    match = re.search(r"^SCHEDULE\b", text, re.MULTILINE)
    place = f"{filename}:{text.count(chr(10), 0, match.start()) + 1 if match else 0}: SCHEDULE"
    try:
        return parse_schedule(schedule)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error
