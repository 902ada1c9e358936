"""A rank of the mesh: its coordinates, its groups, and the state of its dropout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise, product
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from autoptd.runtime.comm.groups import Group, Posted, ProcessGroup, Reduction, Result, ThreadGroup, group_cache
from autoptd.runtime.comm.threads import ThreadWorld
from autoptd.runtime.comm.timings import Measured
from autoptd.runtime.program.mesh import Coordinates, Mesh
from autoptd.runtime.program.placement import AxisPlacement, Placement
from autoptd.runtime.randomness import Randomness

CPU = torch.device("cpu")
Made = TypeVar("Made")
GROUPED = ("data", "pipeline", "tensor", "exchange", "expert_data")  # the axes along which ranks meet


@dataclass
class Rank:
    """The ``rank`` argument of a program's collectives and kernels; `device` holds its tensors.

    `groups` has the group along each axis of `Mesh.sizes`; that along "expert" has no peers, since its ranks meet along
    "tensor" and "exchange". `measured` times collectives inside a stage.
    """

    mesh: Mesh
    coordinates: Coordinates
    groups: dict[str, Group]
    randomness: Randomness = field(default_factory=Randomness)
    device: torch.device = CPU
    measured: Measured | None = None

    @classmethod
    def local(cls, mesh: Mesh, coordinates: Coordinates | None = None, device: torch.device = CPU) -> Rank:
        """Make a rank without peers: for shapes on the meta device, or for a mesh of one."""
        at = coordinates or Coordinates(**dict.fromkeys(mesh.axes, 0))
        number = mesh.rank_of(**at)
        groups = {axis: Group(n, mesh.group(axis, number).index(number)) for axis, n in mesh.sizes.items()}
        return cls(mesh, at, groups, device=device)

    @classmethod
    def distributed(cls, mesh: Mesh, device: torch.device = CPU) -> Rank:
        """Make this process's rank, and the groups of processes of all; every rank of `mesh` must call it."""
        rank, groups = cls.local(mesh, mesh.coordinates(dist.get_rank()), device), group_cache(dist.group.WORLD)
        for axis in GROUPED:
            for members in mesh.groups(axis) if rank.groups[axis].size > 1 else ():
                group = groups(dist.new_group, members)
                if rank.number in members:
                    rank.groups[axis] = ProcessGroup(group, device)
        return rank

    @property
    def number(self) -> int:
        """The global number of this rank."""
        return self.mesh.rank_of(**self.coordinates)

    def group(self, axis: str) -> Group:
        """Return the ranks along `axis` that this one communicates with."""
        return self.groups[axis]

    def holds(self, placement: Placement) -> tuple[AxisPlacement, Group]:
        """Return how the `placement` of a parameter divides it, and the ranks over which, if any."""
        return placement[placement.axis], self.group(placement.axis)

    def maximum(self, x: Tensor) -> Tensor:
        """Return the elementwise maximum of `x` over all ranks of the mesh. May overwrite `x`."""
        for axis in reversed(tuple(self.mesh.axes)):
            x = self.group(axis).all_reduce(x, "max")
        return x

    def all_reduce(self, x: Tensor, op: Reduction = "sum") -> Tensor:
        """Reduce `x` over the tensor ranks while nothing else is computed. May overwrite `x`."""
        return self._measure(lambda group: group.all_reduce(x, op))

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """Sum `x` over the tensor ranks, and return this rank's part of the sum along `dim`."""
        size = self.group("tensor").size
        flat = x.contiguous() if dim == 0 else torch.cat(x.chunk(size, dim))
        (own,) = self._measure(lambda group: group.post_reduce_scatter(flat.view(-1)).wait())
        return own.view(*x.shape[:dim], x.shape[dim] // size, *x.shape[dim + 1 :])

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """Return the `x` of all tensor ranks, in rank order along `dim`."""
        size = self.group("tensor").size
        into = x.new_empty(size * x.numel())
        parts = self._measure(lambda group: group.post_all_gather(x.contiguous().view(-1), into).wait())
        if dim == 0:
            return parts.view(size * x.shape[0], *x.shape[1:])
        return torch.cat(parts.view(size, *x.shape).unbind(), dim)

    def gather_in_pieces(self, x: Tensor, into: Tensor, use: Callable[[int], None]) -> None:
        """Write the `x` of all tensor ranks `into` [t, ...]; `use` each, by its rank, while the next is on its way."""
        group = self.group("tensor")
        into[group.index] = x
        order = [(group.index - step) % group.size for step in range(group.size)]  # in which they come
        for at, following in pairwise(order):
            self.compute_beside(group.post_shift(into[at], into[following]), partial(use, at))
        use(order[-1])

    def scatter_in_pieces(self, make: Callable[[int], Tensor]) -> Tensor:
        """Return the sum of what all tensor ranks `make` for this one; sums go around while the next are made."""
        group = self.group("tensor")
        total = make((group.index - 1) % group.size)
        for step in range(2, group.size + 1):
            posted = group.post_shift(total, torch.empty_like(total))
            own, others = self.compute_beside(posted, partial(make, (group.index - step) % group.size))
            total = own.add_(others)
        return total

    def compute_beside(self, posted: Posted[Result], compute: Callable[[], Made]) -> tuple[Made, Result]:
        """Compute while a message of the tensor ranks is on its way; record both times if a step is measured."""
        begin = self.measured and self.measured.mark()
        made = compute()
        computed = self.measured and self.measured.mark()
        result = posted.wait()
        if self.measured is not None:
            self.measured.add("tensor", begin)
            self.measured.add("products", begin, computed)
        return made, result

    def _measure(self, collective: Callable[[Group], Result]) -> Result:
        """Run a collective of the tensor ranks, and record its time if there is a step to measure."""
        group = self.group("tensor")
        if self.measured is None or group.size == 1:
            return collective(group)
        begin = self.measured.mark()
        result = collective(group)
        self.measured.add("tensor", begin)
        return result


def thread_ranks(mesh: Mesh, world: ThreadWorld) -> list[Rank]:
    """Make all ranks of `mesh` as threads of `world`, in the order of their global rank."""
    ranks = [Rank.local(mesh, mesh.coordinates(number)) for number in range(mesh.size)]
    for rank, axis in product(ranks, GROUPED):
        if (size := rank.groups[axis].size) > 1:
            name = f"{axis} group {list(mesh.group(axis, rank.number))}"
            rank.groups[axis] = ThreadGroup(world, name, size, rank.groups[axis].index)
    return ranks
