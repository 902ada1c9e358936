"""The share of a value that one tensor rank holds: all of it, a part, or one term of a sum.

The static proof walks a stage and gives every value a `Share` (see `share_rules`), from the parameters' placements
alone, so that it judges an edited text like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from torch import fx

from autoptd.runtime.program.placement import Placement, Segment


class ShareError(Exception):
    """Tensor ranks that would compute something else than the undivided program: the first place found."""


@dataclass(frozen=True)
class Share:
    """The share of a value that one tensor rank holds, by its `kind`.

    "whole": the same on all tensor ranks; "divided": this rank's part; "partial": a term of a sum; "unknown": the
    result of an unfamiliar operator on divided values, about which the proof says nothing. The part of a divided value
    lies along `dim` and consists of the local `parts` (a `Segment`'s size is this rank's); None and () if that is
    unknown. `extent` is the undivided dimension of a parameter, without padding, while it is whole.
    """

    kind: Literal["whole", "divided", "partial", "unknown"]
    dim: int | None = None
    parts: tuple[Segment, ...] = ()
    extent: int | None = None

    @property
    def mixed(self) -> bool:
        """Return whether some rows are whole although others are divided."""
        return any(not part.divided for part in self.parts)

    @property
    def runs(self) -> tuple[tuple[int, int, bool], ...]:
        """Return how the rows lie in memory: (repeats, rows of one run, divided), neighbours of one length joined."""
        found: list[tuple[int, int, bool]] = []
        for part in self.parts:
            count, run = (part.outer, part.size * part.inner) if part.divided else (1, part.rows)
            last = found[-1] if found else (0, 0, not part.divided)
            if last[2] is not part.divided or (part.divided and last[1] != run):
                found.append((count, run, part.divided))
            else:
                found[-1] = (last[0] + count, run, True) if part.divided else (1, last[1] + run, False)
        return tuple(found)


WHOLE = Share("whole")
PARTIAL = Share("partial")
UNKNOWN = Share("unknown")
DIVIDED = Share("divided")

Found = Share | tuple[Share, ...]  # of an operator with several results, one share each
Shares = Mapping[fx.Node, Found]
Rule = Callable[[fx.Node, Shares], Found]


def share_of(placement: Placement, tensor: int) -> Share:
    """Return the share of a parameter that each of `tensor` ranks holds."""
    if placement.dim is None:
        return WHOLE
    parts = (replace(s, size=s.size // tensor) if s.divided else s for s in placement.segments)
    extent = sum(segment.rows for segment in placement.segments) - placement.padding
    return Share("divided", placement.dim, tuple(parts), extent)


def regroup(share: Share, old: Sequence[int], new: Sequence[int]) -> Share:
    """Return the share of a tensor of local shape `old` that is viewed as `new`."""
    if share.dim is None:
        return share
    if tuple(old) == tuple(new) and not any(part.divided and part.size == 1 for part in share.parts):
        return share
    size, stride = old[share.dim], prod(old[share.dim + 1 :])
    steps = [(dim, prod(new[dim + 1 :]), extent) for dim, extent in enumerate(new)]
    before = [(prod(old[dim + 1 :]), extent) for dim, extent in enumerate(old)]
    # A rank's only row may be counted to either neighbour; and of several dimensions of size 1 in its place there is
    # no telling which it is.
    edges = {stride * part.inner for part in share.parts if part.divided and part.size == 1}
    if tuple(old) == tuple(new):  # which counts it to a neighbour, if it does anything
        clear = False
    elif size > 1:
        clear = bool(share.parts) and not any(extent == 1 and step in edges for _, step, extent in steps)
    else:
        after = [(step, extent) for _, step, extent in steps]
        clear = bool(share.parts) and before.count((stride, 1)) == after.count((stride, 1)) == 1
    if clear:
        for dim, step, extent in steps:
            if (step, extent) == (stride, size):
                return replace(share, dim=dim)
            parts = _regroup_parts(share, stride, step, extent) if size > 1 else ()
            if parts:
                return Share("divided", dim, parts)
    return UNKNOWN if share.mixed else DIVIDED


def _regroup_parts(share: Share, stride: int, step: int, extent: int) -> tuple[Segment, ...]:
    """The parts in a dimension of `extent` rows of `step` elements; () where they do not lie in it.

    `stride` are the elements of one row so far.
    """
    top = step * extent
    if len(share.parts) > 1:
        scaled = [_scale(part, stride, step) for part in share.parts]
        found = tuple(part for part in scaled if part is not None)
        return found if len(found) == len(scaled) and top == stride * sum(p.rows for p in share.parts) else ()
    (part,) = share.parts
    start = stride * part.inner
    end = start * part.size
    if part.size == 1 and not (step < end < top or (step < end == top and part.outer == 1)):
        return ()
    if part.size == 1:
        start, inside = step, end % step == 0
    else:
        inside = step <= start and end <= top and start % step == 0
    if not inside or top % end:
        return ()
    return (Segment(top // end, part.size, end // part.size // step, True),)


def _scale(part: Segment, stride: int, step: int) -> Segment | None:
    """The part counted in rows of `step` elements instead of `stride`; None where it ends inside one."""
    if part.divided:
        inner, rest = divmod(part.inner * stride, step)
        return None if rest else replace(part, inner=inner)
    rows, rest = divmod(part.rows * stride, step)
    return None if rest else Segment(1, rows, 1, False)


def take_rows(share: Share, start: int, length: int) -> Share | None:
    """Return the share of `length` local rows from `start` on along the divided dimension.

    None where they are no equal parts of what all ranks hold together: each rank would take other rows.
    """
    if not share.parts:
        return DIVIDED
    taken: list[Segment] = []
    position = 0
    for part in share.parts:
        first, last = max(start, position), min(start + length, position + part.rows)
        first, last, position = first - position, last - position, position + part.rows
        if first >= last:
            continue
        run = part.size * part.inner
        if not part.divided:
            taken.append(Segment(1, last - first, 1, False))
        elif first % run or last % run:
            return None
        else:
            taken.append(replace(part, outer=(last - first) // run))
    if not any(part.divided for part in taken):
        return WHOLE
    return replace(share, parts=tuple(taken), extent=None)
