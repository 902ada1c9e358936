"""The placement of one tensor on the axes of the mesh, as plain data, and the slicing that it means."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from autoptd.runtime.program.mesh import OverAxes


@dataclass(frozen=True)
class Segment:
    """Consecutive rows of a dimension, viewed as [outer, size, inner] (row-major).

    Where `divided`, rank i of the axis owns the i-th of t equal runs of the middle axis, for every outer index; else
    every rank holds all rows. A packed [3 * heads * head_size] projection is one segment (3, heads, head_size).
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
    """Rows `first` to ``first + count`` of a tensor, from `local` on in a slice; `shared` if all ranks hold them."""

    first: int
    local: int
    count: int
    shared: bool


@dataclass(frozen=True, repr=False)
class AxisPlacement:
    """The placement of a tensor on one mesh axis: `Replicate`, `Shard` or `Partial`.

    A shard lies along `dim`, and its `segments` add up to the rows of that dimension; a value's are not known: (). Zero
    rows behind them, in memory only (an odd vocabulary), are not counted in `extent`; None where there are none. With
    `partial_gradient` each rank has a term of the gradient of the rows that all ranks hold.
    """

    dim: int | None = None
    segments: tuple[Segment, ...] = ()
    extent: int | None = None
    partial_gradient: bool = False
    word: ClassVar[str] = ""

    def __repr__(self) -> str:
        named = [(field, getattr(self, field.name)) for field in fields(self)]
        shown = ", ".join(f"{field.name}={value}" for field, value in named if value != field.default)
        return f"{type(self).__name__}({shown})"

    @property
    def padding(self) -> int:
        """Rows of zeros behind the dimension's own."""
        return 0 if self.extent is None else sum(s.rows for s in self.segments) - self.extent

    def local_shape(self, shape: Sequence[int], size: int) -> tuple[int, ...]:
        """Return one rank's shape of a tensor of global `shape`, for `size` ranks on the axis."""
        local = list(shape)
        if self.dim is not None:
            local[self.dim] = sum(s.rows // size if s.divided else s.rows for s in self.segments)
        return tuple(local)

    def rows(self, size: int, index: int) -> Iterator[Rows]:
        """Yield the rows of a shard that rank `index` of `size` holds, in order; padding, its last, is left out."""
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
        """Return the contiguous slice of a global `tensor` that rank `index` of `size` holds."""
        if self.dim is None:
            return tensor.contiguous()
        own = tensor.new_zeros(self.local_shape(tensor.shape, size))
        for rows in self.rows(size, index):
            own.narrow(self.dim, rows.local, rows.count).copy_(tensor.narrow(self.dim, rows.first, rows.count))
        return own

    def runs(self, size: int, index: int) -> list[tuple[int, int]]:
        """Return the rows of `rows` as ascending (first, end), neighbours joined."""
        found: list[tuple[int, int]] = []
        for rows in self.rows(size, index):
            begin = found.pop()[0] if found and found[-1][1] == rows.first else rows.first
            found.append((begin, rows.first + rows.count))
        return found

    def split(self, local: Tensor, size: int, *, divided: bool) -> list[Tensor]:
        """Return views of the rows of a rank's slice that are divided over the `size` ranks, or that are not."""
        if self.dim is None:
            return [] if divided else [local]
        widths = [s.rows // size if s.divided else s.rows for s in self.segments]
        pieces = zip(local.split(widths, self.dim), self.segments, strict=True)
        return [rows for rows, segment in pieces if segment.divided is divided]

    def join(self, slices: Sequence[Tensor]) -> Tensor:
        """Return the global tensor of all ranks' slices, in order: the inverse of `take`."""
        if self.dim is None:
            return slices[0]
        shape = list(slices[0].shape)
        shape[self.dim] = sum(segment.rows for segment in self.segments) - self.padding
        whole = slices[0].new_empty(shape)
        for index, part in reversed(list(enumerate(slices))):  # rows that all hold are the first rank's
            for rows in self.rows(len(slices), index):
                whole.narrow(self.dim, rows.first, rows.count).copy_(part.narrow(self.dim, rows.local, rows.count))
        return whole


@dataclass(frozen=True, repr=False)
class Replicate(AxisPlacement):
    """All ranks of the axis hold the same tensor."""

    word = "whole"


@dataclass(frozen=True, repr=False)
class Shard(AxisPlacement):
    """Each rank of the axis holds its rows of dimension `dim`."""

    word = "divided"


@dataclass(frozen=True, repr=False)
class Ragged(Shard):
    """Each rank holds the rows of its experts, whose number depends on data, in room for as many as there can be."""

    word = "divided by experts"


@dataclass(frozen=True, repr=False)
class Partial(AxisPlacement):
    """Each rank of the axis holds a term of a sum over them."""

    word = "a partial sum"


REPLICATE = Replicate()


class Placement(OverAxes[AxisPlacement]):
    """The placement of a tensor on each mesh axis: ``placement["tensor"]``; an axis that is not named replicates it.

    `is_divided`: ranks hold other rows. `is_partial`: terms of a sum. `has_partial_gradient`: terms of the gradient.
    """

    def __init__(self, **axes: AxisPlacement) -> None:
        super().__init__({axis: on for axis, on in axes.items() if on != REPLICATE})
        self.is_divided = any(isinstance(on, Shard) for on in self.values())
        self.is_partial = any(isinstance(on, Partial) for on in self.values())
        self.has_partial_gradient = any(on.partial_gradient for on in self.values())

    def __missing__(self, axis: str) -> AxisPlacement:
        return REPLICATE

    @property
    def axis(self) -> str:
        """The axis that may divide a parameter: that of its experts, or the tensor axis."""
        return "expert" if "expert" in self else "tensor"

    @property
    def replicas(self) -> str:
        """The axis whose ranks hold the same slice of a parameter, and train it together."""
        return "expert_data" if "expert" in self else "data"

    def with_partial_gradient(self, axis: str) -> Placement:
        """Return the same placement where each rank of the `axis` has a term of the gradient."""
        return Placement(**{**self, axis: replace(self[axis], partial_gradient=True)})

    def local_shape(self, shape: Sequence[int], sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return one rank's shape of a tensor of global `shape` on a mesh whose axes have these `sizes`."""
        for axis, on in self.items():
            shape = on.local_shape(shape, sizes[axis])
        return tuple(shape)


REPLICATED = Placement()
PARTIAL_SUM = Placement(tensor=Partial())


@dataclass(frozen=True)
class Draw:
    """A distribution that an initialisation writes into a tensor's elements: all, or those of a `run`.

    "constant" has a `value`, "normal" `mean` and `std`, "uniform" the range `low` to `high`, "truncated_normal" both
    of these. `run` has the number of the first element, row by row, and the one after the last.
    """

    kind: Literal["constant", "uniform", "normal", "truncated_normal"]
    value: float = 0.0
    mean: float = 0.0
    std: float = 0.0
    low: float = 0.0
    high: float = 0.0
    run: tuple[int, ...] = ()

    def scaled(self, factor: float) -> Draw:
        """Return the distribution of `factor` times a value of this one."""
        low, high = sorted((self.low * factor, self.high * factor))
        std = self.std * abs(factor)
        return replace(self, value=self.value * factor, mean=self.mean * factor, std=std, low=low, high=high)


@dataclass(frozen=True)
class Parameter:
    """A tensor that a stage owns, under its name in the user's ``state_dict``.

    `kind` "constant" is computed once at bind by the program's own ``constants`` function. A partial gradient of its
    undivided rows, by its `placement` on an axis, is summed over the ranks of that axis once per step. `initial` is
    what a model on the meta device begins with, a later draw over an earlier one; empty where weights must be given.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: Literal["parameter", "buffer", "constant"] = "parameter"
    requires_grad: bool = True
    placement: Placement = REPLICATED
    initial: tuple[Draw, ...] = ()

    @property
    def is_trained(self) -> bool:
        """Return whether the user's module trains it."""
        return self.kind == "parameter" and self.requires_grad

    def local_shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape that one rank holds, on a mesh whose axes have these `sizes`."""
        return self.placement.local_shape(self.shape, sizes)

    @property
    def bytes(self) -> int:
        """Bytes of the whole tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize
