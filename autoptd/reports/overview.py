"""A compiled program in numbers, its decisions and costs, for tables, pages and JSON."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from math import prod

from autoptd.passes.cost.call_work import CallWork
from autoptd.passes.cost.durations import Precision
from autoptd.passes.cost.saved_tensors import Ledger, count_bytes, find_repeated
from autoptd.passes.cost.work import backward_work, forward_work
from autoptd.passes.ir.nodes import module_path
from autoptd.passes.ir.program import Stage, recomputed_groups
from autoptd.runtime import collectives, kernels
from autoptd.runtime.comm.transfer import is_scattered
from autoptd.runtime.program.manifest import Boundary, Manifest, StageInterface
from autoptd.runtime.program.schedule import Schedule
from autoptd.simulate.memory import States, add_up_slots, count_owned
from autoptd.simulate.stage_times import list_calls


@dataclass(frozen=True)
class StageOverview:
    """The numbers of one stage on one rank and one microbatch.

    `first` and `last` are module paths, `flops` those of the forward. `sent_bytes` leave one tensor rank forward;
    without scatter/gather (SC21 §4.1) they were `unscattered_bytes`.
    """

    index: int
    pipeline_rank: int
    first: str
    last: str
    parameters: int
    flops: int
    sent_bytes: int
    unscattered_bytes: int


@dataclass(frozen=True)
class Traffic:
    """A number of messages or collectives, and the sum of their bytes."""

    count: int
    bytes: int

    @classmethod
    def of(cls, sizes: Iterable[int]) -> Traffic:
        listed = list(sizes)
        return cls(len(listed), sum(listed))


@dataclass(frozen=True)
class Communication:
    """The communication of one tensor rank of each stage, summed over the stages.

    `tensor_forward`, `tensor_backward` are collectives, and `pipeline_forward`, `pipeline_backward` messages, of one
    microbatch; `tensor_repeated` are those of `tensor_backward` that recomputation repeats. `loss`: that reduces
    three numbers a token. Once a step replicas sum at most `gradient_bytes`, and tensor ranks gradients of `partial`.
    """

    tensor_forward: Traffic
    tensor_backward: Traffic
    tensor_repeated: Traffic
    loss: bool
    pipeline_forward: Traffic
    pipeline_backward: Traffic
    gradient_bytes: int
    partial: tuple[str, ...]


@dataclass(frozen=True)
class Tied:
    """A parameter on several pipeline ranks, which sum its gradients; `aliases` are its further names."""

    name: str
    aliases: tuple[str, ...]
    pipeline_ranks: tuple[int, ...]


@dataclass(frozen=True)
class Recomputation:
    """The number of groups that the backward computes again, and the bytes that all stages keep for them."""

    groups: int
    kept_bytes: int
    whole_bytes: int


@dataclass(frozen=True)
class Overview:
    """The program in numbers; bytes are in the program's own dtypes, `mesh` is (tensor, pipeline, data).

    `ideal_bubble` is (p - 1)/(v m) (SC21 §2.2). `slot_bytes` are those that each pipeline rank's slots hold with CUDA
    graphs. `shapes` are the compiled input shapes, one microbatch each; of several the numbers are the first's.
    """

    title: str
    mesh: tuple[int, int, int]
    world_size: int
    schedule: str
    num_microbatches: int
    microbatch_size: int
    num_model_chunks: int
    global_batch: int
    ideal_bubble: float
    stages: tuple[StageOverview, ...]
    communication: Communication
    tied: tuple[Tied, ...]
    recomputation: Recomputation
    slot_bytes: tuple[int, ...]
    log: tuple[str, ...]
    shapes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        manifest: Manifest,
        stages: Sequence[Stage],
        schedule: Schedule,
        log: Sequence[str],
        title: str,
        shapes: Sequence[str] = (),
    ) -> Overview:
        """Count a program's `stages`, which run by its `schedule`."""
        mesh, m, v = manifest.mesh, manifest.num_microbatches, manifest.num_model_chunks
        owners = ((n, manifest.owners(n)) for n, p in manifest.parameters.items() if p.kind == "parameter")
        aliases = manifest.aliases.items()
        tied = (Tied(n, tuple(a for a, b in aliases if b == n), own) for n, own in owners if len(own) > 1)
        worked = zip(list_calls(stages, mesh), manifest.stages, strict=True)
        slots = [_count_slot(manifest, calls, interface.sends) for calls, interface in worked]
        return cls(
            title=title,
            mesh=(mesh.tensor, mesh.pipeline, mesh.data),
            world_size=mesh.size,
            schedule=manifest.schedule,
            num_microbatches=m,
            microbatch_size=manifest.microbatch_size,
            num_model_chunks=v,
            global_batch=manifest.microbatch_size * m * mesh.data,
            ideal_bubble=(mesh.pipeline - 1) / (v * m),
            stages=tuple(_count_stage(manifest, *pair) for pair in zip(stages, manifest.stages, strict=True)),
            communication=_count_communication(manifest, stages),
            tied=tuple(tied),
            recomputation=_count_recomputation(manifest, stages),
            slot_bytes=tuple(map(round, add_up_slots(schedule, slots))),
            log=tuple(log),
            shapes=tuple(shapes),
        )


def _count_stage(manifest: Manifest, stage: Stage, interface: StageInterface) -> StageOverview:
    paths = [path for node in stage.graph.nodes if (path := module_path(node))]
    crossing = interface.sends if manifest.mesh.pipeline > 1 else ()
    held = [manifest.parameters[name] for name in interface.parameters]
    return StageOverview(
        index=interface.index,
        pipeline_rank=interface.index % manifest.mesh.pipeline,
        first=paths[0] if paths else "",
        last=paths[-1] if paths else "",
        parameters=sum(prod(p.local_shape(manifest.mesh.sizes)) for p in held if p.kind == "parameter"),
        flops=sum(forward_work(node).flops for node in stage.graph.nodes),
        sent_bytes=sum(_crossing(boundary, manifest) for boundary in crossing),
        unscattered_bytes=sum(b.bytes for b in crossing),
    )


def _crossing(boundary: Boundary, manifest: Manifest) -> int:
    tensor = manifest.mesh.tensor
    return boundary.bytes // (tensor if is_scattered(boundary, tensor, manifest.scatter_gather) else 1)


def _count_communication(manifest: Manifest, stages: Sequence[Stage]) -> Communication:
    divided = stages if manifest.mesh.tensor > 1 else ()
    nodes = [node for stage in divided for node in stage.graph.nodes]
    repeated = {node for stage in divided for node in find_repeated(stage, manifest.mesh)}
    moving = [node for node in nodes if getattr(node.target, "__module__", "") == collectives.__name__]
    forward = {node: size for node in moving if (size := forward_work(node).exchanged)}
    backward: list[int] = []
    for node in moving:
        work, linear = backward_work(node), node.target in collectives.COPIED
        # A linear gathers its input again, and scatters its gradient.
        backward += [work.gathered // 2] * 2 if linear and work.gathered else [work.exchanged] * bool(work.exchanged)
    again = [size for node, size in forward.items() if node in repeated]
    sends = [b for s in manifest.stages if manifest.mesh.pipeline > 1 for b in s.sends]
    ranks = range(manifest.mesh.pipeline) if manifest.mesh.data > 1 else ()
    trained = max((count_owned(manifest, rank).trained for rank in ranks), default=0)
    parameters = ((n, p) for n, p in manifest.parameters.items() if manifest.owners(n))
    partial = [name for name, parameter in parameters if parameter.placement.has_partial_gradient]
    return Communication(
        tensor_forward=Traffic.of(forward.values()),
        tensor_backward=Traffic.of(backward + again),
        tensor_repeated=Traffic.of(again),
        loss=any(node.target is kernels.cross_entropy for node in nodes),
        pipeline_forward=Traffic.of(_crossing(b, manifest) for b in sends),
        pipeline_backward=Traffic.of(_crossing(b, manifest) for b in sends if b.requires_grad),
        gradient_bytes=round(trained * States(Precision.of(stages)).gradient),
        partial=tuple(partial) if manifest.mesh.tensor > 1 else (),
    )


def _count_recomputation(manifest: Manifest, stages: Sequence[Stage]) -> Recomputation:
    if not any(recomputed_groups(stage.graph) for stage in stages):
        return Recomputation(0, 0, 0)
    ledgers = [Ledger(stage, manifest.mesh) for stage in stages]
    kept = sum(count_bytes(ledger.kept(ledger.groups)) for ledger in ledgers)
    whole = sum(count_bytes(ledger.kept(())) for ledger in ledgers)
    return Recomputation(sum(len(ledger.groups) for ledger in ledgers), kept, whole)


def _count_slot(manifest: Manifest, calls: Collection[CallWork], sends: Sequence[Boundary]) -> int:
    """Count the bytes of a slot as the simulator does for a device with CUDA graphs."""
    gradients = sum(b.bytes for b in sends if manifest.mesh.pipeline > 1 and b.requires_grad)
    return gradients + sum(call.kept for call in calls) + max((call.working for call in calls), default=0)
