"""Boxes: the parts of logical tensors that a rank holds, cut into pieces, each written by one of its holders."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from autoptd.runtime.manifest import Manifest
from autoptd.runtime.placement import Placement
from autoptd.runtime.rank import Rank

PIECE_ELEMENTS = 1 << 24  # 64 MB of float32: what a reader verifies at once


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


def own_pieces(manifest: Manifest, rank: Rank) -> list[Piece]:
    """What this rank writes of the saved tensors: together the ranks write each element once.

    A part that several ranks hold alike goes to them in even runs, by elements; they know that of each other.
    """
    at, mesh = rank.coordinates, manifest.mesh
    totals: Counter[tuple[tuple[int, ...], bool]] = Counter()
    pieces = []
    for name, parameter in manifest.parameters.items():
        homes = manifest.homes(name)
        if at.pipeline not in homes or not manifest.is_saved(name):
            continue
        for part in local_parts(parameter.shape, parameter.placement, mesh.tensor, at.tensor):
            for box in _cut(part.box):
                key = homes, part.shared
                local = box.moved(part.box.starts, part.local)
                pieces.append((key, totals[key], Piece(name, box, local)))
                totals[key] += box.elements
    own = []
    for key, before, piece in pieces:
        homes, shared = key
        peers = mesh.tensor if shared else 1
        place = (at.data * len(homes) + homes.index(at.pipeline)) * peers + at.tensor * shared
        writers = mesh.data * len(homes) * peers
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


def _ends(box: Box) -> Iterator[int]:
    return (s + n for s, n in zip(box.starts, box.lengths, strict=True))


def _put(values: Sequence[int], dim: int, value: int) -> tuple[int, ...]:
    return *values[:dim], value, *values[dim + 1 :]
