"""The division of one tensor over the tensor ranks, as plain data, and the slicing that it means."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Segment:
    """Consecutive rows of a dimension, viewed as [outer, size, inner] (row-major).

    Where `divided`, tensor rank i owns the i-th of t equal runs of the middle axis, for every outer index;
    otherwise every rank holds all rows. A packed [3 * heads * head_size] projection is one segment
    (3, heads, head_size).
    """

    outer: int
    size: int
    inner: int
    divided: bool

    @property
    def rows(self) -> int:
        return self.outer * self.size * self.inner


@dataclass(frozen=True)
class Rows:
    """Rows `first` to ``first + count`` of a tensor: those from `local` on of a rank's slice.

    They are `shared` if all tensor ranks hold them.
    """

    first: int
    local: int
    count: int
    shared: bool


@dataclass(frozen=True)
class Placement:
    """The division of a tensor on the tensor axis: replicated (`dim` None), or divided along `dim`.

    The segments' rows add up to the dimension's global size plus `padding` zero rows that exist in memory only
    (an odd vocabulary).
    """

    dim: int | None = None
    segments: tuple[Segment, ...] = ()
    padding: int = 0

    def local_shape(self, shape: Sequence[int], tensor: int) -> tuple[int, ...]:
        """One rank's shape of a tensor of global `shape`, for `tensor` ranks."""
        local = list(shape)
        if self.dim is not None:
            local[self.dim] = sum(s.rows // tensor if s.divided else s.rows for s in self.segments)
        return tuple(local)

    def rows(self, size: int, index: int) -> Iterator[Rows]:
        """Yield the rows that tensor rank `index` of `size` holds, in order, of a tensor that is divided.

        The rows of padding are left out: they are the last of the rank's slice.
        """
        first = local = 0
        end = sum(segment.rows for segment in self.segments) - self.padding
        for segment in self.segments:
            step, count = segment.size * segment.inner, segment.rows
            starts = [first]
            if segment.divided:
                count = segment.size // size * segment.inner
                starts = [first + outer * step + index * count for outer in range(segment.outer)]
            for start in starts:
                if start < end and count:
                    yield Rows(start, local, min(count, end - start), not segment.divided)
                local += count
            first += segment.rows

    def take(self, tensor: Tensor, size: int, index: int) -> Tensor:
        """Return the contiguous slice of a global `tensor` that tensor rank `index` of `size` holds."""
        if self.dim is None:
            return tensor.contiguous()
        pieces = [tensor.narrow(self.dim, rows.first, rows.count) for rows in self.rows(size, index)]
        shape = list(self.local_shape(tensor.shape, size))
        shape[self.dim] -= sum(piece.shape[self.dim] for piece in pieces)
        if shape[self.dim] or not pieces:
            pieces.append(tensor.new_zeros(shape))
        return torch.cat(pieces, self.dim) if len(pieces) > 1 else pieces[0].contiguous()

    def runs(self, size: int, index: int) -> list[tuple[int, int]]:
        """Return the rows of `rows` as ascending (first, end), neighbours joined."""
        found: list[tuple[int, int]] = []
        for rows in self.rows(size, index):
            begin = found.pop()[0] if found and found[-1][1] == rows.first else rows.first
            found.append((begin, rows.first + rows.count))
        return found

    def join(self, shards: Sequence[Tensor]) -> Tensor:
        """Return the global tensor of all tensor ranks' shards, in order: the inverse of `take`."""
        if self.dim is None:
            return shards[0]
        shape = list(shards[0].shape)
        shape[self.dim] = sum(segment.rows for segment in self.segments) - self.padding
        whole = shards[0].new_empty(shape)
        for index, shard in reversed(list(enumerate(shards))):  # rows that all hold are the first rank's
            for rows in self.rows(len(shards), index):
                own = shard.narrow(self.dim, rows.local, rows.count)
                whole.narrow(self.dim, rows.first, rows.count).copy_(own)
        return whole


@dataclass(frozen=True)
class Draw:
    """A distribution that an initialisation writes into a tensor's elements: all, or those of `box`.

    "constant" has a `value`, "normal" `mean` and `std`, "uniform" the range `low` to `high`, "truncated_normal" both
    of these. `box` has the first index and the one after the last of every dimension.
    """

    kind: Literal["constant", "uniform", "normal", "truncated_normal"]
    value: float = 0.0
    mean: float = 0.0
    std: float = 0.0
    low: float = 0.0
    high: float = 0.0
    box: tuple[tuple[int, ...], ...] = ()

    def scaled(self, factor: float) -> Draw:
        """Return the distribution of `factor` times a value of this one."""
        low, high = sorted((self.low * factor, self.high * factor))
        std = self.std * abs(factor)
        return replace(self, value=self.value * factor, mean=self.mean * factor, std=std, low=low, high=high)

    def shifted(self, distance: float) -> Draw:
        """Return the distribution of a value of this one plus `distance`."""
        return replace(self, **{name: getattr(self, name) + distance for name in _PLACES[self.kind]})


# What moves where a distribution is shifted.
_PLACES = {
    "constant": ("value",),
    "uniform": ("low", "high"),
    "normal": ("mean",),
    "truncated_normal": ("mean", "low", "high"),
}


@dataclass(frozen=True)
class Parameter:
    """A tensor that a stage owns, under its name in the user's ``state_dict``.

    `kind` "constant" is computed once at bind by the program's own ``constants`` function. With
    `partial_gradient` each tensor rank's gradient of the undivided rows is a partial sum, to be summed over the
    tensor group once per step. `initial` is what a model on the meta device begins with, a later draw over an
    earlier one; empty where weights must be given.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: Literal["parameter", "buffer", "constant"] = "parameter"
    requires_grad: bool = True
    placement: Placement = Placement()
    partial_gradient: bool = False
    initial: tuple[Draw, ...] = ()

    @property
    def is_trained(self) -> bool:
        """Return whether the user's module trains it."""
        return self.kind == "parameter" and self.requires_grad

    @property
    def bytes(self) -> int:
        """Bytes of the whole tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize
