"""Schedules as text: a rank's actions written compactly and read back.

    warm-up: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0
    steady: (0F2 0SEND_F2 0RECV_B1 0B0) x7 +1
    cool-down: 0B7 0B8

A group in parentheses, which may have groups inside, stands for its actions N times, with K more added to every
microbatch each time. The names of the lines are for the reader; actions without one are read as well.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from textwrap import wrap
from typing import Any, NamedTuple

from autoptd.runtime.program.schedule import Action, Kind

_WIDTH = 109

# A cycle of the steady state has at most a few runs for each model chunk, so longer ones are not looked for.
_MAX_CYCLE = 64

_WORD = re.compile(
    r"\s*(?:(?P<name>[a-z][a-z-]*:)"
    r"|(?P<open>\()"
    r"|(?P<close>\)\s*x(?P<count>\d+)\s*\+(?P<increment>\d+))"
    r"|(?P<token>[^\s()]+)|(?P<other>\)))"
)

_GROUP = "a group reads (0F1 0SEND_F1) x6 +1: its actions, its times, and what each adds to the microbatches"


class _Run(NamedTuple):
    """Actions, or runs of these, that come `times` times, with `step` more added to their microbatches each time."""

    parts: tuple[Any, ...]
    times: int
    step: int


def format_schedule(actions: Sequence[Action]) -> str:
    """Write one rank's actions compactly; `parse_schedule` gives exactly them back."""
    units = _split_units(actions)
    kinds = [[action.kind for action in unit if action.kind.computes] for unit in units]
    first_backward = next((i for i, own in enumerate(kinds) if own == [Kind.BACKWARD]), len(units))
    last_forward = max((i for i, own in enumerate(kinds) if own == [Kind.FORWARD]), default=-1)
    if last_forward < first_backward:
        forwards, backwards = _find_runs(units[:first_backward]), _find_runs(units[first_backward:])
        return _join_lines(("forward:", forwards), ("backward:", backwards))
    # One forward and one backward in turn begins with the forward before the first backward.
    start, stop = max(first_backward - 1, 0), last_forward + 2
    pairs = range(start, min(stop, len(units)), 2)
    steady = _find_runs([sum(units[first : min(first + 2, stop)], ()) for first in pairs])
    covered, cycle = max(_cycles(steady), key=lambda found: _count(steady[found[0]]), default=(slice(0), None))
    if cycle is not None and 2 * _count(steady[covered]) >= _count(steady):
        steady[covered] = [cycle]
    warm_up, cool_down = _find_runs(units[:start]), _find_runs(units[stop:])
    return _join_lines(("warm-up:", warm_up), ("steady:", steady), ("cool-down:", cool_down))


def parse_schedule(text: str) -> tuple[Action, ...]:
    """Read what `format_schedule` writes, or a person edited; ValueError names the line and the word."""
    rows: list[list[Action]] = [[]]  # the actions so far, then those of each open group
    end, text = 0, text.rstrip()
    while end < len(text):
        match = _WORD.match(text, end)
        assert match is not None, "the word pattern takes any character"
        start, end = end, match.end()
        if match["token"]:
            try:
                rows[-1].append(Action.parse(match["token"]))
            except ValueError as error:
                raise ValueError(f"{_line(text, end)}: {error}") from error
        elif match["open"]:
            rows.append([])
        elif match["close"] and len(rows) > 1:
            group = rows.pop()
            rows[-1] += _repeat(group, int(match["count"]), int(match["increment"]))
        elif not (match["name"] and len(rows) == 1):
            raise ValueError(f"{_line(text, end)}: {text[start:end].strip()!r} is out of place; {_GROUP}")
    if len(rows) > 1:
        raise ValueError(f"{_line(text, end)}: the schedule ends inside a '('; {_GROUP}")
    return tuple(rows[0])


