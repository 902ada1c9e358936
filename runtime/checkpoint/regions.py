"""Regions of tensors: the parts of the logical tensors that a rank holds, and those that it writes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from torch import Tensor

from autoptd.runtime.comm.groups import Group
from autoptd.runtime.comm.rank import Rank
from autoptd.runtime.program.manifest import Manifest
from autoptd.runtime.program.placement import REPLICATE, AxisPlacement

# Of one piece, unless a row has more: ranks that hold the same elements divide the pieces among themselves.
PIECE_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class Region:
    """The indices `offsets[i]` to ``offsets[i] + sizes[i]`` of every dimension of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def elements(self) -> int:
        return prod(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(o, o + n) for o, n in zip(self.offsets, self.sizes, strict=True))

    def intersect(self, other: Region) -> Region | None:
        """Return the indices in both regions of one tensor; None if there are none."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        pairs = zip(self.slices, other.slices, offsets, strict=True)
        sizes = tuple(min(one.stop, two.stop) - offset for one, two, offset in pairs)
        return Region(offsets, sizes) if all(n > 0 for n in sizes) else None

    def shift(self, by: Sequence[int]) -> Region:
        return Region(tuple(map(int.__add__, self.offsets, by)), self.sizes)

    def relative_to(self, other: Region) -> Region:
        """Return the region with its offsets counted from those of `other`."""
        return Region(tuple(map(int.__sub__, self.offsets, other.offsets)), self.sizes)


@dataclass(frozen=True)
class FlatRange:
    """Elements `first` to `end`, row-major, of a rank's slice of `shape`: the ones that its replica steps."""

    shape: tuple[int, ...]
    first: int
    end: int

    def regions(self) -> list[Region]:
        """Return the range as regions of the slice, in order: at most 2 n - 1 of n dimensions."""
        if not self.shape:
            return [Region((), ())] * (self.end - self.first)
        found, first, below = [], self.first, self.shape[1:]
        width = prod(below)
        while first < self.end:
            row, low = divmod(first, width)
            if low == 0 and self.end - first >= width:  # whole rows
                rows = (self.end - first) // width
                found.append(Region((row, *(0 for _ in below)), (rows, *below)))
                first += rows * width
            else:
                part = FlatRange(below, low, min(width, low + self.end - first))
                found += [Region((row, *own.offsets), (1, *own.sizes)) for own in part.regions()]
                first += part.end - low
        return found

    def view(self, row: Tensor, region: Region) -> Tensor:
        """Return a `region` inside the range, as a view of the `row` [end - first] of its elements."""
        strides = [prod(self.shape[dim + 1 :]) for dim in range(len(self.shape))]
        offset = sum(map(int.__mul__, region.offsets, strides)) - self.first
        return row.as_strided(region.sizes, strides, row.storage_offset() + offset)


class Piece(NamedTuple):
    """A `region` of the tensor `name`, which is `local` in a rank's slice; `shared` if all tensor ranks hold it."""

    name: str
    region: Region
    local: Region
    shared: bool

    def view(self, tensor: Tensor, flat: FlatRange | None) -> Tensor:
        """Return the piece as a view of the rank's slice, or of the row of a `flat` range of the slice."""
        return tensor[self.local.slices] if flat is None else flat.view(tensor, self.local)

    def crop(self, region: Region) -> Piece:
        """Return the part of the piece in `region`, a part of its own region."""
        return self._replace(region=region, local=region.relative_to(self.region).shift(self.local.offsets))


def list_pieces(manifest: Manifest, rank: Rank, name: str, flat: FlatRange | None) -> list[Piece]:
    """Return the pieces of the tensor `name` that this rank holds: of its slice, or of a `flat` range of the slice."""
    parameter = manifest.parameters[name]
    on_axis, group = rank.holds(parameter.placement)
    regions = list_regions(parameter.shape, on_axis, group.size, group.index)
    pieces = [Piece(name, *entry) for entry in regions]
    if flat is None:
        return pieces
    return [
        piece.crop(own.relative_to(piece.local).shift(piece.region.offsets))
        for piece in pieces
        for held in flat.regions()
        if (own := held.intersect(piece.local)) is not None
    ]


def list_whole(name: str, shape: Sequence[int]) -> list[Piece]:
    """Return the pieces of `name` that are all of a tensor of this `shape`."""
    wholes = (Piece(name, *entry) for entry in list_regions(shape, REPLICATE, 1, 0))
    return [piece for whole in wholes for piece in _cut_rows(whole)]


def list_regions(
    shape: Sequence[int], placement: AxisPlacement, size: int, index: int
) -> list[tuple[Region, Region, bool]]:
    """Return the regions of a tensor of `shape` that rank `index` of the `size` on its axis holds, without padding.

    Each comes with its region in the rank's slice, and whether all ranks of the axis hold it.
    """
    dim, origin = placement.dim, (0,) * len(shape)
    if dim is None:
        whole = Region(origin, tuple(shape))
        return [(whole, whole, True)] if prod(shape) else []
    found = []
    for rows in placement.rows(size, index):
        sizes = _put(shape, dim, rows.count)
        if prod(sizes):
            region, own = (Region(_put(origin, dim, offset), sizes) for offset in (rows.first, rows.local))
            found.append((region, own, rows.shared))
    return found


def assign_pieces(manifest: Manifest, rank: Rank, flats: Mapping[str, FlatRange]) -> list[Piece]:
    """Return the pieces of the saved tensors that this rank writes: all ranks together write each element once.

    Each replica writes its range of a tensor in `flats`, on the first pipeline rank that has the tensor. A piece that
    several ranks hold is written by one of them; all compute the same even division, by elements.
    """
    at, mesh = rank.coordinates, manifest.mesh
    totals: Counter[tuple[tuple[int, ...], bool, str]] = Counter()
    pieces = []
    for name in manifest.parameters:
        flat = flats.get(name)
        homes = manifest.homes(name)[: None if flat is None else 1]
        if at.pipeline not in homes or not manifest.is_saved(name):
            continue
        for held in list_pieces(manifest, rank, name, flat):
            for piece in _cut_rows(held):
                key = homes, piece.shared, manifest.parameters[name].placement.replicas if flat is None else ""
                pieces.append((key, totals[key], piece))
                totals[key] += piece.region.elements
    own: list[Piece] = []
    for key, before, piece in pieces:
        homes, shared, replicas = key
        peers = mesh.tensor if shared else 1
        group = rank.group(replicas) if replicas else Group()
        place = (group.index * len(homes) + homes.index(at.pipeline)) * peers + at.tensor * shared
        writers = group.size * len(homes) * peers
        if (2 * before + piece.region.elements) * writers // (2 * totals[key]) == place:
            own.append(piece)
    return own


def _cut_rows(piece: Piece) -> Iterator[Piece]:
    """Cut a piece along dimension 0 into pieces of PIECE_ELEMENTS, or of one row."""
    offsets, sizes = piece.region.offsets, piece.region.sizes
    if not sizes:
        yield piece
        return
    rows = max(1, PIECE_ELEMENTS // prod(sizes[1:]))
    for first in range(0, sizes[0], rows):
        part = _put(offsets, 0, offsets[0] + first), _put(sizes, 0, min(rows, sizes[0] - first))
        yield piece.crop(Region(*part))


def _put(values: Sequence[int], dim: int, value: int) -> tuple[int, ...]:
    return *values[:dim], value, *values[dim + 1 :]
