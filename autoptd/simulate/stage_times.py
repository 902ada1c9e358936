"""The time and memory of each stage of a program on a cluster, for one microbatch on one rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import fx

from autoptd.passes.cost.cluster import Cluster
from autoptd.passes.cost.durations import Precision
from autoptd.passes.cost.saved_tensors import Ledger, count_bytes
from autoptd.passes.cost.work import Work, backward_work, forward_work
from autoptd.passes.ir.gradients import find_trained
from autoptd.passes.ir.node_info import info
from autoptd.passes.ir.nodes import values_taken
from autoptd.passes.ir.program import Stage, recomputed_groups
from autoptd.runtime.comm.transfer import is_scattered
from autoptd.runtime.program.manifest import Boundary, Manifest
from autoptd.runtime.program.mesh import Mesh
from autoptd.runtime.program.schedule import COMPUTING, Kind


@dataclass(frozen=True)
class Seconds:
    """Seconds of one direction of a stage: computing, and waiting for the tensor group's all-reduces."""

    compute: float
    tensor: float

    @property
    def total(self) -> float:
        return self.compute + self.tensor

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(self.compute + other.compute, self.tensor + other.tensor)


@dataclass(frozen=True)
class StageTimes:
    """One stage on one microbatch.

    `gather`, `send` and `arriving` are by the kind that computes: the all-gather of what arrives in pieces (SC21 §4.1),
    the message that leaves, and the bytes that a posted receive holds. `kept` bytes wait for the backward, and
    `working` more live while it runs. `flops` are those of GEMMs and attention's products in all passes.
    """

    forward: Seconds
    backward: Seconds
    gather: Mapping[Kind, float]
    send: Mapping[Kind, float]
    kept: float
    working: float
    arriving: Mapping[Kind, float]
    flops: float


def time_stages(
    manifest: Manifest,
    stages: Sequence[Stage],
    cluster: Cluster,
    precision: Precision,
    *,
    overlap: bool = True,
) -> tuple[StageTimes, ...]:
    """Time all stages, each in its slowest replica; without `overlap` nothing runs during all-reduces.

    Raises ValueError for a dtype in which the device does not compute.
    """
    known: dict[object, StageWork] = {}
    found = []
    for index, stage in enumerate(stages):
        signature = _sign(stage)
        if signature not in known:
            known[signature] = _join(divide_work(stage, Ledger(stage, manifest.mesh)).values())
        ranks = cluster.slowest(manifest.mesh.groups("tensor", pipeline=index % manifest.mesh.pipeline))
        times = time_work(known[signature], cluster, ranks, precision, overlap=overlap)
        found.append(time_stage(manifest, index, times, cluster, precision))
    return tuple(found)


@dataclass(frozen=True)
class StageWork:
    """The work and memory of a stage, or of a call of it, in the program's own dtype.

    `forward` and `backward` count equal works, as equal layers have them; `again` is the work that recomputation
    repeats in the backward. `working` are the most bytes that the backward holds besides the `kept` ones: gradients,
    and tensors saved by a recomputed group.
    """

    forward: Counter[Work]
    backward: Counter[Work]
    again: Counter[Work]
    kept: int
    working: int
    flops: float


def divide_work(stage: Stage, ledger: Ledger) -> dict[fx.Node, StageWork]:
    """Return the work of each call of a stage; a storage is kept by the first call, or group, that needs it."""
    groups = recomputed_groups(stage.graph)
    first = {group[0]: group for group in groups}
    inside = {node: group for group in groups for node in group}
    again = {group[0]: count_bytes(ledger.saved(group)) for group in groups}
    repeated = {node for group in groups for node in ledger.repeated(group)}
    trained = find_trained(stage)
    seen: set[torch.UntypedStorage] = set()
    found = {}
    for node in ledger.nodes:
        forward = forward_work(node)
        kept = ledger.storages(values_taken(first[node])) if node in first else set()
        kept = (kept if node in inside else ledger.saved([node])) - seen
        seen |= kept
        backward = backward_work(node, trained)
        once = _product_flops(forward)
        found[node] = StageWork(
            Counter([forward]),
            Counter([backward]),
            Counter([forward] * (node in repeated)),
            count_bytes(kept),
            ledger.differentiated(node, trained) + (again[inside[node][0]] if node in inside else 0),
            once + _product_flops(backward) + once * (node in inside),
        )
    return found


def _join(works: Collection[StageWork]) -> StageWork:
    forward, backward, again = Counter[Work](), Counter[Work](), Counter[Work]()
    for work in works:
        forward.update(work.forward)
        backward.update(work.backward)
        again.update(work.again)
    return StageWork(
        forward,
        backward,
        again,
        sum(work.kept for work in works),
        max((work.working for work in works), default=0),
        sum(work.flops for work in works),
    )


def _sign(stage: Stage) -> object:
    """Return a key that is equal for stages of equal cost: their operators, values and groups, without names.

    Integers among the arguments are left out: dimensions and shapes, which the values show, or an operator's number.
    """
    place = {node: index for index, node in enumerate(stage.graph.nodes)}

    def read(argument: object) -> object:
        if isinstance(argument, fx.Node):
            return place[argument]
        if isinstance(argument, (tuple, list)):
            return tuple(map(read, argument))
        return None if type(argument) is int else argument

    groups = {node: index for index, group in enumerate(recomputed_groups(stage.graph)) for node in group}
    rows = []
    for node in stage.graph.nodes:
        value = node.meta.get("val")
        tensors = value if isinstance(value, (tuple, list)) else (value,)
        shapes = tuple((v.shape, v.stride(), v.dtype) for v in tensors if isinstance(v, torch.Tensor))
        own = stage.parameters[str(node.target)].requires_grad if node.op == "get_attr" else node.target
        role = (info(node).role, info(node).requires_grad)
        arguments = (read(node.args), tuple((key, read(a)) for key, a in node.kwargs.items()))
        rows.append((node.op, own if node.op != "placeholder" else role, shapes, arguments, groups.get(node)))
    return tuple(rows)


@dataclass(frozen=True)
class WorkTimes:
    """A `StageWork` on a cluster, in seconds and in bytes of the step's dtype."""

    forward: Seconds
    backward: Seconds
    again: Seconds
    kept: float
    working: float
    flops: float


def time_work(
    work: StageWork, cluster: Cluster, ranks: Sequence[int], precision: Precision, *, overlap: bool = True
) -> WorkTimes:
    """Time a work on the tensor group `ranks`; raise ValueError for a dtype in which the device does not compute."""
    cluster.device.peak(precision.dtype)
    return WorkTimes(
        add_up(work.forward, cluster, ranks, precision, overlap),
        add_up(work.backward, cluster, ranks, precision, overlap),
        add_up(work.again, cluster, ranks, precision, overlap),
        work.kept * precision.scale,
        work.working * precision.scale,
        work.flops,
    )


def time_stage(
    manifest: Manifest, index: int, work: WorkTimes, cluster: Cluster, precision: Precision
) -> StageTimes:
    """Return the times of a stage with that work, and of its messages."""
    ranks = cluster.slowest(manifest.mesh.groups("tensor", pipeline=index % manifest.mesh.pipeline))
    crossing = {kind: _cross(manifest, index, kind, cluster, ranks, precision) for kind in COMPUTING}
    return StageTimes(
        forward=work.forward,
        backward=work.backward + work.again,
        gather={kind: one.gather_seconds for kind, one in crossing.items()},
        send={kind: one.send_seconds for kind, one in crossing.items()},
        kept=work.kept,
        working=work.working,
        arriving={kind: one.received_bytes for kind, one in crossing.items()},
        flops=work.flops,
    )


def add_up(
    works: Mapping[Work, int], cluster: Cluster, ranks: Sequence[int], precision: Precision, overlap: bool
) -> Seconds:
    """Time `works`, with the number of each, on the tensor group `ranks`."""
    dtype, scale = precision.dtype, precision.scale
    compute = tensor = 0.0
    for work, count in works.items():
        compute += count * cluster.device.seconds(work, dtype, scale)
        tensor += count * cluster.exposed_seconds(work, ranks, dtype, scale, overlap=overlap)
    return Seconds(compute, tensor)


def count_flops(stage: Stage) -> int:
    """Count the FLOPs of a stage's products, forward and backward without recomputation."""
    trained = find_trained(stage)
    works = (work for n in stage.graph.nodes for work in (forward_work(n), backward_work(n, trained)))
    return round(sum(map(_product_flops, works)))


def _product_flops(work: Work) -> float:
    """Count as SC21 does, without the scores that the backward of a fused attention computes again."""
    return float(sum(product.flops for product in work.products if not product.repeated))


@dataclass(frozen=True)
class _Crossing:
    """One direction of a stage's boundaries: the message it sends, and what it receives."""

    send_seconds: float = 0.0
    gather_seconds: float = 0.0
    received_bytes: float = 0.0


def _cross(
    manifest: Manifest, index: int, kind: Kind, cluster: Cluster, ranks: Sequence[int], precision: Precision
) -> _Crossing:
    """Time the messages of a stage whose slowest tensor group is `ranks`."""
    mesh, interface = manifest.mesh, manifest.stages[index]
    if mesh.pipeline == 1:  # handed over on the spot
        return _Crossing()
    sends, receives = (interface.sends, interface.receives)[:: kind.direction]
    whole, scattered = _bytes(sends, manifest, kind, precision)
    received_whole, received_scattered = _bytes(receives, manifest, kind, precision)
    sent, consumer = whole + scattered / mesh.tensor, index + kind.direction
    return _Crossing(
        _send_seconds(sent, mesh, index, consumer, cluster),
        cluster.all_gather_seconds(received_scattered, ranks),
        received_whole + received_scattered,
    )


def _bytes(
    boundaries: Sequence[Boundary], manifest: Manifest, kind: Kind, precision: Precision
) -> tuple[float, float]:
    """Return the bytes of boundary values, or of their gradients, that cross whole, and those that cross in pieces."""
    sizes = [0.0, 0.0]
    for boundary in boundaries:
        if kind is Kind.FORWARD or boundary.requires_grad:
            scattered = is_scattered(boundary, manifest.mesh.tensor, manifest.scatter_gather)
            sizes[scattered] += boundary.bytes * precision.scale
    return sizes[0], sizes[1]


def _send_seconds(count: float, mesh: Mesh, source: int, destination: int, cluster: Cluster) -> float:
    """Return the seconds of the slowest replica's message between two stages, while its tensor peers send theirs."""
    sides = (mesh.groups("tensor", pipeline=stage % mesh.pipeline) for stage in (source, destination))
    here, there = cluster.farthest(zip(*map(chain.from_iterable, sides), strict=True))
    return cluster.send_seconds(count, here, there, senders=mesh.tensor)
