"""Views and cuts, read from the calls that compute them, and the bytes that operators copy for want of a view."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from autoptd.passes.ir.nodes import argument, operator_name, results_of, shape_of, where


def read_dim(node: fx.Node, rank: int) -> int:
    """Return the dimension that a call names, counted from the front of `rank` dimensions."""
    return int(argument(node, "dim")) % rank


def reduced_dims(node: fx.Node, rank: int) -> list[int]:
    """Return the dimensions that a reduction of `rank` dimensions is over."""
    given = argument(node, "dim") if rank else None
    listed = range(rank) if given in (None, []) else [given] if isinstance(given, int) else given
    return [d % rank for d in listed]


def dim_map(node: fx.Node) -> tuple[int | None, ...]:
    """Return which dimension of its first argument each dimension of a view's result is; None for a new one.

    Of operators that move, drop, add, resize or reduce single dimensions; those of the argument that the result lacks
    are dropped, and one that it has in another size is new. Of several results all are alike.
    """
    own, shape = shape_of(node.args[0]), tuple(results_of(node)[0].shape)  # type: ignore[arg-type]
    rank, name = len(own), operator_name(node.target).removeprefix("aten.")
    dims: list[int | None] = list(range(rank))
    operator: Any = node.target
    if name == "unsqueeze":
        dims.insert(read_dim(node, rank + 1), None)
    elif "expand" in name or "broadcast" in name:  # a new dimension of size 1 has a stride as others have
        dims[:0] = [None] * (len(shape) - rank)
    elif name in ("pad", "constant_pad_nd"):
        dims = [None if any(pair) else d for d, pair in enumerate(read_padding(node))]
    elif getattr(operator, "is_view", False) and not name.startswith("view_as_"):
        strides = [d + 1 for d in range(rank)]  # by which a dimension is known again: a view keeps them
        made = operator(torch.empty_strided(own, strides, device="meta"), *node.args[1:], **node.kwargs)
        found = (made if isinstance(made, Tensor) else made[0]).stride()
        dims = [stride - 1 if stride else None for stride in found]
    elif not shape or "keepdim" in str(getattr(operator, "_schema", "")):
        gone = reduced_dims(node, rank)
        dims = [None if d in gone else d for d in dims if d not in gone or len(shape) == rank]
    else:  # norms keep all; view_as_complex and view_as_real drop or add the last
        dims = [*dims, None][: len(shape)]
    return tuple(d if d is not None and own[d] == size else None for d, size in zip(dims, shape, strict=True))


def read_padding(node: fx.Node) -> list[tuple[int, int]]:
    """Return the rows that padding adds before and behind each dimension."""
    given: Any = node.args[1]
    pairs = [(int(before), int(behind)) for before, behind in zip(given[::2], given[1::2], strict=True)]
    return [(0, 0)] * (len(shape_of(node)) - len(pairs)) + pairs[::-1]


@dataclass(frozen=True)
class Cut:
    """Rows of dimension `dim`: from `start` on, with `step`, as many as `lengths` says for each result."""

    dim: int
    start: int
    lengths: tuple[int, ...]
    step: int = 1


def read_cut(node: fx.Node) -> Cut:
    """Return the rows that a slice, a split or the like takes. Raises ValueError for a start that is a tensor."""
    own, made = shape_of(node.args[0]), node.meta["val"]  # type: ignore[arg-type]
    if isinstance(made, (tuple, list)):
        dim = read_dim(node, len(own))
        return Cut(dim, 0, tuple(int(value.shape[dim]) for value in made))
    dim, start = read_dim(node, len(own)), argument(node, "start") or 0
    if isinstance(start, fx.Node):
        raise ValueError(f"{where(node)}: {node.target} begins at a tensor: give a number, or index_select")
    step = argument(node, "step", 1)
    return Cut(dim, max(0, start + own[dim]) if start < 0 else start, (made.shape[dim],), step)


def is_view(x: Tensor, shape: Sequence[int]) -> bool:
    """Return whether `x` can be viewed as `shape` without a copy."""
    if x.is_contiguous():
        return True
    try:
        x.view(tuple(shape))
    except RuntimeError:
        return False
    return True


def is_matrix(x: Tensor) -> bool:
    """Return whether a matrix product can read the last two dimensions as they lie."""
    if x.dim() < 2:
        return x.stride(-1) == 1
    (rows, columns), (row, column) = x.shape[-2:], x.stride()[-2:]
    if columns == 1 or rows == 1:
        return column == 1 or row == 1 or columns == rows
    return (column == 1 and row >= columns) or (row == 1 and column >= rows)


def float_bytes(x: Tensor) -> int:
    return x.nbytes if x.is_floating_point() else 0


def contiguous_copies(given: Sequence[Any], value: Any) -> int:
    return 0 if given[0].is_contiguous() else float_bytes(given[0])
