"""Shares through elementwise operators, views, slices and joins: where the divided dimension goes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from autoptd.check.shares import UNKNOWN, WHOLE, Found, Rule, Share, ShareError, Shares, regroup, take_rows
from autoptd.passes.ir.nodes import argument, shape_of, walk
from autoptd.runtime.program.placement import Segment

COPYING = frozenset(["expand", "expand_as", "broadcast_to", "repeat", "repeat_interleave", "cat"])
Move = Callable[[fx.Node, int, int], int | None]


def read(value: Any, shares: Shares) -> Share:
    """Return the share of an argument; a number, or None, is whole."""
    found = shares[value] if isinstance(value, fx.Node) else WHOLE
    return found if isinstance(found, Share) else UNKNOWN


def describe(value: Any, shares: Shares) -> str:
    """Describe a share: "q, which is divided along dimension 1"."""
    share = read(value, shares)
    return f"{value}, which is {share.kind}" + (
        f" along dimension {share.dim}" if share.dim is not None else ""
    )


def spread(node: fx.Node, share: Share) -> Found:
    """Return the same share for each of the node's results."""
    value = node.meta["val"]
    return (share,) * len(value) if isinstance(value, (tuple, list)) else share


# Elementwise operators: dimensions align from the right.


def elementwise(node: fx.Node, shares: Shares) -> Share:
    shape = shape_of(node)
    return merge([(n, aligned(n, shape, shares)) for n in node.all_input_nodes], shape)


def aligned(source: fx.Node, result: Sequence[int], shares: Shares) -> Share:
    """Return the source's share, its dimension numbered as in a result of that shape."""
    share = read(source, shares)
    if share.dim is None:
        return share
    return replace(share, dim=share.dim + len(result) - len(shape_of(source)))


def merge(found: Sequence[tuple[fx.Node, Share]], result: Sequence[int]) -> Share:
    """Join the shares of the arguments in a `result` of that shape, their dimensions numbered as in it.

    Whole arguments are aligned with the result from the right.
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
        elif one.parts and share.parts and one.runs != share.runs:
            raise ShareError(
                f"combines {first}, of which a tensor rank holds {_layout(one)} rows along dimension {one.dim}, with "
                f"{other}, of which it holds {_layout(share)}: these are other rows; expected one placement for both"
            )
        else:
            one = one if one.parts else share
    for source, share in found:
        if share is WHOLE and one.dim is not None:
            _check_whole_rows(source, first, one.dim, result)
    return one


def _check_whole_rows(source: fx.Node, divided: fx.Node, dim: int, result: Sequence[int]) -> None:
    """Refuse parameters with as many rows as a tensor rank holds of the divided argument: the ranks need others.

    Activations are let pass: their rows may be copies of one, such as a key head's that all query heads share.
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
    return " + ".join(f"{outer} x {rows}" for outer, rows, _ in share.runs)


# Shape operators


def view(node: fx.Node, shares: Shares) -> Share:
    own: Any = node.args[0]
    return regroup(read(own, shares), shape_of(own), shape_of(node))


def moving(move: Move) -> Rule:
    """Return the rule of an operator that moves dimensions; ``move(node, dim, rank)`` says where to, None: away."""

    def rule(node: fx.Node, shares: Shares) -> Found:
        own: Any = node.args[0]
        share = read(own, shares)
        if share.dim is None:
            return spread(node, share)
        to = move(node, share.dim, len(shape_of(own)))
        return spread(node, UNKNOWN if to is None else replace(share, dim=to))

    return rule


def transposed(node: fx.Node, dim: int, rank: int) -> int:
    pair = [int(d) % rank for d in node.args[1:3]] or [0, rank - 1]  # type: ignore[arg-type]
    return pair[1 - pair.index(dim)] if dim in pair else dim


def permuted(node: fx.Node, dim: int, rank: int) -> int:
    return [int(d) % rank for d in node.args[1]].index(dim)  # type: ignore[union-attr, arg-type]


def unsqueezed(node: fx.Node, dim: int, rank: int) -> int:
    return dim + (int(node.args[1]) % (rank + 1) <= dim)  # type: ignore[arg-type]


def squeezed(node: fx.Node, dim: int, rank: int) -> int | None:
    given: Any = argument(node, 1, "dim", list(range(rank)))
    shape = shape_of(node.args[0])  # type: ignore[arg-type]
    dropped = {d % rank for d in ([given] if isinstance(given, int) else given) if shape[d] == 1}
    return None if dim in dropped else dim - sum(d < dim for d in dropped)


