"""One rank of the mesh: where it stands, whom it talks to, and what its dropout depends on."""

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
    """What a program's collectives and kernels are given as ``rank``; `device` is where its tensors live.

    `measured` takes down when collectives inside a stage ran, where there is a step to measure.
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
        """A rank without peers: for shapes on the meta device, or for a mesh of one."""
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
        """This process's rank; `devices` is `mesh` as torch knows it, with dims "dp", "pp" and "tp"."""
        groups = {name: ProcessGroup(devices.get_group(name), device) for name in ("dp", "pp", "tp")}
        coordinates = Coordinates(groups["dp"].index, groups["pp"].index, groups["tp"].index)
        return cls(mesh, coordinates, groups["tp"], groups["pp"], groups["dp"], device=device)

    def all_reduce(self, x: Tensor, op: Reduction = "sum") -> Tensor:
        """Reduce `x` over the tensor ranks, and compute nothing meanwhile. May overwrite `x`."""
        # What torch.compile traces reads no clock.
        if self.measured is None or self.tensor.size == 1 or torch.compiler.is_compiling():
            return self.tensor.all_reduce(x, op)
        begin = self.measured.stopwatch.mark()
        result = self.tensor.all_reduce(x, op)
        self.measured.add_exposed(begin)
        return result


def thread_ranks(mesh: Mesh, world: ThreadWorld) -> list[Rank]:
    """All ranks of `mesh` as threads of `world`, in the order of their global rank."""
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
