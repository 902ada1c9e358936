"""The static proof's placements: a tensor rank holds a whole value, its part, or one term of a sum.

The proof walks a stage and gives every value its placement on the tensor axis, from the parameters' placements
alone, so that it judges an edited text like any other. A segment's `size` is here the rank's own. Common rules follow.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod
from typing import Any

from torch import fx

from autoptd.passes.ir.nodes import argument, as_results, results_of, shape_of, walk
from autoptd.passes.operators.quantities import tensor_arguments
from autoptd.runtime.program.placement import AxisPlacement, Parameter, Partial, Ragged, Replicate, Segment, Shard


class PlacementError(Exception):
    """Tensor ranks that would compute something else than the undivided program: the first place found."""


@dataclass(frozen=True, repr=False)
class Unknown(AxisPlacement):
    """A value that an unfamiliar operator makes of divided ones; the proof has nothing to say about it."""

    word = "unknown"


WHOLE = Replicate()
PARTIAL = Partial()
UNKNOWN = Unknown()
DIVIDED = Shard()  # along a dimension that is not known

Found = AxisPlacement | tuple[AxisPlacement, ...]  # of an operator with several results, one placement each
Placements = Mapping[fx.Node, Found]
Rule = Callable[[fx.Node, Placements], Found]
# Operators whose rows may be copies of one.
COPYING = frozenset(["expand", "expand_as", "broadcast_to", "repeat", "repeat_interleave", "cat"])


def place_parameter(parameter: Parameter, sizes: Mapping[str, int]) -> AxisPlacement:
    """Return what each rank holds of a parameter, on a mesh whose axes have these `sizes`."""
    axis = parameter.placement.axis
    on_axis, size = parameter.placement[axis], sizes[axis]
    if on_axis.dim is None:
        return WHOLE
    segments = (replace(s, size=s.size // size) if s.divided else s for s in on_axis.segments)
    return Shard(on_axis.dim, tuple(segments), parameter.shape[on_axis.dim])


def is_mixed(placement: AxisPlacement) -> bool:
    """Return whether some rows are whole although others are divided."""
    return any(not segment.divided for segment in placement.segments)


def describe_runs(placement: AxisPlacement) -> tuple[tuple[int, int, bool], ...]:
    """Return how the rows lie in memory: (repeats, rows of one run, divided), neighbours of one length joined."""
    runs = groupby(placement.segments, lambda part: part.size * part.inner if part.divided else 0)
    return tuple(
        (sum(part.outer for part in parts), run, True) if run else (1, sum(part.rows for part in parts), False)
        for run, parts in runs
    )


def regroup(placement: AxisPlacement, old: Sequence[int], new: Sequence[int]) -> AxisPlacement:
    """Return the placement of a tensor of local shape `old` that is viewed as `new`."""
    if placement.dim is None:
        return placement
    if tuple(old) == tuple(new) and not any(part.divided and part.size == 1 for part in placement.segments):
        return placement
    size, stride = old[placement.dim], prod(old[placement.dim + 1 :])
    before = [(prod(old[dim + 1 :]), extent) for dim, extent in enumerate(old)]
    after = [(prod(new[dim + 1 :]), extent) for dim, extent in enumerate(new)]
    # A rank's only row may be counted to either neighbour; and of several dimensions of size 1 in its place there is
    # no telling which it is.
    edges = {stride * part.inner for part in placement.segments if part.divided and part.size == 1}
    if tuple(old) == tuple(new):  # which counts it to a neighbour, if it does anything
        clear = False
    elif size > 1:
        clear = not any(extent == 1 and step in edges for step, extent in after)
    else:
        clear = before.count((stride, 1)) == after.count((stride, 1)) == 1
    if clear and placement.segments:
        for dim, (step, extent) in enumerate(after):
            if (step, extent) == (stride, size):
                return replace(placement, dim=dim)
            parts = _regroup_parts(placement, stride, step, extent) if size > 1 else ()
            if parts:
                return Shard(dim, parts)
    return UNKNOWN if is_mixed(placement) else DIVIDED


def _regroup_parts(placement: AxisPlacement, stride: int, step: int, extent: int) -> tuple[Segment, ...]:
    """Return the parts in a dimension of `extent` rows of `step` elements; () where they do not lie in it.

    `stride` are the elements of one row so far.
    """
    top = step * extent
    if len(placement.segments) > 1:
        scaled = [_scale(part, stride, step) for part in placement.segments]
        found = tuple(part for part in scaled if part is not None)
        fills = top == stride * sum(part.rows for part in placement.segments)
        return found if fills and len(found) == len(scaled) else ()
    (part,) = placement.segments
    start = stride * part.inner
    end = start * part.size
    if part.outer == 1 and start % step and end % step == 0:  # one run, of whatever rows
        part, start = Segment(1, end // step, 1, True), step
    if part.size == 1:
        inside = step < end <= top and (end < top or part.outer == 1) and end % step == 0
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


# What rules read and say


def read(value: Any, placements: Placements) -> AxisPlacement:
    """Return the placement of an argument; numbers and None are whole."""
    found = placements[value] if isinstance(value, fx.Node) else WHOLE
    return found if isinstance(found, AxisPlacement) else UNKNOWN


def describe(value: Any, placements: Placements) -> str:
    """Name a value and its placement: "q, which is divided along dimension 1"."""
    placement = read(value, placements)
    along = "" if placement.dim is None else f" along dimension {placement.dim}"
    return f"{value}, which is {placement.word}{along}"


def misplaced(does: str, value: Any, placements: Placements, expected: str) -> PlacementError:
    """Return the error of a call that ``does`` something to a value with another placement than `expected`."""
    return PlacementError(f"{does} {describe(value, placements)}: expected {expected}")


def spread(node: fx.Node, placement: AxisPlacement) -> Found:
    """Return the same placement for each of the node's results."""
    return as_results(node, [placement] * len(results_of(node)))  # type: ignore[no-any-return]


