"""Connect this rank to the others: groups, channels, and the proof that all run the same program."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autoptd.runtime.channel import Channel, process_channels, thread_channels
from autoptd.runtime.communicator import Group, LocalGroup, ProcessGroup, ThreadGroup
from autoptd.runtime.manifest import Manifest
from autoptd.runtime.mesh import Mesh
from autoptd.runtime.position import Position
from autoptd.runtime.rank import Rank, thread_ranks
from autoptd.runtime.roster import gather
from autoptd.runtime.threads import Meeting, ThreadPosition, ThreadWorld

R = TypeVar("R")
Owners = tuple[int, ...]


@dataclass
class Connection:
    """A rank and whom it reaches beside its groups.

    `outgoing` and `incoming` are its channels, by the pipeline rank at the other end. `tied` has a group for
    each set of pipeline ranks that together own a parameter, this rank among them. `world` is all ranks, by their
    global numbers; `position` is what this rank is doing.
    """

    rank: Rank
    outgoing: Mapping[int, Channel] = field(default_factory=dict)
    incoming: Mapping[int, Channel] = field(default_factory=dict)
    tied: Mapping[Owners, Group] = field(default_factory=dict)
    world: Group = field(default_factory=LocalGroup)
    position: Position = field(default_factory=Position)


def connect(manifest: Manifest, device: torch.device, program: str) -> Connection:
    """Join the ranks that torchrun has started, and make every group and channel of the manifest.

    Starts ``torch.distributed`` (NCCL for a CUDA `device`, else gloo) unless the caller has; a mesh of one
    rank needs neither launcher nor process group. ValueError, before anything is touched, when WORLD_SIZE is
    not the mesh's. `program` is all that must be the same on every rank: RuntimeError names who differs.
    """
    mesh = manifest.mesh
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    check_world_size(mesh, dist.get_world_size() if dist.is_initialized() else launched)
    if mesh.size == 1:
        rank = Rank.local(mesh, device=device)
        rank.randomness.seed = manifest.seed
        return Connection(rank)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    _compare(program, device)
    order = torch.tensor(mesh.ranks if mesh.ranks is not None else range(mesh.size), dtype=torch.int)
    places = order.view(mesh.data, mesh.pipeline, mesh.tensor)
    rank = Rank.distributed(mesh, DeviceMesh(device.type, places, mesh_dim_names=("dp", "pp", "tp")), device)
    rank.randomness.seed = manifest.seed
    own = dist.get_rank()
    tied: dict[Owners, Group] = {}
    for owners, members in _tied_groups(manifest):
        group = dist.new_group(list(members))  # collective over all ranks
        if own in members:
            tied[owners] = ProcessGroup(group, device)
    assert dist.group.WORLD is not None
    everyone = ProcessGroup(dist.group.WORLD, device)
    return _join(rank, own, process_channels(mesh, device), tied, everyone)


def run_threads(manifest: Manifest, body: Callable[[Connection], R]) -> list[R]:
    """Call ``body(connection)`` for all ranks at once, a thread of this process each; results by global rank.

    For the CPU. The first exception of any rank is raised here and frees the others; a deadlock is one too.
    """
    mesh = manifest.mesh
    world = ThreadWorld()
    ranks = thread_ranks(mesh, world)
    tied: list[dict[Owners, Group]] = [{} for _ in ranks]
    for owners, members in _tied_groups(manifest):
        meeting = Meeting(world, len(members), f"group {list(members)} of a tied parameter")
        for index, member in enumerate(members):
            tied[member][owners] = ThreadGroup(meeting, index)
    channels = thread_channels(mesh, world)
    for rank in ranks:
        rank.randomness.seed = manifest.seed
    everyone = Meeting(world, mesh.size, "group of all ranks")
    connections = [
        _join(rank, own, channels, tied[own], ThreadGroup(everyone, own)) for own, rank in enumerate(ranks)
    ]
    for connection in connections:
        connection.position = ThreadPosition(world)
    return world.run(body, connections)


def check_world_size(mesh: Mesh, world_size: int) -> None:
    """Raise ValueError unless `world_size` processes are as many as the mesh has ranks."""
    if world_size == mesh.size:
        return
    legal = sorted(
        (abs(t - mesh.tensor), abs(p - mesh.pipeline), (t, p, world_size // (t * p)))
        for t in range(1, world_size + 1)
        for p in range(1, world_size // t + 1)
        if world_size % (t * p) == 0
    )
    nearest = " or ".join(str(shape) for *_, shape in legal[:3])
    raise ValueError(
        f"WORLD_SIZE is {world_size}, but {mesh} is a program for {mesh.size} ranks: start {mesh.size} "
        f"processes with torchrun, or compile for {world_size} with mesh={nearest}"
    )


def _tied_groups(manifest: Manifest) -> Iterator[tuple[Owners, tuple[int, ...]]]:
    """Each set of several pipeline ranks that own one parameter, with the global ranks of each group."""
    mesh = manifest.mesh
    sets = {manifest.owners(name) for name, p in manifest.parameters.items() if p.kind == "parameter"}
    for owners in sorted(ranks for ranks in sets if len(ranks) > 1):
        for data in range(mesh.data):
            for tensor in range(mesh.tensor):
                yield owners, tuple(mesh.rank_of(data, pipeline, tensor) for pipeline in owners)


def _join(
    rank: Rank,
    own: int,
    channels: Mapping[tuple[int, int], Channel],
    tied: Mapping[Owners, Group],
    world: Group,
) -> Connection:
    """The connection of `rank`, whose global number is `own`."""
    at = rank.mesh.coordinates
    outgoing = {at(destination).pipeline: c for (source, destination), c in channels.items() if source == own}
    incoming = {at(source).pipeline: c for (source, destination), c in channels.items() if destination == own}
    return Connection(rank, outgoing, incoming, tied, world)


def _compare(program: str, device: torch.device) -> None:
    """Raise RuntimeError unless all ranks were given the same program."""
    digests = gather(list(sha256(program.encode()).digest()), device)
    common = max(digests, key=digests.count)
    differ = [rank for rank, digest in enumerate(digests) if digest != common]
    if differ:
        raise RuntimeError(
            f"ranks {differ} of {len(digests)} have another program than the rest: texts, manifest or versions "
            "differ; load the same saved program on all ranks, or compile one model with the same options"
        )
