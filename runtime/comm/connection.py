"""Connect this rank to the others: groups, channels, and the proof that all run the same program."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TypeVar

import torch
import torch.distributed as dist

from autoptd.runtime.comm.agreement import find_others, gather_given
from autoptd.runtime.comm.groups import Group, GroupCache, ProcessGroup, ThreadGroup, group_cache
from autoptd.runtime.comm.point_to_point import Channel, process_channels, thread_channels
from autoptd.runtime.comm.rank import Rank, thread_ranks
from autoptd.runtime.comm.threads import ThreadPosition, ThreadWorld
from autoptd.runtime.health.activity import Position
from autoptd.runtime.program.manifest import Manifest
from autoptd.runtime.program.mesh import Mesh

R = TypeVar("R")
Owners = tuple[int, ...]


@dataclass
class Connection:
    """A rank with its channels and further groups.

    `channels` are its own, by the pipeline ranks at their source and destination. `tied` has a group for each set of
    pipeline ranks that together own a parameter, this rank among them. `world` has all ranks, in the order of their
    global numbers; `position` tells what this rank is doing; `groups` caches torch's process groups.
    """

    rank: Rank
    channels: Mapping[tuple[int, int], Channel] = field(default_factory=dict)
    tied: Mapping[Owners, Group] = field(default_factory=dict)
    world: Group = field(default_factory=Group)
    position: Position = field(default_factory=Position)
    groups: GroupCache = field(default_factory=GroupCache)

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """Mark the groups as broken if the exchange of messages inside breaks off."""
        before, self.groups.broken = self.groups.broken, self.world.size > 1
        yield
        self.groups.broken = before


def connect(manifest: Manifest, device: torch.device, program: str) -> Connection:
    """Join the ranks that torchrun has started, and make every group and channel of the manifest.

    Starts ``torch.distributed`` (NCCL for a CUDA `device`, else gloo) unless the caller has; a mesh of one
    rank needs neither launcher nor process group. Raises ValueError, before anything else, if WORLD_SIZE is not the
    mesh's, and RuntimeError, which names the ranks, if `program`, a text of everything that all ranks share, differs.
    """
    mesh = manifest.mesh
    check_world_size(mesh)
    if mesh.size == 1:
        return _join(Connection(Rank.local(mesh, device=device)), manifest.seed, {})
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    default = dist.group.WORLD
    assert default is not None
    _compare(default, program, device)
    groups = group_cache(default)
    rank = Rank.distributed(mesh, device)
    tied: dict[Owners, Group] = {}
    for owners, members in _tied_groups(manifest):
        group = groups(dist.new_group, members)
        if rank.number in members:
            tied[owners] = ProcessGroup(group, device)
    connection = Connection(rank, tied=tied, world=ProcessGroup(groups.world or default, device), groups=groups)
    return _join(connection, manifest.seed, process_channels(mesh, device))


def run_threads(manifest: Manifest, body: Callable[[Connection], R]) -> list[R]:
    """Call ``body(connection)`` for all ranks at once, each in a thread; return the results by global rank.

    For the CPU only. The first exception of any rank is raised here and ends the others; so is a deadlock.
    """
    mesh = manifest.mesh
    world = ThreadWorld()
    ranks = thread_ranks(mesh, world)
    tied: list[dict[Owners, Group]] = [{} for _ in ranks]
    for owners, members in _tied_groups(manifest):
        name = f"group {list(members)} of a tied parameter"
        for index, member in enumerate(members):
            tied[member][owners] = ThreadGroup(world, name, len(members), index)
    channels = thread_channels(mesh, world)
    connections = []
    for own, rank in enumerate(ranks):
        group, position = ThreadGroup(world, "group of all ranks", mesh.size, own), ThreadPosition(world)
        connection = Connection(rank, tied=tied[own], world=group, position=position)
        connections.append(_join(connection, manifest.seed, channels))
    return world.run(body, connections)


def check_world_size(mesh: Mesh) -> None:
    """Raise ValueError unless there are as many processes as the mesh has ranks."""
    world_size = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == mesh.size:
        return
    raise ValueError(
        f"WORLD_SIZE is {world_size}, but {mesh} is a program for {mesh.size} ranks: start {mesh.size} "
        f"processes with torchrun, or compile for a mesh of {world_size}"
    )


def _tied_groups(manifest: Manifest) -> Iterator[tuple[Owners, tuple[int, ...]]]:
    """Yield each set of two or more pipeline ranks that own one parameter, with the global ranks of each group."""
    mesh = manifest.mesh
    sets = {manifest.owners(name) for name, p in manifest.parameters.items() if p.kind == "parameter"}
    for owners in sorted(ranks for ranks in sets if len(ranks) > 1):
        for line in mesh.groups("pipeline"):
            yield owners, tuple(line[pipeline] for pipeline in owners)


def _join(connection: Connection, seed: int, channels: Mapping[tuple[int, int], Channel]) -> Connection:
    connection.rank.randomness.seed = seed
    at, own = connection.rank.mesh.coordinates, connection.rank.number
    connection.channels = {(at(a).pipeline, at(b).pipeline): c for (a, b), c in channels.items() if own in (a, b)}
    return connection


def _compare(everyone: dist.ProcessGroup, program: str, device: torch.device) -> None:
    """Raise RuntimeError unless all ranks have the same program; drop the groups unless they are sound on all ranks."""
    groups = group_cache(everyone)
    sound = 0 if groups.broken else len(groups)
    own = torch.tensor([sound, *sha256(program.encode()).digest()], device=device)
    rows = gather_given(ProcessGroup(everyone, device), own)
    if any(row[0] != len(groups) for row in rows.values()):
        group_cache.cache_clear()
        group_cache(everyone).world = dist.new_group()
    differ, _ = find_others({rank: row[1:] for rank, row in rows.items()})
    if differ:
        raise RuntimeError(
            f"ranks {differ} of {len(rows)} have another program than the rest: texts, manifest or versions "
            "differ; load the same saved program on all ranks, or compile one model with the same options"
        )