def aligned(source: fx.Node, result: Sequence[int], placements: Placements) -> AxisPlacement:
    """Return the source's placement with its dimension counted as in a result of that shape, from the right."""
    placement = read(source, placements)
    if placement.dim is None:
        return placement
    return replace(placement, dim=placement.dim + len(result) - len(shape_of(source)))


def elementwise(node: fx.Node, placements: Placements) -> AxisPlacement:
    shape = shape_of(node)
    return merge([(n, aligned(n, shape, placements)) for n in tensor_arguments(node)], shape)


def merge(found: Sequence[tuple[fx.Node, AxisPlacement]], result: Sequence[int]) -> AxisPlacement:
    """Return the placement of a `result` of that shape, given the arguments' with dimensions counted as in it.

    Whole arguments are aligned with the result from the right. Raises `PlacementError` where two placements contradict.
    """
    given = [(source, placement) for source, placement in found if placement is not WHOLE]
    if not given:
        return WHOLE
    if any(placement is UNKNOWN for _, placement in given):
        return UNKNOWN
    (first, one), *rest = given
    for other, placement in rest:
        if one.dim is None or placement.dim is None:
            one = placement if one.dim is None else one
        elif one.dim != placement.dim:
            raise PlacementError(
                f"combines {first}, divided along dimension {one.dim} of the result, with {other}, divided "
                f"along {placement.dim}: expected both divided along the same one"
            )
        elif isinstance(one, Ragged) is not isinstance(placement, Ragged):
            raise PlacementError(
                f"combines {first}, which is {one.word}, with {other}, which is {placement.word}: these are other rows"
            )
        elif one.segments and placement.segments and describe_runs(one) != describe_runs(placement):
            raise PlacementError(
                f"combines {first}, of which a tensor rank holds {_layout(one)} rows along dimension {one.dim}, with "
                f"{other}, of which it holds {_layout(placement)}: these are other rows; "
                "expected one placement for both"
            )
        else:
            one = one if one.segments else placement
    for source, placement in found:
        if placement is WHOLE and one.dim is not None:
            _check_whole_rows(source, first, one.dim, result)
    return one


