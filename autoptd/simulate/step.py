"""A training step of a compiled program, simulated on a described cluster: its time, its memory, and the reasons."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

from autoptd.options import check_flags
from autoptd.passes.cost.call_work import describe_uncounted, find_uncounted
from autoptd.passes.cost.cluster import ITEM_BYTES, Cluster
from autoptd.passes.cost.durations import DTYPES, Precision
from autoptd.passes.cost.schedule_times import ActionTimes, step_seconds, walk, walking_order
from autoptd.passes.cost.throughput import Throughput
from autoptd.passes.ir.program import Stage
from autoptd.runtime.comm.trace import Phase, Rows, TimelineEntry, write_svg, write_trace
from autoptd.runtime.optimizer.gradient_buckets import BUCKET_BYTES
from autoptd.runtime.program.manifest import Manifest, count_tokens
from autoptd.runtime.program.mesh import Mesh
from autoptd.runtime.program.schedule import COMPUTING, Action, Schedule
from autoptd.simulate.memory import Owned, States, add_up_slots, count_outputs, count_owned, freeze_idle, trace_memory
from autoptd.simulate.stage_times import StageTimes, time_stages

Course = list[tuple[int, float]]


@dataclass(frozen=True)
class Simulation:
    """One simulated training step. Times are in seconds, memory in bytes.

    `tflops_per_device` counts GEMMs and attention's products in all passes, recomputation and what tensor ranks repeat
    included, as SC21 §5.1 does by its equation (3); `mfu` the plain model's, over the device's peak. `bubble_fraction`
    is the idle time of the `critical_rank` (the busiest) over its work, as (p - 1)/(v m) is. `breakdown` is that rank's
    step: compute, tensor, pipeline (gathers, and what messages delay the step), data, optimizer, bubble.
    `memory_bytes` is the peak of each pipeline rank, `memory` its course: (seconds, bytes) pairs. `held_bytes` says
    what the fullest rank holds at its peak; slots hold received values and gradients, with CUDA graphs all activations;
    buffers are those of receives, and float32 gradients while the optimizer steps. `uncounted` are operators without a
    rule of costs, and the shares of the FLOPs that they may hide, above 1 %: the step may take that much longer.
    """

    cluster: Cluster
    dtype: str
    step_seconds: float
    tflops_per_device: float
    mfu: float
    bubble_fraction: float
    critical_rank: int
    breakdown: Mapping[str, float]
    memory_bytes: tuple[int, ...]
    held_bytes: Mapping[str, int]
    memory: tuple[tuple[tuple[float, int], ...], ...]
    timeline: tuple[tuple[TimelineEntry, ...], ...]
    phases: tuple[Phase, ...]
    throughput: Throughput
    uncounted: Mapping[str, float] = field(default_factory=dict)

    @property
    def fits(self) -> bool:
        """Whether the peak of every rank fits in its device's memory, less the reserve."""
        return max(self.memory_bytes) <= self.cluster.device.usable_bytes

    def save_trace(self, path: str | Path) -> None:
        """Write a Chrome trace for Perfetto; a `path` that ends in .gz is compressed."""
        about = {"step": "predicted", "cluster": self.cluster.name, "dtype": self.dtype}
        write_trace(path, self.timeline, self.phases, self.memory, about)

    def save_svg(self, path: str | Path) -> None:
        """Write a picture like SC21 Figure 4."""
        write_svg(path, self.timeline, self.phases)

    def __str__(self) -> str:
        parts = [f"{name} {seconds / self.step_seconds:.1%}" for name, seconds in self.breakdown.items()]
        fullest, device = max(self.memory_bytes), self.cluster.device
        return (
            f"{self.cluster.name}, {self.dtype}: {self.step_seconds:.4g} s a step, {self.tflops_per_device:.1f} "
            f"TFLOP/s per device, {self.mfu:.1%} of its peak without recomputation\n"
            f"{self.cluster.expect(self.step_seconds)}\n"
            f"rank {self.critical_rank}: {', '.join(parts)}\n"
            f"memory: {fullest / 1e9:.3g} GB on pipeline rank {self.memory_bytes.index(fullest)}, "
            f"{(fullest + device.reserved_bytes) / 1e9:.3g} GB at most with what a process holds besides, "
            f"{'within' if self.fits else 'more than'} {device.memory_bytes / 1e9:.3g} GB"
            + "".join(f"\n{line}" for line in describe_uncounted(self.uncounted))
        )


@dataclass(frozen=True)
class Training:
    """The options of a step that the program does not record.

    `overlap`: sending does not hold up the sender, gradients are summed over the replicas while their stage's last
    backward and later ones run, and the tensor ranks sum a linear's gradient of its input while those of its weights
    are computed. `zero` 1: the replicas divide the optimizer's states among them. `wide_gradients`: the sums are at
    least float32. All as in our runtime, but that it divides states only where asked to; Megatron-LM of 2021 did none.
    """

    overlap: bool = True
    zero: int = 0
    wide_gradients: bool = True

    def __post_init__(self) -> None:
        check_flags(**{name: value for name, value in vars(self).items() if name != "zero"})
        if type(self.zero) is not int or self.zero not in (0, 1):
            raise ValueError(f"zero={self.zero!r}: expected 0 or 1 (ZeRO's first stage)")

    def states(self, precision: Precision, replicas: int) -> States:
        """Return the bytes of the states of training on so many replicas."""
        return States(precision, replicas * self.zero, self.wide_gradients)


