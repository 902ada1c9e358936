"""The mesh: which global rank stands where on its three axes."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from typing import TypeVar

T = TypeVar("T")


class OverAxes(dict[str, T]):
    """A value for each of some mesh axes; nobody changes one, so that it is hashable."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{axis}={value}' for axis, value in self.items())})"


class Coordinates(OverAxes[int]):
    """The place of a rank on each axis of its mesh: ``coordinates["tensor"]``, or ``coordinates.tensor``."""

    def __init__(self, data: int, pipeline: int, tensor: int) -> None:
        super().__init__(data=data, pipeline=pipeline, tensor=tensor)
        self.data, self.pipeline, self.tensor = data, pipeline, tensor


@dataclass(frozen=True)
class Mesh:
    """A grid of ``tensor x pipeline x data`` devices.

    The ranks are counted with the tensor axis innermost, so that its group shares a node (SC21 §3.1), then the pipeline
    axis, unless `ranks` gives the global rank at each place.

    Experts of a mixture are divided over `expert` ranks, a multiple of the tensor ranks (0: these alone): over these,
    and each tensor rank's over consecutive data ranks. This folds three further axes into the grid (see `sizes`):
    "expert" has these ranks, "exchange" those of them on one tensor rank, and "expert_data" the data ranks with the
    same experts.
    """

    tensor: int
    pipeline: int
    data: int
    ranks: tuple[int, ...] | None = None
    expert: int = 0

    def __post_init__(self) -> None:
        vars(self)["expert"] = self.expert or self.tensor

    @cached_property
    def axes(self) -> Mapping[str, int]:
        """The size of each axis, the outermost first."""
        return {"data": self.data, "pipeline": self.pipeline, "tensor": self.tensor}

    @property
    def size(self) -> int:
        return prod(self.axes.values())

    @property
    def sizes(self) -> Mapping[str, int]:
        """The size of each axis, with those that the experts fold into the grid."""
        exchange = self.expert // self.tensor
        return {**self.axes, "expert": self.expert, "exchange": exchange, "expert_data": self.data // exchange}

    def rank_of(self, data: int, pipeline: int, tensor: int) -> int:
        """Return the global rank at these coordinates."""
        place = (data * self.pipeline + pipeline) * self.tensor + tensor
        return place if self.ranks is None else self.ranks[place]

    def coordinates(self, rank: int) -> Coordinates:
        """Return where `rank` stands. Raises ValueError unless it is a rank of the mesh."""
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < self.size:
            raise ValueError(f"rank {rank!r} is none of {self}, which has ranks 0 to {self.size - 1}")
        rest, tensor = divmod(rank if self.ranks is None else self.ranks.index(rank), self.tensor)
        return Coordinates(*divmod(rest, self.pipeline), tensor)

    def group(self, axis: str, rank: int) -> tuple[int, ...]:
        """Return the global ranks that differ from `rank` along `axis` at most, in the order of that axis."""
        at, exchange = self.coordinates(rank), self.sizes["exchange"]
        if axis in self.axes:
            return tuple(self.rank_of(**{**at, axis: place}) for place in range(self.axes[axis]))
        tensor = range(self.tensor) if axis == "expert" else (at.tensor,)
        first, place = at.data - at.data % exchange, at.data % exchange
        data = range(place, self.data, exchange) if axis == "expert_data" else range(first, first + exchange)
        return tuple(self.rank_of(**{**at, "tensor": i, "data": j}) for i, j in product(tensor, data))

    def groups(self, axis: str, **at: int) -> list[tuple[int, ...]]:
        """Return all groups of ranks along `axis`, or those of the ranks that stand `at` these coordinates."""
        fixed = {**at, axis: 0}
        places = product(*((fixed[a],) if a in fixed else range(size) for a, size in self.axes.items()))
        members = (self.rank_of(**dict(zip(self.axes, place, strict=True))) for place in places)
        return list(dict.fromkeys(self.group(axis, rank) for rank in members))

    def __str__(self) -> str:
        sizes = [*tuple(self.axes.items())[::-1], *[("expert", self.expert)] * (self.expert > self.tensor)]
        return " ".join(["mesh", *(f"{axis}={size}" for axis, size in sizes)])
