"""The share that one tensor rank holds of a value: all of it, its part, or one term of a sum.

The static proof walks a stage and gives every value its placement on the tensor axis, from the parameters' placements
alone, so that it judges an edited text like any other. A segment's `size` is here the rank's own. Below are the rules
that several operators have in common.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from torch import fx

from autoptd.passes.ir.nodes import argument, shape_of, walk
from autoptd.runtime.program.placement import AxisPlacement, Parameter, Partial, Replicate, Segment, Shard


class ShareError(Exception):
    """Tensor ranks that would compute something else than the undivided program: the first place found."""


@dataclass(frozen=True, repr=False)
class Unknown(AxisPlacement):
    """A value that an unfamiliar operator makes of divided ones; the proof has nothing to say about it."""

    word = "unknown"


WHOLE = Replicate()
PARTIAL = Partial()
UNKNOWN = Unknown()
DIVIDED = Shard()  # along a dimension that is not known

Share = AxisPlacement
Found = Share | tuple[Share, ...]  # of an operator with several results, one share each
Shares = Mapping[fx.Node, Found]
# Operators whose rows may be copies of one.
COPYING = frozenset(["expand", "expand_as", "broadcast_to", "repeat", "repeat_interleave", "cat"])


def share_of(parameter: Parameter, tensor: int) -> Share:
    """Return what each of `tensor` ranks holds of a parameter."""
    on_tensor = parameter.placement["tensor"]
    if on_tensor.dim is None:
        return WHOLE
    segments = (replace(s, size=s.size // tensor) if s.divided else s for s in on_tensor.segments)
    return Shard(on_tensor.dim, tuple(segments), parameter.shape[on_tensor.dim])


def is_mixed(share: Share) -> bool:
    """Return whether some rows are whole although others are divided."""
    return any(not segment.divided for segment in share.segments)


def describe_runs(share: Share) -> tuple[tuple[int, int, bool], ...]:
    """Return how the rows lie in memory: (repeats, rows of one run, divided), neighbours of one length joined."""
    found: list[tuple[int, int, bool]] = []
    for part in share.segments:
        count, run = (part.outer, part.size * part.inner) if part.divided else (1, part.rows)
        last = found[-1] if found else (0, 0, not part.divided)
        if last[2] is not part.divided or (part.divided and last[1] != run):
            found.append((count, run, part.divided))
        else:
            found[-1] = (last[0] + count, run, True) if part.divided else (1, last[1] + run, False)
    return tuple(found)


def regroup(share: Share, old: Sequence[int], new: Sequence[int]) -> Share:
    """Return the share of a tensor of local shape `old` that is viewed as `new`."""
    if share.dim is None:
        return share
    if tuple(old) == tuple(new) and not any(part.divided and part.size == 1 for part in share.segments):
        return share
    size, stride = old[share.dim], prod(old[share.dim + 1 :])
    steps = [(dim, prod(new[dim + 1 :]), extent) for dim, extent in enumerate(new)]
    before = [(prod(old[dim + 1 :]), extent) for dim, extent in enumerate(old)]
    # A rank's only row may be counted to either neighbour; and of several dimensions of size 1 in its place there is
    # no telling which it is.
    edges = {stride * part.inner for part in share.segments if part.divided and part.size == 1}
    if tuple(old) == tuple(new):  # which counts it to a neighbour, if it does anything
        clear = False
    elif size > 1:
        clear = bool(share.segments) and not any(extent == 1 and step in edges for _, step, extent in steps)
    else:
        after = [(step, extent) for _, step, extent in steps]
        clear = bool(share.segments) and before.count((stride, 1)) == after.count((stride, 1)) == 1
    if clear:
        for dim, step, extent in steps:
            if (step, extent) == (stride, size):
                return replace(share, dim=dim)
            parts = _regroup_parts(share, stride, step, extent) if size > 1 else ()
            if parts:
                return Shard(dim, parts)
    return UNKNOWN if is_mixed(share) else DIVIDED


def _regroup_parts(share: Share, stride: int, step: int, extent: int) -> tuple[Segment, ...]:
    """Return the parts in a dimension of `extent` rows of `step` elements; () where they do not lie in it.

    `stride` are the elements of one row so far.
    """
    top = step * extent
    if len(share.segments) > 1:
        scaled = [_scale(part, stride, step) for part in share.segments]
        found = tuple(part for part in scaled if part is not None)
        return (
            found if len(found) == len(scaled) and top == stride * sum(p.rows for p in share.segments) else ()
        )
    (part,) = share.segments
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
    """Return the part counted in rows of `step` elements instead of `stride`; None where it ends inside one."""
    if part.divided:
        inner, rest = divmod(part.inner * stride, step)
        return None if rest else replace(part, inner=inner)
    rows, rest = divmod(part.rows * stride, step)
    return None if rest else Segment(1, rows, 1, False)


def take_rows(share: Share, start: int, length: int) -> Share | None:
    """Return the share of `length` local rows from `start` on along the divided dimension.

    None where they are no equal parts of what all ranks hold together: each rank would take other rows.
    """
    if not share.segments:
        return DIVIDED
    taken: list[Segment] = []
    position = 0
    for part in share.segments:
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
    return replace(share, segments=tuple(taken), extent=None)


# What rules read and say


def read(value: Any, shares: Shares) -> Share:
    """Return the share of an argument; numbers and None are whole."""
    found = shares[value] if isinstance(value, fx.Node) else WHOLE
    return found if isinstance(found, Share) else UNKNOWN


def describe(value: Any, shares: Shares) -> str:
    """Name a value and its share: "q, which is divided along dimension 1"."""
    share = read(value, shares)
    return f"{value}, which is {share.word}" + (
        f" along dimension {share.dim}" if share.dim is not None else ""
    )


def spread(node: fx.Node, share: Share) -> Found:
    """Return the same share for each of the node's results."""
    value = node.meta["val"]
    return (share,) * len(value) if isinstance(value, (tuple, list)) else share