def _check_whole_rows(source: fx.Node, divided: fx.Node, dim: int, result: Sequence[int]) -> None:
    """Refuse parameters with as many rows as a tensor rank holds of the divided argument: the ranks need others.

    Activations pass: their rows may be copies of one, such as a key head's that all query heads share.
    """
    own = shape_of(source)
    place = dim - len(result) + len(own)
    if place >= 0 and own[place] == result[dim] > 1 and _is_of_parameters(source):
        raise PlacementError(
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


def _layout(placement: AxisPlacement) -> str:
    return " + ".join(f"{outer} x {rows}" for outer, rows, _ in describe_runs(placement))


def take(own: fx.Node, placement: AxisPlacement, start: int, length: int) -> AxisPlacement:
    """Return the placement of `length` local rows of `own` from `start` on along the divided dimension.

    PlacementError where they are no equal parts of what all ranks hold together: each rank would take other rows.
    """
    if not placement.segments:
        return DIVIDED
    taken: list[Segment] = []
    position = 0
    for part in placement.segments:
        first, last = max(start, position), min(start + length, position + part.rows)
        first, last, position = first - position, last - position, position + part.rows
        if first >= last:
            continue
        run = part.size * part.inner
        if not part.divided:
            taken.append(Segment(1, last - first, 1, False))
        elif first % run == last % run == 0:
            taken.append(replace(part, outer=(last - first) // run))
        else:
            raise PlacementError(
                f"takes rows {start} to {start + length - 1} along dimension {placement.dim} of {own}, where a tensor "
                f"rank holds {_layout(placement)} rows: these rows are other ones on each rank; expected an end "
                "between two runs, or another placement"
            )
    if not any(part.divided for part in taken):
        return WHOLE
    return replace(placement, segments=tuple(taken), extent=None)


def check_whole(own: fx.Node, placement: AxisPlacement, dims: Collection[int]) -> None:
    """Raise `PlacementError` if one of `dims`, over which an operator runs, is divided."""
    if placement.dim in dims:
        raise PlacementError(
            f"runs over dimension {placement.dim} of {own}, of which each tensor rank holds another part: "
            "expected it whole"
        )


def check_key(placement: AxisPlacement, key: int | None, shape: Sequence[int] | None = None) -> None:
    """Raise `PlacementError` for draws of a value that are keyed otherwise than it is divided.

    A `shape` in which the value is seen has dimensions of its own.
    """
    right = placement.dim in (None, key) if key is not None and shape is None else True
    if not isinstance(placement, Unknown) and not (right and isinstance(placement, Shard) == (key is not None)):
        own = "its divided dimension, so that each rank draws its own part"
        raise PlacementError(
            f"draws for a value that is {placement.word}, with divided={key}: expected divided="
            f"{'None' if isinstance(placement, Replicate) else own}"
        )


def divided(dim: int | None, found: AxisPlacement | None, whole: str) -> Rule:
    """Return the rule of a kernel of a vocabulary, `dim` of its argument after the rank, that is divided.

    Without `dim` the call names it. The result is placed as `found`, or like the argument; `whole` is the other reader.
    """

    def rule(node: fx.Node, placements: Placements) -> Found:
        own: Any = node.args[1]
        placement = read(own, placements)
        along = argument(node, "dim", -1) if dim is None else dim
        along %= len(shape_of(own))
        if isinstance(placement, Unknown | Shard) and placement.dim in (along, None):
            vocabulary = argument(node, "vocabulary")
            if placement.extent is not None and vocabulary != placement.extent:
                raise PlacementError(
                    f"has vocabulary={vocabulary}, where {own} has {placement.extent} rows without padding in the "
                    f"manifest: expected vocabulary={placement.extent}"
                )
            return spread(node, placement) if found is None else found
        expected = f"it divided along dimension {along}, the vocabulary; use {whole} for a whole one"
        raise misplaced("reads", own, placements, expected)

    return rule


# Partial sums


def refuse_partial(node: fx.Node, placements: Placements) -> Found:
    """Raise `PlacementError` if an argument is a partial sum: only linear operators may read it before it is summed."""
    for term in node.all_input_nodes:
        found = placements[term]
        if PARTIAL in (found if isinstance(found, tuple) else (found,)):
            raise PlacementError(
                f"uses the partial sum {term.name} before its all-reduce: expected "
                f"collectives.reduce_from_tensor(rank, {term.name})"
            )
    return UNKNOWN


def keep_partial(node: fx.Node, placements: Placements) -> Found:
    return spread(node, PARTIAL)


def linear_in(*places: int) -> Rule:
    """Return the rule of an operator of two arguments that is linear in each at `places`: a partial sum stays one."""

    def rule(node: fx.Node, placements: Placements) -> Found:
        found = [read(given, placements) for given in node.args]
        kept = len(found) == 2 and any(found[at] is PARTIAL and found[1 - at] is WHOLE for at in places)
        return PARTIAL if kept else refuse_partial(node, placements)

    return rule


def add_partial(node: fx.Node, placements: Placements) -> Found:
    """Two partial sums add up to one; anything else would be counted on every tensor rank."""
    first, second = (*node.args, None, None)[:2]
    one, other = read(first, placements), read(second, placements)
    if one is other is PARTIAL:
        return PARTIAL
    if UNKNOWN in (one, other):
        return UNKNOWN
    raise PlacementError(
        f"adds {describe(second if one is PARTIAL else first, placements)}, to the partial sum "
        f"{first if one is PARTIAL else second}, so that it would be counted on every tensor rank: add "
        "it after collectives.reduce_from_tensor(rank, ...)"
    )
