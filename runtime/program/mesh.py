"""The mesh: which global rank stands where on the tensor, pipeline and data axes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Coordinates(NamedTuple):
    """A rank's place on each axis of the mesh."""

    data: int
    pipeline: int
    tensor: int


@dataclass(frozen=True)
class Mesh:
    """A grid of ``tensor x pipeline x data`` devices.

    Rank ``(data * P + pipeline) * T + tensor`` stands at those coordinates (tensor innermost, so that
    its group shares a node: SC21 §3.1), unless `ranks` gives another order: the global ranks, flat in
    [data, pipeline, tensor] order.
    """

    tensor: int
    pipeline: int
    data: int
    ranks: tuple[int, ...] | None = None

    @property
    def size(self) -> int:
        return self.tensor * self.pipeline * self.data

    def rank_of(self, data: int, pipeline: int, tensor: int) -> int:
        place = (data * self.pipeline + pipeline) * self.tensor + tensor
        return place if self.ranks is None else self.ranks[place]

    def coordinates(self, rank: int) -> Coordinates:
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < self.size:
            raise ValueError(f"rank {rank!r} is none of {self}, which has ranks 0 to {self.size - 1}")
        place = rank if self.ranks is None else self.ranks.index(rank)
        rest, tensor = divmod(place, self.tensor)
        data, pipeline = divmod(rest, self.pipeline)
        return Coordinates(data, pipeline, tensor)

    def tensor_group(self, rank: int) -> tuple[int, ...]:
        """Global ranks that share `rank`'s data and pipeline coordinates, in tensor order."""
        at = self.coordinates(rank)
        return tuple(self.rank_of(at.data, at.pipeline, t) for t in range(self.tensor))

    def tensor_groups(self, pipeline: int) -> list[tuple[int, ...]]:
        """All replicas' groups of ranks at one pipeline coordinate, in tensor order."""
        row = range(self.tensor)
        return [tuple(self.rank_of(d, pipeline, t) for t in row) for d in range(self.data)]

    def pipeline_group(self, rank: int) -> tuple[int, ...]:
        """Global ranks that share `rank`'s data and tensor coordinates, in pipeline order."""
        at = self.coordinates(rank)
        return tuple(self.rank_of(at.data, p, at.tensor) for p in range(self.pipeline))

    def data_group(self, rank: int) -> tuple[int, ...]:
        """Global ranks that share `rank`'s pipeline and tensor coordinates, in data order."""
        at = self.coordinates(rank)
        return tuple(self.rank_of(d, at.pipeline, at.tensor) for d in range(self.data))

    def __str__(self) -> str:
        return f"mesh tensor={self.tensor} pipeline={self.pipeline} data={self.data}"