def aligned(source: fx.Node, result: Sequence[int], shares: Shares) -> Share:
    """Return the source's share with its dimension counted as in a result of that shape, from the right."""
    share = read(source, shares)
    if share.dim is None:
        return share
    return replace(share, dim=share.dim + len(result) - len(shape_of(source)))


def elementwise(node: fx.Node, shares: Shares) -> Share:
    shape = shape_of(node)
    return merge([(n, aligned(n, shape, shares)) for n in node.all_input_nodes], shape)


def merge(found: Sequence[tuple[fx.Node, Share]], result: Sequence[int]) -> Share:
    """Return the share of a `result` of that shape, given each argument's share with dimensions counted as in it.

    Whole arguments are aligned with the result from the right. Raises `ShareError` where two shares contradict.
    """
    given = [(source, share) for source, share in found if share is not WHOLE]
    if not given:
        return WHOLE
    if any(share is UNKNOWN for _, share in given):
        return UNKNOWN
    (first, one), *rest = given
    for other, share in rest:
        if one.dim is None or share.dim is None:
            one = share if one.dim is None else one
        elif one.dim != share.dim:
            raise ShareError(
                f"combines {first}, divided along dimension {one.dim} of the result, with {other}, divided "
                f"along {share.dim}: expected both divided along the same one"
            )
        elif one.segments and share.segments and describe_runs(one) != describe_runs(share):
            raise ShareError(
                f"combines {first}, of which a tensor rank holds {_layout(one)} rows along dimension {one.dim}, with "
                f"{other}, of which it holds {_layout(share)}: these are other rows; expected one placement for both"
            )
        else:
            one = one if one.segments else share
    for source, share in found:
        if share is WHOLE and one.dim is not None:
            _check_whole_rows(source, first, one.dim, result)
    return one


def _check_whole_rows(source: fx.Node, divided: fx.Node, dim: int, result: Sequence[int]) -> None:
    """Refuse parameters with as many rows as a tensor rank holds of the divided argument: the ranks need others.

    Activations pass: their rows may be copies of one, such as a key head's that all query heads share.
    """
    own = shape_of(source)
    place = dim - len(result) + len(own)
    if place >= 0 and own[place] == result[dim] > 1 and _is_of_parameters(source):
        raise ShareError(
            f"combines {divided}, divided along dimension {dim} of the result, with {source}, which is whole and has "
            f"the same {own[place]} rows there on every rank: expected collectives.take_own(rank, ..., dim={place}) "
            "of all rows"
        )