def selected(node: fx.Node, dim: int, rank: int) -> int | None:
    """``select`` and ``unbind``: one dimension goes."""
    gone = int(argument(node, 1, "dim", 0)) % rank
    return None if gone == dim else dim - (gone < dim)


def expanded(node: fx.Node, dim: int, rank: int) -> int:
    return dim + len(shape_of(node)) - rank


def kept(node: fx.Node, dim: int, rank: int) -> int | None:
    """Padding and picking: a dimension of another size is a new one."""
    own: Any = node.args[0]
    same = len(shape_of(node)) == rank and shape_of(node)[dim] == shape_of(own)[dim]
    return dim if same else None


def paired(node: fx.Node, dim: int, rank: int) -> int | None:
    """``view_as_complex`` and ``view_as_real``: the last dimension goes, or comes."""
    return dim if dim < len(shape_of(node)) else None


def sliced(node: fx.Node, shares: Shares) -> Share:
    own: Any = node.args[0]
    share, shape = read(own, shares), shape_of(own)
    dim = int(argument(node, 1, "dim", 0)) % len(shape)
    if share.dim != dim:
        return share
    if argument(node, 4, "step", 1) != 1:
        return UNKNOWN
    start = int(argument(node, 2, "start") or 0)
    return take(own, share, start % shape[dim] if start < 0 else start, shape_of(node)[dim])


def split(node: fx.Node, shares: Shares) -> Found:
    own: Any = node.args[0]
    share = read(own, shares)
    dim = int(argument(node, 2, "dim", 0)) % len(shape_of(own))
    if share.dim != dim:
        return spread(node, share)
    found, start = [], 0
    for value in node.meta["val"]:
        found.append(take(own, share, start, value.shape[dim]))
        start += value.shape[dim]
    return tuple(found)


def take(own: fx.Node, share: Share, start: int, length: int) -> Share:
    """Return the share of `length` local rows of `own`. Raises ShareError if they differ on each rank."""
    taken = take_rows(share, start, length)
    if taken is not None:
        return taken
    raise ShareError(
        f"takes rows {start} to {start + length - 1} along dimension {share.dim} of {own}, where a tensor "
        f"rank holds {_layout(share)} rows: these rows are other ones on each rank; expected an end between two "
        "runs, or another placement"
    )


def getitem(node: fx.Node, shares: Shares) -> Share:
    own: Any = node.args[0]
    index: Any = node.args[1]
    found = shares[own]
    return found[index] if isinstance(found, tuple) else UNKNOWN


def joined(node: fx.Node, shares: Shares) -> Share:
    """``cat``: along the divided dimension the parts add up."""
    values: Any = node.args[0]  # not all_input_nodes: a value may be there twice
    sources = [n for n in values if n.meta["val"].numel()]
    dim = int(argument(node, 1, "dim", 0)) % len(shape_of(node))
    given = [read(n, shares) for n in sources]
    if all(share.dim != dim for share in given):
        return merge(list(zip(sources, given, strict=True)), shape_of(node))
    parts: list[Segment] = []
    for source, share in zip(sources, given, strict=True):
        if share is not WHOLE and not (share.dim == dim and share.parts):
            return UNKNOWN
        parts += share.parts or (Segment(1, shape_of(source)[dim], 1, False),)
    return Share("divided", dim, tuple(parts))


def stacked(node: fx.Node, shares: Shares) -> Share:
    share = merge([(n, read(n, shares)) for n in node.all_input_nodes], shape_of(node.all_input_nodes[0]))
    dim = int(argument(node, 1, "dim", 0)) % len(shape_of(node))
    return share if share.dim is None else replace(share, dim=share.dim + (dim <= share.dim))


def repeated(node: fx.Node, shares: Shares) -> Share:
    """``repeat_interleave``: each row several times in a row."""
    share, dim, times = read(node.args[0], shares), argument(node, 2, "dim"), node.args[1]
    if dim is None or not isinstance(times, int):
        return UNKNOWN
    if share.dim != dim % len(shape_of(node)):
        return share
    parts = tuple(replace(part, inner=part.inner * times) for part in share.parts)
    return replace(share, parts=parts, extent=None)