def check_ranks(cluster: Cluster, count: int) -> None:
    """Raise ValueError if `count` processes outnumber the cores of a machine that `calibrate` measured alone.

    Such a cluster has no network of its own: its `network` is its `node` link.
    """
    cores = cluster.devices_per_node
    if cluster.device.multiprocessors == 1 and cluster.network == cluster.node and count > cores:
        raise ValueError(
            f"{count} processes on the {cores} cores of {cluster.name}: expected at most one process a core; choose a "
            "smaller mesh, or describe the network to more machines in the cluster file"
        )


def simulate_program(
    manifest: Manifest,
    stages: Sequence[Stage],
    schedule: Schedule,
    cluster: Cluster,
    dtype: str | None,
    training: Training,
) -> Simulation:
    """Walk the schedule with the times of its stages; see `CompiledProgram.simulate`."""
    check_ranks(cluster, manifest.mesh.size)
    precision = Precision.of(stages, dtype)
    times = time_stages(manifest, stages, cluster, precision, overlap=training.overlap)
    manifest = freeze_idle(manifest, stages)
    found = simulate_times(manifest, times, schedule, walking_order(schedule), cluster, precision, training)
    return replace(found, uncounted=find_uncounted(stages))


def simulate_times(
    manifest: Manifest,
    times: Sequence[StageTimes],
    schedule: Schedule,
    order: Sequence[tuple[int, Action]],
    cluster: Cluster,
    precision: Precision,
    training: Training,
) -> Simulation:
    """Walk a schedule of `manifest` whose stages have `times`, in its `walking_order`."""
    t, p, m = manifest.mesh.tensor, manifest.mesh.pipeline, manifest.num_microbatches
    rows: list[list[TimelineEntry]] = [[] for _ in range(p)]
    for entry in walk(order, p, action_times(times, blocking=not training.overlap)):
        rows[entry[0]].append(TimelineEntry._make(entry))
    timeline = tuple(map(tuple, rows))
    least = step_seconds(order, p, action_times(times, messages=False))
    owned = [count_owned(manifest, rank) for rank in range(p)]
    states = training.states(precision, manifest.mesh.data)
    phases = tuple(_finish(manifest.mesh, timeline, owned, cluster, states, training.overlap))
    pipelined = max(row[-1].end for row in timeline)
    step = max([pipelined, *(phase.end for phase in phases)])
    spent = [_add_up(times[rank::p], m) for rank in range(p)]
    critical = max(range(p), key=lambda rank: sum(spent[rank].values()))
    work = sum(spent[critical].values())
    breakdown = {**spent[critical], "pipeline": spent[critical]["pipeline"] + pipelined - least}
    for phase in phases:
        if phase.rank == critical:
            begin = max(phase.start, pipelined)
            breakdown[phase.name] = breakdown.get(phase.name, 0.0) + max(0.0, phase.end - begin)
    breakdown["bubble"] = step - sum(breakdown.values())
    courses, memory = hold_memory(manifest, times, schedule, cluster, states)
    totals = [round(sum(held.values())) for held in memory]
    sequences = manifest.microbatch_size * m * manifest.mesh.data
    computed = precision.dtype if manifest.autocast is None else DTYPES[manifest.autocast]
    return Simulation(
        cluster,
        precision.dtype,
        step_seconds=step,
        tflops_per_device=sum(time.flops for time in times) * m / p / step / 1e12,
        mfu=manifest.model_flops * m / (t * p) / step / cluster.device.peak(computed),
        bubble_fraction=(pipelined - work) / work,
        critical_rank=critical,
        breakdown=breakdown,
        memory_bytes=tuple(totals),
        held_bytes={name: round(size) for name, size in memory[totals.index(max(totals))].items()},
        memory=tuple(_list_memory(timeline, phases, courses)),
        timeline=timeline,
        phases=phases,
        throughput=Throughput(step, manifest.mesh.size, sequences * count_tokens(manifest.inputs)),
    )


