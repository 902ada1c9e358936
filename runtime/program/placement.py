"""The division of one tensor over the tensor ranks, as plain data, and the slicing that it means."""

from __future__ import annotations

from collections.abc import Sequence
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
class Placement:
    """Where a tensor lives on the tensor axis: replicated (`dim` None), or divided along `dim`.

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

    def take(self, tensor: Tensor, size: int, index: int) -> Tensor:
        """Return the contiguous slice of a global `tensor` that tensor rank `index` of `size` owns."""
        if self.dim is None:
            return tensor.contiguous()
        if self.padding:
            pad = list(tensor.shape)
            pad[self.dim] = self.padding
            tensor = torch.cat([tensor, tensor.new_zeros(pad)], self.dim)
        pieces = []
        for segment, rows in zip(
            self.segments, tensor.split([s.rows for s in self.segments], self.dim), strict=True
        ):
            if segment.divided:
                width = segment.size // size
                rows = rows.unflatten(self.dim, (segment.outer, segment.size, segment.inner))
                rows = rows.narrow(self.dim + 1, index * width, width).flatten(self.dim, self.dim + 2)
            pieces.append(rows)
        return torch.cat(pieces, self.dim) if len(pieces) > 1 else pieces[0].contiguous()

    def runs(self, size: int, index: int) -> list[tuple[int, int]]:
        """Return the global rows of tensor rank `index` of `size` as ascending (first, end), in the slice's order.

        The rows of padding, which are the slice's last, are left out. For a divided tensor only.
        """
        found: list[tuple[int, int]] = []
        begin, end = 0, sum(s.rows for s in self.segments) - self.padding
        for segment in self.segments:
            count, width = (
                (segment.outer, segment.size // size * segment.inner) if segment.divided else (1, 0)
            )
            for outer in range(count):
                first = begin + outer * segment.size * segment.inner + index * width
                last = min(end, first + (width or segment.rows))
                if found and found[-1][1] == first:
                    found[-1] = found[-1][0], last
                elif first < last:
                    found.append((first, last))
            begin += segment.rows
        return found

    def join(self, shards: Sequence[Tensor]) -> Tensor:
        """Return the global tensor from all tensor ranks' shards, in order: the inverse of `take`."""
        if self.dim is None:
            return shards[0]
        size = len(shards)
        widths = [s.rows // size if s.divided else s.rows for s in self.segments]
        columns = [shard.split(widths, self.dim) for shard in shards]
        pieces = []
        for number, segment in enumerate(self.segments):
            parts = [column[number] for column in columns]
            if segment.divided:
                shape = (segment.outer, segment.size // size, segment.inner)
                whole = torch.cat([part.unflatten(self.dim, shape) for part in parts], self.dim + 1)
                pieces.append(whole.flatten(self.dim, self.dim + 2))
            else:
                pieces.append(parts[0])
        joined = torch.cat(pieces, self.dim)
        return joined.narrow(self.dim, 0, joined.shape[self.dim] - self.padding)


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