def _is_of_parameters(source: fx.Node) -> bool:
    """Whether a value is computed from parameters alone, and none of its rows are copies."""
    for node in walk([source]):
        name = str(getattr(node.target, "__name__", "")).split(".")[0]
        if node.op == "placeholder" or not (node.op == "get_attr" or node.all_input_nodes) or name in COPYING:
            return False
    return True


def _layout(share: Share) -> str:
    return " + ".join(f"{outer} x {rows}" for outer, rows, _ in describe_runs(share))


def take(own: fx.Node, share: Share, start: int, length: int) -> Share:
    """Return the share of `length` local rows of `own`. Raises `ShareError` where each rank takes other rows."""
    taken = take_rows(share, start, length)
    if taken is not None:
        return taken
    raise ShareError(
        f"takes rows {start} to {start + length - 1} along dimension {share.dim} of {own}, where a tensor "
        f"rank holds {_layout(share)} rows: these rows are other ones on each rank; expected an end between two "
        "runs, or another placement"
    )


def check_whole(own: fx.Node, share: Share, dims: Collection[int]) -> None:
    """Raise `ShareError` if one of `dims`, over which an operator runs, is divided."""
    if share.dim in dims:
        raise ShareError(
            f"runs over dimension {share.dim} of {own}, of which each tensor rank holds another part: "
            "expected it whole"
        )


def check_key(share: Share, key: int | None) -> None:
    """Raise `ShareError` for a dropout mask that is keyed as if the tensor were whole, or the other way round."""
    if not isinstance(share, Unknown) and (isinstance(share, Shard)) != (key is not None):
        raise ShareError(
            f"drops elements of a value that is {share.word}, with divided={key}: expected divided="
            + (
                "None"
                if isinstance(share, Replicate)
                else "its divided dimension, so that each rank draws its own part"
            )
        )


def check_vocabulary(node: fx.Node, share: Share) -> None:
    """Raise `ShareError` if a kernel's vocabulary, the rows without padding, is not the parameter's."""
    vocabulary = argument(node, 3, "vocabulary")
    if share.extent is not None and vocabulary != share.extent:
        raise ShareError(
            f"has vocabulary={vocabulary}, where {node.args[1]} has {share.extent} rows without padding in the "
            f"manifest: expected vocabulary={share.extent}"
        )


# Partial sums


def refuse_partial(node: fx.Node, shares: Shares) -> Found:
    """Raise `ShareError` if an argument is a partial sum: only linear operators may read it before it is summed."""
    for term in node.all_input_nodes:
        found = shares[term]
        if PARTIAL in (found if isinstance(found, tuple) else (found,)):
            raise ShareError(
                f"uses the partial sum {term.name} before its all-reduce: expected "
                f"collectives.reduce_from_tensor(rank, {term.name})"
            )
    return UNKNOWN


def keep_partial(node: fx.Node, shares: Shares) -> Found:
    return spread(node, PARTIAL)


def scale_partial(node: fx.Node, shares: Shares) -> Found:
    """Keep a partial sum partial when a number multiplies or divides it."""
    first, second = node.args[:2]
    scales = read(first, shares) is PARTIAL and isinstance(second, (int, float))
    return PARTIAL if scales else refuse_partial(node, shares)


def add_partial(node: fx.Node, shares: Shares) -> Found:
    """Two partial sums add up to one; anything else would be counted on every tensor rank."""
    first, second = (*node.args, None, None)[:2]
    one, other = read(first, shares), read(second, shares)
    if one is other is PARTIAL:
        return PARTIAL
    if UNKNOWN in (one, other):
        return UNKNOWN
    raise ShareError(
        f"adds {describe(second if one is PARTIAL else first, shares)}, to the partial sum "
        f"{first if one is PARTIAL else second}, so that it would be counted on every tensor rank: add "
        "it after collectives.reduce_from_tensor(rank, ...)"
    )