def hold_memory(
    manifest: Manifest, times: Sequence[StageTimes], schedule: Schedule, cluster: Cluster, states: States
) -> tuple[list[Course], list[dict[str, float]]]:
    """Return the course of each pipeline rank's bytes, by moments (see `trace_memory`), and what it holds at its peak.

    The last moments are those of the phases after the schedule. None of it depends on when actions run.
    """
    copied = cluster.device.multiprocessors == 1  # processes on CPUs have gloo
    slots = add_up_slots(schedule, [time.slot for time in times])
    courses, memory = [], []
    for rank, actions in enumerate(schedule):
        own = count_owned(manifest, rank)
        held = states.held(own) | {"slots": slots[rank]} | count_outputs(manifest, rank)
        scattered = {stage: states.scattered(size, copied) for stage, size in own.after.items()}
        course = list(trace_memory(actions, times, scattered))
        for size in (states.scattered(own.trained, copied), states.copied(own)):
            course += [(course[-1][0] + 1, 0.0, size), (course[-1][0] + 2, 0.0, 0.0)]
        _, activations, buffers = max(course, key=lambda one: one[1] + one[2])
        memory.append({**held, "activations": activations, "buffers": buffers})
        always = sum(held.values())
        courses.append([(moment, always + kept + more) for moment, kept, more in course])
    return courses, memory


def _list_memory(
    timeline: Rows, phases: Sequence[Phase], courses: Iterable[Course]
) -> Iterator[tuple[tuple[float, int], ...]]:
    """Yield the course of each rank's bytes, by seconds."""
    for rank, (row, course) in enumerate(zip(timeline, courses, strict=True)):
        spans = [(e.start, e.end) for e in row if e.action.kind.computes]
        moments = [0.0, *chain(*spans, *((own.start, own.end) for own in phases if own.rank == rank))]
        yield tuple((moments[moment], round(size)) for moment, size in course)


def action_times(times: Sequence[StageTimes], blocking: bool = False, messages: bool = True) -> ActionTimes:
    """Return the times of actions; a message in pieces is put together before a stage begins."""
    forward, backward = COMPUTING
    seconds = {kind.send: [time.send[kind] * messages for time in times] for kind in COMPUTING}
    seconds[forward] = [time.forward.total + time.gather[forward] for time in times]
    seconds[backward] = [time.backward.total + time.gather[backward] for time in times]
    return ActionTimes(seconds, blocking and messages)


def _add_up(times: Sequence[StageTimes], microbatches: int) -> dict[str, float]:
    directions = [side for time in times for side in (time.forward, time.backward)]
    return {
        "compute": microbatches * sum(side.compute for side in directions),
        "tensor": microbatches * sum(side.tensor for side in directions),
        "pipeline": microbatches * sum(sum(time.gather.values()) for time in times),
    }


def _finish(
    mesh: Mesh, timeline: Rows, owned: Sequence[Owned], cluster: Cluster, states: States, overlap: bool
) -> Iterator[Phase]:
    """Yield the phases after the schedule: the remaining gradient sums, in the runtime's order, and the optimizer."""
    each, shards = states.gradient, max(states.shards, 1)
    rate = cluster.device.memory_bandwidth * cluster.device.memory_efficiency
    # A core sums and copies itself, as `Durations.seconds` has it of the tensor ranks' sums.
    overlap = overlap and cluster.device.multiprocessors > 1
    # Of the two halves of a ring's all-reduce the second brings new weights, where states are divided.
    summed, shared = (0.5, 0.5 * ITEM_BYTES[states.precision.dtype] / each) if shards > 1 else (1.0, 0.0)
    ends, joined, gathers = [], [], []
    for rank, own in enumerate(owned):
        groups = mesh.groups("tensor", pipeline=rank)
        replicas = cluster.slowest(zip(*groups, strict=True))
        end = timeline[rank][-1].end
        end += cluster.all_reduce_seconds(own.partial * each, cluster.slowest(groups))
        overlapped = 0.0
        made = [e for e in timeline[rank] if e.action.kind.produces_gradients and e.action.stage in own.after]
        last = {e.action.stage: e for e in made if overlap}  # backward of each stage
        for stage, entry in sorted(last.items(), key=lambda item: item[1].end):
            # Which completes one bucket after the other.
            buckets = max(1.0, own.after[stage] * each / BUCKET_BYTES)
            seconds = summed * cluster.all_reduce_seconds(own.after[stage] * each, replicas)
            first = entry.start + (entry.end - entry.start) / buckets
            overlapped = max(max(overlapped, first) + seconds, entry.end + seconds / buckets)
        left = sum(own.tied.values()) if overlap else own.trained
        end = max(end, overlapped) + summed * cluster.all_reduce_seconds(left * each, replicas)
        ends.append(end)
        gathers.append(shared * cluster.all_reduce_seconds(own.trained * each, replicas))
    for rank, own in enumerate(owned):
        end = ends[rank]
        for owners, elements in own.tied.items():
            holding = (chain.from_iterable(mesh.groups("tensor", pipeline=owner)) for owner in owners)
            ranks = cluster.slowest(zip(*holding, strict=True))
            end = max(end, *(ends[owner] for owner in owners))
            end += cluster.all_reduce_seconds(elements / shards * each, ranks)
        yield Phase(rank, "data", timeline[rank][-1].end, end)
        joined.append(end)
    ready = max(joined)  # the norm of all gradients needs all ranks
    for rank, own in enumerate(owned):
        yield Phase(rank, "optimizer", ready, ready + states.moved(own) / rate + gathers[rank])
