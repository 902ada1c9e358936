"""The time and memory of each stage of a program on a cluster, for one microbatch on one rank."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, cycle

import torch
from torch import fx

from autoptd.passes.cost.call_work import CallWork, divide_work
from autoptd.passes.cost.cluster import Cluster, Device
from autoptd.passes.cost.durations import Durations, Precision, Seconds
from autoptd.passes.cost.saved_tensors import Ledger
from autoptd.passes.cost.work import Work
from autoptd.passes.ir.nodes import info, results_of, shaping_arguments
from autoptd.passes.ir.program import Stage, recomputed_groups
from autoptd.runtime.comm.transfer import is_scattered
from autoptd.runtime.program.manifest import Boundary, Manifest
from autoptd.runtime.program.mesh import Mesh
from autoptd.runtime.program.schedule import COMPUTING, Kind


@dataclass(frozen=True)
class WorkTimes:
    """The times of a stage's work on one microbatch, and its memory in bytes of the step's dtype.

    `kept` bytes wait for the backward, and `working` more live while it runs. A slot holds the bytes of `slot` all the
    time, which have the others where there are CUDA graphs. `flops` are those of products in all passes.
    """

    forward: Seconds
    backward: Seconds
    kept: float
    working: float
    flops: float
    slot: float = field(default=0.0, kw_only=True)

    def launched_on(self, device: Device) -> WorkTimes:
        """Return these in CUDA graphs, if there are any: with the launch of each direction that has work."""
        if not device.graphed_launch_seconds:
            return self
        sides = (self.forward, self.backward)
        forward, backward = (side + Seconds(device.launch_seconds if side.total else 0.0) for side in sides)
        slot = self.kept + self.working
        return replace(self, forward=forward, backward=backward, kept=0.0, working=0.0, slot=slot)


@dataclass(frozen=True)
class StageTimes(WorkTimes):
    """One stage on one microbatch, with its messages.

    All are by the kind that computes: `gather` is the all-gather of what arrives in pieces (SC21 §4.1), `send` the
    message that leaves, `arriving` the bytes that a posted receive holds. A slot has memory of its own for as many.
    """

    gather: Mapping[Kind, float]
    send: Mapping[Kind, float]
    arriving: Mapping[Kind, float]


def time_stages(
    manifest: Manifest, stages: Sequence[Stage], cluster: Cluster, precision: Precision, overlap: bool = True
) -> tuple[StageTimes, ...]:
    """Time all stages, each in its slowest replica; without `overlap` nothing runs during all-reduces.

    Raises ValueError for a dtype in which the device does not compute.
    """
    cluster.device.peak(precision.dtype)
    mesh = manifest.mesh
    durations = [Durations(cluster, mesh, precision, overlap, rank) for rank in range(mesh.pipeline)]
    works = (add_up(calls, own) for calls, own in zip(list_calls(stages, mesh), cycle(durations), strict=False))
    return tuple(time_messages(manifest, works, durations[0]))


def list_calls(stages: Sequence[Stage], mesh: Mesh) -> Iterator[Collection[CallWork]]:
    """Yield the work of each stage's calls; equal stages are measured once."""
    known: dict[object, Collection[CallWork]] = {}
    for stage in stages:
        signature = _sign(stage)
        if signature not in known:
            known[signature] = divide_work(stage, Ledger(stage, mesh)).values()
        yield known[signature]


def add_up(calls: Collection[CallWork], durations: Durations) -> WorkTimes:
    """Return the times and memory of some calls of a stage, launched."""

    def time(works: Iterable[Work]) -> Seconds:
        return sum(map(durations.seconds, works), Seconds())

    scale, forward = durations.precision.scale, time(call.forward for call in calls)
    backward = time(call.backward for call in calls) + time(call.forward for call in calls if call.again)
    kept, flops = sum(call.kept for call in calls) * scale, sum(call.flops for call in calls)
    working = max((call.working for call in calls), default=0) * scale
    return WorkTimes(forward, backward, kept, working, flops).launched_on(durations.cluster.device)


def _sign(stage: Stage) -> object:
    """Return a key that is equal for stages of equal cost: their operators, values and groups, without names."""
    place = {node: f"node {index}" for index, node in enumerate(stage.graph.nodes)}
    groups = {node: index for index, group in enumerate(recomputed_groups(stage.graph)) for node in group}
    rows = []
    for node in stage.graph.nodes:
        values = results_of(node) if node.op != "output" else ()
        shapes = tuple((v.shape, v.stride(), v.dtype) for v in values if isinstance(v, torch.Tensor))
        own = stage.parameters[str(node.target)].requires_grad if node.op == "get_attr" else node.target
        role = (info(node).role, info(node).requires_grad)
        arguments = repr(fx.map_arg((shaping_arguments(node), node.kwargs), place.__getitem__))
        rows.append((node.op, own if node.op != "placeholder" else role, shapes, arguments, groups.get(node)))
    return tuple(rows)


def time_messages(manifest: Manifest, works: Iterable[WorkTimes], durations: Durations) -> Iterator[StageTimes]:
    """Yield the times of each stage with its work, and of its messages."""
    mesh, cluster, scale = manifest.mesh, durations.cluster, durations.precision.scale
    groups = [mesh.groups("tensor", pipeline=rank) for rank in range(mesh.pipeline)]
    for index, (interface, work) in enumerate(zip(manifest.stages, works, strict=True)):
        ranks = cluster.slowest(groups[index % mesh.pipeline])
        gather, send, arriving = {}, {}, {}
        for kind in COMPUTING:
            # A single pipeline rank hands values over on the spot.
            ends = (interface.sends, interface.receives)[:: kind.direction] if mesh.pipeline > 1 else ((), ())
            (whole, pieces), (whole_in, pieces_in) = (_bytes(end, manifest, kind, scale) for end in ends)
            sides = (groups[k % mesh.pipeline] for k in (index, index + kind.direction))
            link = cluster.slowest_link(zip(*map(chain.from_iterable, sides), strict=True))  # of all replicas
            send[kind] = link.send_seconds(whole + pieces / mesh.tensor)
            gather[kind] = cluster.all_gather_seconds(pieces_in, ranks)
            arriving[kind] = whole_in + pieces_in
        received = min(work.kept, arriving[Kind.FORWARD])
        work = replace(work, kept=work.kept - received, slot=work.slot + received + arriving[Kind.BACKWARD])
        yield StageTimes(**vars(work), gather=gather, send=send, arriving=arriving)


def _bytes(crossing: Sequence[Boundary], manifest: Manifest, kind: Kind, scale: float) -> tuple[float, float]:
    """Return the bytes of boundary values, or of their gradients, that cross whole, and those that cross in pieces."""
    sizes = [0.0, 0.0]
    for boundary in crossing:
        if kind is Kind.FORWARD or boundary.requires_grad:
            scattered = is_scattered(boundary, manifest.mesh.tensor, manifest.scatter_gather)
            sizes[scattered] += boundary.bytes * scale
    return sizes[0], sizes[1]
