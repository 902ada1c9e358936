"""A rank of the mesh: its coordinates, its groups, and the state of its dropout."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from autoptd.runtime.comm.groups import Group, LocalGroup, ProcessGroup, Reduction, ThreadGroup
from autoptd.runtime.comm.threads import ThreadRendezvous, ThreadWorld
from autoptd.runtime.comm.timings import Measured
from autoptd.runtime.program.mesh import Coordinates, Mesh
from autoptd.runtime.randomness import Randomness

ORIGIN = Coordinates(0, 0, 0)
CPU = torch.device("cpu")


@dataclass
class Rank:
    """The ``rank`` argument of a program's collectives and kernels; `device` holds its tensors.

    `measured` records the times of collectives inside a stage, if there is a step to measure.
    """

    mesh: Mesh
    coordinates: Coordinates
    tensor: Group
    pipeline: Group
    data: Group
    randomness: Randomness = field(default_factory=Randomness)
    device: torch.device = CPU
    measured: Measured | None = None

    @classmethod
    def local(cls, mesh: Mesh, coordinates: Coordinates = ORIGIN, device: torch.device = CPU) -> Rank:
        """Make a rank without peers: for shapes on the meta device, or for a mesh of one."""
        return cls(
            mesh,
            coordinates,
            LocalGroup(mesh.tensor, coordinates.tensor),
            LocalGroup(mesh.pipeline, coordinates.pipeline),
            LocalGroup(mesh.data, coordinates.data),
            device=device,
        )

    @classmethod
    def distributed(cls, mesh: Mesh, devices: DeviceMesh, device: torch.device = CPU) -> Rank:
        """Make this process's rank; `devices` is torch's form of `mesh`, with the dims "dp", "pp" and "tp"."""
        groups = {name: ProcessGroup(devices.get_group(name), device) for name in ("dp", "pp", "tp")}
        coordinates = Coordinates(groups["dp"].index, groups["pp"].index, groups["tp"].index)
        return cls(mesh, coordinates, groups["tp"], groups["pp"], groups["dp"], device=device)

    def all_reduce(self, x: Tensor, op: Reduction = "sum") -> Tensor:
        """Reduce `x` over the tensor ranks while nothing else is computed. May overwrite `x`."""
        # Code that torch.compile traces cannot read the clock.
        if self.measured is None or self.tensor.size == 1 or torch.compiler.is_compiling():
            return self.tensor.all_reduce(x, op)
        begin = self.measured.stopwatch.mark()
        result = self.tensor.all_reduce(x, op)
        self.measured.add_exposed(begin)
        return result


def thread_ranks(mesh: Mesh, world: ThreadWorld) -> list[Rank]:
    """Make all ranks of `mesh` as threads of `world`, in the order of their global rank."""
    rendezvous: dict[tuple[str, tuple[int, ...]], ThreadRendezvous] = {}

    def group(name: str, members: tuple[int, ...], rank: int) -> ThreadGroup:
        new = ThreadRendezvous(world, len(members), f"{name} group {list(members)}")
        return ThreadGroup(rendezvous.setdefault((name, members), new), members.index(rank))

    return [
        Rank(
            mesh,
            mesh.coordinates(rank),
            group("tensor", mesh.tensor_group(rank), rank),
            group("pipeline", mesh.pipeline_group(rank), rank),
            group("data", mesh.data_group(rank), rank),
        )
        for rank in range(mesh.size)
    ]
