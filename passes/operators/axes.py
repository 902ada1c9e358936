"""Axes: the atoms of tensor dimensions, unified over the whole graph.

Every dimension of every tensor is one `Axis`. Operators relate axes: a ``linear`` makes its input's last dimension
the same axis as its weight's, a ``view`` splits an axis into a product, an uneven ``split`` into a sum of segments.
`unify` merges two axes (union-find) and lines up their refinements, so that a refinement met anywhere
(768 = 12 * 64) holds everywhere. The rows of all experts are *ragged*: divided as the experts are, into parts whose
lengths depend on data. What is left unrefined at the end, the leaves, are the axes of the model: heads, MLP width,
vocabulary, batch. A *blocked* leaf may not be divided over the tensor ranks; it says why.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, count, groupby, pairwise, zip_longest
from math import prod


class IndivisibleError(ValueError):
    """A number of tensor ranks that one operator refuses, in whatever layer it stands."""


@dataclass(eq=False, repr=False, slots=True)
class Axis:
    """One dimension or a part of one; compare the results of `find`, never two `Axis` objects themselves.

    `parts` of a "product" go from outermost to innermost; `parts` of a "sum" are consecutive segments. The only part of
    a "ragged" axis counts consecutive segments of lengths that depend on data, each of at most `each`. An axis of
    size 1 vanishes where dimensions are regrouped, unless it is `kept`: a batch of one sequence is a batch. An axis is
    `copied` where each of its indices has the same value, and it has met no other axis.
    """

    size: int
    kind: str = "leaf"
    parts: tuple[Axis, ...] = ()
    blocked: str = ""
    copied: bool = False
    kept: bool = False
    each: int = 0
    parent: Axis | None = None
    serial: int = field(default_factory=count().__next__)

    def __repr__(self) -> str:
        axis = find(self)
        mark = "!" if axis.blocked else ""
        if axis.kind == "leaf":
            return f"{axis.size}{mark}"
        sign = {"product": "*", "sum": "+"}.get(axis.kind, "")
        return "(" + sign.join(map(repr, axis.parts)) + ")" + mark


Axes = tuple[Axis, ...]


def find(axis: Axis) -> Axis:
    """Return the representative of the axis's class."""
    while axis.parent is not None:
        if axis.parent.parent is not None:
            axis.parent = axis.parent.parent
        axis = axis.parent
    return axis


def is_divided(axes: Iterable[Axis], divided: Mapping[Axis, int]) -> bool:
    """Return whether any leaf of these axes is among the `divided` ones."""
    return any(leaf in divided for axis in axes for leaf in leaves(axis))


def vanishes(axis: Axis) -> bool:
    """Return whether the axis is a single index that says nothing."""
    axis = find(axis)
    return axis.size == 1 and not axis.kept


def block(axis: Axis, reason: str) -> None:
    """Forbid dividing the axis, and all that it is made of."""
    axis = find(axis)
    if not axis.blocked:
        axis.blocked = reason
        for part in axis.parts:
            block(part, reason)


def product(parts: Sequence[Axis]) -> Axis:
    """Return the axis that runs over all `parts`, outermost first, without those that vanish."""
    parts = tuple(p for p in map(find, parts) if not vanishes(p))
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return Axis(1)
    return Axis(prod(p.size for p in parts), "product", parts)


def factors(axis: Axis) -> list[Axis]:
    """Return the product's parts down to leaves and sums, outermost first, without those that vanish."""
    axis = find(axis)
    if axis.kind == "product":
        return [f for part in axis.parts for f in factors(part)]
    return [] if vanishes(axis) else [axis]


def leaves(axis: Axis) -> Iterator[Axis]:
    """Every leaf below the axis."""
    axis = find(axis)
    if axis.kind == "leaf":
        yield axis
    for part in axis.parts:
        yield from leaves(part)


def refine(axis: Axis, kind: str, parts: tuple[Axis, ...]) -> None:
    """Say of a leaf that it is the product or sum of `parts`."""
    axis = find(axis)
    assert axis.kind == "leaf"
    axis.kind, axis.parts = kind, parts
    for part in parts:
        part.copied = axis.copied
        if axis.blocked:
            block(part, axis.blocked)


def _split_off(axis: Axis, outer: int) -> tuple[Axis, Axis] | None:
    """Split a leaf or a sum into [outer, rest]; None where its structure does not allow it."""
    if axis.size % outer or axis.kind == "ragged":
        return None
    if axis.kind == "sum":
        return _split_sum(axis, axis.size // outer)
    pair = (Axis(outer), Axis(axis.size // outer))
    refine(axis, "product", pair)
    return pair


def _split_sum(axis: Axis, inner: int) -> tuple[Axis, Axis] | None:
    """Rewrite a sum of segments, each a multiple of `inner`, as (sum of outer parts) * inner."""
    if any(part.size % inner for part in axis.parts):
        return None
    outers, shared = [], Axis(inner)
    for part in axis.parts:
        pieces = regroup([part], [part.size // inner, inner])
        if pieces is None:
            return None
        outers.append(pieces[0])
        unify(pieces[1], shared)
    outer = Axis(axis.size // inner, "sum", tuple(outers), axis.blocked)
    axis.kind, axis.parts = "product", (outer, find(shared))
    return outer, find(shared)


def regroup(axes: Sequence[Axis], sizes: Sequence[int]) -> list[Axis] | None:
    """Regroup dimensions `axes` into dimensions of `sizes`, as ``view`` does, refining them; None if factors cross."""
    pending = [f for axis in axes for f in factors(axis)][::-1]
    result: list[Axis] = []
    for size, following in zip_longest(sizes, sizes[1:]):
        taken: list[Axis] = []
        left = size
        while left != 1:
            if not pending:
                return None
            factor = find(pending.pop())
            if factor.kind == "product":  # refined by a split on the way
                pending.extend(reversed(factors(factor)))
                continue
            if left % factor.size == 0:
                taken.append(factor)
                left //= factor.size
                continue
            pair = _split_off(factor, left)
            if pair is None:
                return None
            taken.append(pair[0])
            pending.append(pair[1])
            left = 1
        here = size == 1 or following != 1  # or it is the next dimension
        if pending and pending[-1].size == 1 and here:
            taken.append(pending.pop())
        result.append(product(taken))
    return result if not pending else None


def segment(axis: Axis, bounds: Sequence[int]) -> list[Axis] | None:
    """Cut the axis at `bounds` (ascending, 0 and size left out) into consecutive segments; None if it cannot be."""
    axis = find(axis)
    bounds = [b for b in bounds if 0 < b < axis.size]
    if not bounds:
        return [axis]
    if axis.kind == "product":  # on whole steps of its outermost factor
        first, *rest = factors(axis)
        inner = axis.size // first.size
        fits = not any(b % inner for b in bounds)
        pieces = segment(first, [b // inner for b in bounds]) if fits else None
        return pieces and [product([piece, *rest]) for piece in pieces]
    if axis.kind == "ragged":
        return None
    if axis.kind == "leaf":
        refine(axis, "sum", tuple(Axis(high - low) for low, high in pairwise([0, *bounds, axis.size])))
    return _segment_sum(axis, bounds)


def _segment_sum(axis: Axis, bounds: Sequence[int]) -> list[Axis] | None:
    """Cut an existing sum further; groups of whole segments between two bounds become one (sum) axis."""
    pieces: list[Axis] = []
    start = 0
    for part in axis.parts:
        inside = segment(part, [b - start for b in bounds])
        if inside is None:
            return None
        pieces += inside
        start += part.size
    axis.parts = tuple(pieces)
    ends = accumulate(piece.size for piece in pieces)
    groups = [tuple(group) for _, group in groupby(pieces, lambda _: bisect_left(bounds, next(ends)))]
    return [g[0] if len(g) == 1 else Axis(sum(p.size for p in g), "sum", g) for g in groups]


def unify(a: Axis, b: Axis) -> None:
    """Make two axes of one size the same; where their structures contradict each other, block both."""
    a, b = sorted((find(a), find(b)), key=lambda axis: ("leaf", "product", "sum", "ragged").index(axis.kind))
    if a is b:
        return
    assert a.size == b.size, (a, b)
    if a.size == 1:
        if a.kept and b.kept:
            _merge(a, b)
        return
    if _is_factor(a, b):
        return
    if a.kind == "leaf":
        _merge(a, b)
        return
    left: Sequence[Axis] | None
    right: Sequence[Axis] | None
    if b.kind == "ragged":
        left = right = None
    elif a.kind == "sum":
        bounds = sorted({end for axis in (a, b) for end in accumulate(part.size for part in axis.parts)})
        left, right = _segment_sum(a, bounds), _segment_sum(b, bounds)
    else:  # `b` may be one sum, which then must factor
        left = factors(a)
        right = regroup([b], [part.size for part in left])
    if left is None or right is None:
        reason = f"it is both {a} and {b}, which do not nest"
        block(a, reason)
        block(b, reason)
        return
    for pair in zip(left, right, strict=True):
        unify(*pair)
    a, b = find(a), find(b)
    if a is not b and not _is_factor(a, b):  # it may have become one
        _merge(a, b)


def _merge(a: Axis, b: Axis) -> None:
    a.parent = b
    if a.kind == "leaf" and not a.copied:  # of a product or a sum the parts have met those of `b` already
        for leaf in leaves(b):
            leaf.copied = False
    if a.blocked:
        block(b, a.blocked)


def _is_factor(a: Axis, b: Axis) -> bool:
    """Whether one is a factor of the other, of its size: that has a kept factor of size 1 beside it."""
    return a in factors(b) or b in factors(a)
