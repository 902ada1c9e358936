"""Boxes: the parts of logical tensors that a rank holds, cut into pieces, each written by one of its holders."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from torch import Tensor

from autoptd.runtime.comm.rank import Rank
from autoptd.runtime.program.manifest import Manifest
from autoptd.runtime.program.placement import Placement

# 4 MB of float32, or a row that is larger: a reader verifies it at once, also where it needs its end alone.
PIECE_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class Box:
    """Indices `starts[i]` to ``starts[i] + lengths[i]`` of every dimension of a tensor."""

    starts: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def elements(self) -> int:
        return prod(self.lengths)

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(s, s + n) for s, n in zip(self.starts, self.lengths, strict=True))

    def meet(self, other: Box) -> Box | None:
        """What two boxes of one tensor share; None where that is nothing."""
        starts = tuple(map(max, self.starts, other.starts))
        ends = map(min, _ends(self), _ends(other))
        lengths = tuple(end - start for start, end in zip(starts, ends, strict=True))
        return Box(starts, lengths) if all(n > 0 for n in lengths) else None

    def moved(self, origin: Sequence[int], to: Sequence[int]) -> Box:
        """The box as it is where the index `origin` is called `to`."""
        starts = tuple(s - o + t for s, o, t in zip(self.starts, origin, to, strict=True))
        return Box(starts, self.lengths)


@dataclass(frozen=True)
class Run:
    """Elements `first` to `end`, row-major, of a rank's slice of `shape`: what its replica steps of it, in a row."""

    shape: tuple[int, ...]
    first: int
    end: int

    def boxes(self) -> list[Box]:
        """The run, in its order, as boxes of the slice: 2 n - 1 at most."""
        return list(_cut_run(self.shape, self.first, self.end))

    def view(self, row: Tensor, box: Box) -> Tensor:
        """A `box` inside the run, of a `row` [end - first] of its elements."""
        strides = [prod(self.shape[dim + 1 :]) for dim in range(len(self.shape))]
        before = sum(start * stride for start, stride in zip(box.starts, strides, strict=True)) - self.first
        return row.as_strided(box.lengths, strides, row.storage_offset() + before)


class Part(NamedTuple):
    """A box of the logical tensor, and where in a rank's slice it begins; `shared`: all tensor ranks hold it."""

    box: Box
    local: tuple[int, ...]
    shared: bool


class Piece(NamedTuple):
    """What one rank writes of the tensor `name`: `box` of the logical tensor, `local` of the rank's slice."""

    name: str
    box: Box
    local: Box


def local_parts(shape: Sequence[int], placement: Placement, size: int, index: int) -> list[Part]:
    """The boxes of a tensor of `shape` that tensor rank `index` of `size` holds; none for padding or no elements."""
    dim, origin = placement.dim, (0,) * len(shape)
    if dim is None:
        return [Part(Box(origin, tuple(shape)), origin, True)] if prod(shape) else []
    parts = []
    row = local = 0
    for segment in placement.segments:
        if segment.divided:
            width, stride = segment.size // size * segment.inner, segment.size * segment.inner
            runs = [(row + outer * stride + index * width, width) for outer in range(segment.outer)]
        else:
            runs = [(row, segment.rows)]
        for start, rows in runs:
            box = Box(_put(origin, dim, start), _put(shape, dim, max(0, min(rows, shape[dim] - start))))
            if box.elements:
                parts.append(Part(box, _put(origin, dim, local), not segment.divided))
            local += rows
        row += segment.rows
    return parts


def list_parts(manifest: Manifest, rank: Rank, name: str, run: Run | None) -> list[Part]:
    """The boxes of the tensor `name` that this rank has: of its slice, or of the `run` of that."""
    parameter = manifest.parameters[name]
    parts = local_parts(parameter.shape, parameter.placement, manifest.mesh.tensor, rank.coordinates.tensor)
    if run is None:
        return parts
    return [
        Part(own.moved(local, box.starts), own.starts, shared)
        for box, local, shared in parts
        for held in run.boxes()
        if (own := held.meet(Box(local, box.lengths))) is not None
    ]


def own_pieces(manifest: Manifest, rank: Rank, runs: Mapping[str, Run]) -> list[Piece]:
    """What this rank writes of the saved tensors: together the ranks write each element once.

    Of a tensor that has one of the `runs` each replica writes that, on the first pipeline rank that keeps it. A part
    that several ranks hold alike goes to them in even runs, by elements; they know that of each other.
    """
    at, mesh = rank.coordinates, manifest.mesh
    totals: Counter[tuple[tuple[int, ...], bool, bool]] = Counter()
    pieces = []
    for name in manifest.parameters:
        run = runs.get(name)
        homes = manifest.homes(name)[: None if run is None else 1]
        if at.pipeline not in homes or not manifest.is_saved(name):
            continue
        for part in list_parts(manifest, rank, name, run):
            for box in _cut(part.box):
                key = homes, part.shared, run is None
                local = box.moved(part.box.starts, part.local)
                pieces.append((key, totals[key], Piece(name, box, local)))
                totals[key] += box.elements
    own = []
    for key, before, piece in pieces:
        homes, shared, in_all = key  # replicas
        peers = mesh.tensor if shared else 1
        place = (at.data * in_all * len(homes) + homes.index(at.pipeline)) * peers + at.tensor * shared
        writers = (mesh.data if in_all else 1) * len(homes) * peers
        if (2 * before + piece.box.elements) * writers // (2 * totals[key]) == place:
            own.append(piece)
    return own


def _cut(box: Box) -> Iterator[Box]:
    """The box in runs of dimension 0, of PIECE_ELEMENTS or one row."""
    if not box.lengths:
        yield box
        return
    rows = max(1, PIECE_ELEMENTS // prod(box.lengths[1:]))
    for first in range(0, box.lengths[0], rows):
        starts = _put(box.starts, 0, box.starts[0] + first)
        yield Box(starts, _put(box.lengths, 0, min(rows, box.lengths[0] - first)))


def _cut_run(shape: Sequence[int], first: int, end: int) -> Iterator[Box]:
    """Elements `first` to `end` of a tensor of `shape`: the end of a row, whole rows, and the begin of one."""
    if first == end or not shape:
        yield from [Box((), ())] * (end - first)
        return
    width = prod(shape[1:])
    (row, low), (last, high) = divmod(first, width), divmod(end, width)
    if low or row == last:
        yield from _in_row(row, _cut_run(shape[1:], low, high if row == last else width))
        row += 1
    if row < last:
        yield Box((row, *(0 for _ in shape[1:])), (last - row, *shape[1:]))
    if row <= last:
        yield from _in_row(last, _cut_run(shape[1:], 0, high))


def _in_row(row: int, boxes: Iterator[Box]) -> Iterator[Box]:
    return (Box((row, *box.starts), (1, *box.lengths)) for box in boxes)


def _ends(box: Box) -> Iterator[int]:
    return (s + n for s, n in zip(box.starts, box.lengths, strict=True))


def _put(values: Sequence[int], dim: int, value: int) -> tuple[int, ...]:
    return *values[:dim], value, *values[dim + 1 :]