def _split_units(actions: Sequence[Action]) -> list[tuple[Action, ...]]:
    """Cut into units: a compute action, with the receives posted before it and the sends after it."""
    units: list[tuple[Action, ...]] = []
    start, computed = 0, False
    for index, action in enumerate(actions):
        if computed and not action.kind.sends:
            units.append(tuple(actions[start:index]))
            start, computed = index, False
        computed = computed or action.kind.computes
    return [*units, tuple(actions[start:])] if actions else []


def _shape(actions: Sequence[Action]) -> tuple[tuple[int, Kind, int], ...]:
    """Count the actions' microbatches from the first one's."""
    first = actions[0].microbatch
    return tuple((stage, kind, microbatch - first) for stage, kind, microbatch in actions)


def _find_runs(parts: Sequence[tuple[Action, ...]]) -> list[_Run]:
    """Join neighbouring parts that differ only by an even step in their microbatches."""
    runs: list[_Run] = []
    for _, (first, *others) in groupby(parts, _shape):
        runs.append(_Run(first, 1, 0))
        for part in others:
            run = runs[-1]
            distance = part[0].microbatch - run.parts[0].microbatch
            if run.times == 1 and distance >= 0:
                runs[-1] = _Run(run.parts, 2, distance)
            elif run.times > 1 and distance == run.times * run.step:
                runs[-1] = _Run(run.parts, run.times + 1, run.step)
            else:
                runs.append(_Run(part, 1, 0))
    return runs


def _count(runs: Iterable[_Run]) -> int:
    return sum(run.times for run in runs)


def _cycles(runs: Sequence[_Run]) -> Iterator[tuple[slice, _Run]]:
    """Yield each stretch of neighbours that come again, with the run that it is."""
    first = [run.parts[0].microbatch for run in runs]
    shapes = [(_shape(run.parts), run.times, run.step) for run in runs]
    for length in range(1, min(len(runs) // 2, _MAX_CYCLE) + 1):
        # How far each run is from its successor a cycle later; equal neighbours form a stretch of cycles.
        pairs = zip(first, first[length:], shapes, shapes[length:], strict=False)
        distances = [later - own if shape == other else -1 for own, later, shape, other in pairs]
        start = 0
        for distance, stretch in groupby(distances):
            size = sum(1 for _ in stretch)
            times = size // length + 1
            if distance >= 0 and times > 1:
                yield slice(start, start + times * length), _Run(tuple(runs[start : start + length]), times, distance)
            start += size


def _join_lines(*lines: tuple[str, Sequence[_Run]]) -> str:
    """Write each named row of runs under `_WIDTH` columns, without the empty ones."""
    rows = ([name, *(word for run in runs for word in _words(run))] for name, runs in lines if runs)
    return "\n".join(line for words in rows for line in wrap_words(words, _WIDTH, "    "))


def wrap_words(words: Iterable[str], width: int, margin: str = "") -> list[str]:
    """Return lines of as many `words` as fit, which may have spaces inside; `margin` begins all but the first."""
    text = " ".join(word.replace(" ", "\0") for word in words)
    lines = wrap(text, width, subsequent_indent=margin, break_long_words=False, break_on_hyphens=False)
    return [line.replace("\0", " ") for line in lines]


def _words(run: _Run) -> list[str]:
    """Write one run as the words that a line may be broken between."""
    if run.times * len(run.parts) <= 4 and isinstance(run.parts[0], Action):  # shorter written out
        return [str(action) for action in _repeat(run.parts, run.times, run.step)]
    words = [word for part in run.parts for word in ([str(part)] if isinstance(part, Action) else _words(part))]
    if run.times > 1:
        words[0] = f"({words[0]}"
        words[-1] += f") x{run.times} +{run.step}"
    return words


def _repeat(actions: Sequence[Action], times: int, step: int) -> list[Action]:
    return [Action(k, kind, i + step * time) for time in range(times) for k, kind, i in actions]


def _line(text: str, end: int) -> str:
    return f"line {text.count(chr(10), 0, end) + 1} of the schedule"
