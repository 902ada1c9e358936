"""An explanation of the time of a program's step on a cluster, and of settings that would change it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from autoptd.capture.example_inputs import make_example
from autoptd.options import Options
from autoptd.passes.cost.durations import Durations, Precision
from autoptd.passes.cost.saved_tensors import Ledger
from autoptd.passes.cost.schedule_times import step_seconds, walking_order
from autoptd.passes.ir.node_info import info
from autoptd.passes.ir.nodes import module_path
from autoptd.passes.ir.program import Stage
from autoptd.passes.stages.cut import make_boundary
from autoptd.planning.estimator import Estimator
from autoptd.planning.plan import Candidate
from autoptd.runtime.collectives import copy_to_tensor, reduce_from_tensor
from autoptd.runtime.program.manifest import Boundary, Manifest
from autoptd.runtime.program.schedule import Schedule
from autoptd.simulate.stage_times import StageTimes, WorkTimes, add_up, divide_work, time_stage, time_stages
from autoptd.simulate.step import Simulation, Training, action_times

UNKNOWN = "the estimate needs the model, which a loaded program does not have"
REORDERED = (
    "estimates are for ranks in the default order, tensor innermost, and this mesh has another order: explain a "
    "program that is compiled for mesh=(tensor, pipeline, data)"
)


@dataclass(frozen=True)
class Change:
    """The estimate of a step with another setting: `step_seconds`, and bytes of the fullest rank.

    `seconds_per_sequence` is relative to the estimate of the program itself: below 1 is faster. `error` and
    `memory_error` are the errors of that estimate, which knows no memory limit; a change `within_error` may have the
    other sign. `refused` is the reason why there is no estimate.
    """

    what: str
    step_seconds: float = 0.0
    memory_bytes: int = 0
    seconds_per_sequence: float = 0.0
    error: float = 0.0
    memory_error: float = 0.0
    refused: str = ""

    @property
    def within_error(self) -> bool:
        """Whether the time of a sequence changes by no more than the error of the program's own estimate."""
        return not self.refused and abs(1 - self.seconds_per_sequence) <= self.error

    def __str__(self) -> str:
        if self.refused:
            return f"{self.what}: not estimated, because {self.refused}"
        faster = 1 - self.seconds_per_sequence
        difference = f"{abs(faster):.1%} {'less' if faster > 0 else 'more'} time a sequence"
        if self.within_error:
            difference = f"no difference beyond the estimate's error of {self.error:.1%} ({difference})"
        return (
            f"{self.what}: {difference}, {self.memory_bytes / 1e9:.3g} GB on the fullest rank; estimates of stages cut "
            f"for this cluster and dtype, of which those of the program itself are {self.error:.1%} off in time and "
            f"{self.memory_error:.1%} in memory"
        )


@dataclass(frozen=True)
class Explanation:
    """The explanation of a step; `bubble_ideal` is (p - 1)/(v m).

    `exposed` are the seconds of communication in the critical rank's step, by kind, and `work_seconds` those of every
    pipeline rank's work. `moves` say how long the schedule takes if the critical rank's longest stage is cut at the
    next place; `changes` what other settings would do.
    """

    simulation: Simulation
    modules: str
    bubble_ideal: float
    exposed: Mapping[str, float]
    work_seconds: tuple[float, ...]
    moves: tuple[str, ...]
    changes: tuple[Change, ...]

    @property
    def lines(self) -> tuple[str, ...]:
        """The sentences of the explanation, without the simulation."""
        sim, work = self.simulation, self.work_seconds
        mean = sum(work) / len(work)
        bubble = sim.breakdown["bubble"]
        exposed = [f"{name} {s:.3g} s ({s / sim.step_seconds:.1%})" for name, s in self.exposed.items()]
        return (
            f"critical is pipeline rank {sim.critical_rank} ({self.modules}): {max(work):.4g} s of work, "
            f"{max(work) / mean - 1:.1%} more than the mean rank",
            f"its bubble costs {bubble:.3g} s, {bubble / sim.step_seconds:.1%} of the step; idle over work is "
            f"{sim.bubble_fraction:.1%}, and (p - 1)/(v m) is {self.bubble_ideal:.1%}",
            f"communication that nothing hides: {', '.join(exposed)}",
            *(f"cut: {move}" for move in self.moves),
            *(f"with {change}" for change in self.changes),
        )

    def __str__(self) -> str:
        return "\n".join((str(self.simulation), *self.lines))


def explain_program(
    manifest: Manifest,
    stages: Sequence[Stage],
    schedule: Schedule,
    simulation: Simulation,
    model: nn.Module | None,
    loss_fn: Callable[..., torch.Tensor] | None,
    options: Options | None,
    training: Training,
) -> Explanation:
    """See `CompiledProgram.explain`; the `simulation` is of `training`.

    Without the `model` and its `options`, or where ranks have an order of their own, no change is estimated, which is
    said.
    """
    p, v, m = manifest.mesh.pipeline, manifest.num_model_chunks, manifest.num_microbatches
    work = tuple(
        sum(entry.end - entry.start for entry in row if entry.action.kind.computes)
        for row in simulation.timeline
    )
    reordered = manifest.mesh.ranks is not None
    changes: tuple[Change, ...] = (Change("other settings", refused=REORDERED if reordered else UNKNOWN),)
    if model is not None and options is not None and not reordered:
        known = model, simulation.cluster, manifest.mesh.size, simulation.dtype, training
        given: Any = {"example_inputs": make_example(manifest), "loss_fn": loss_fn, "options": options}
        estimator = Estimator(*known, **given, scatter_gather=manifest.scatter_gather, search=True)
        changes = tuple(_change(manifest, options.recompute, estimator, simulation))
    return Explanation(
        simulation,
        ", ".join(_name_modules(stage) for stage in stages[simulation.critical_rank :: p]),
        (p - 1) / (v * m),
        {kind: simulation.breakdown[kind] for kind in ("tensor", "pipeline", "data")},
        work,
        tuple(_move_cuts(manifest, stages, schedule, simulation, training)),
        changes,
    )


def _name_modules(stage: Stage) -> str:
    paths = [path for node in stage.graph.nodes if (path := module_path(node))]
    return f"{paths[0]} to {paths[-1]}" if paths else "no named module"


# The cut


def _move_cuts(
    manifest: Manifest, stages: Sequence[Stage], schedule: Schedule, simulated: Simulation, training: Training
) -> Iterator[str]:
    """Yield the change of the schedule's time if the critical rank's longest stage began later or ended earlier."""
    mesh, cluster = manifest.mesh, simulated.cluster
    precision, order = Precision.of(stages, simulated.dtype), walking_order(schedule)
    times = time_stages(manifest, stages, cluster, precision, overlap=training.overlap_tensor)
    durations = Durations(cluster, mesh, precision, training.overlap_tensor)

    def last_end(times: Sequence[StageTimes]) -> float:
        taken = action_times(times, blocking=not training.overlap_transfers)
        return float(step_seconds(order, mesh.pipeline, taken))

    now, own = last_end(times), range(simulated.critical_rank, len(stages), mesh.pipeline)
    at = max(own, key=lambda index: times[index].forward.total + times[index].backward.total)
    calls = divide_work(stages[at], Ledger(stages[at], mesh))
    for other in (index for index in (at - 1, at + 1) if 0 <= index < len(stages)):
        places = (
            (moved, crossing, add_up([calls[node] for node in moved], durations))
            for moved, crossing in _list_places(stages[at], first=other < at)
        )
        place = next((own for own in places if own[2].forward.total or own[2].backward.total), None)
        if place is None:
            continue
        moved, crossing, work = place
        changed, interfaces, before = list(times), list(manifest.stages), min(at, other)
        interfaces[before] = replace(interfaces[before], sends=crossing)
        interfaces[before + 1] = replace(interfaces[before + 1], receives=crossing)
        cut = replace(manifest, stages=tuple(interfaces))
        for index, sign in ((at, -1), (other, 1)):
            old = times[index]
            forward, backward = old.forward + work.forward * sign, old.backward + work.backward * sign
            new = WorkTimes(forward, backward, 0.0, 0.0, 0.0)
            changed[index] = time_stage(cut, index, new, cluster, precision)
        longer = last_end(changed) / now - 1
        yield (
            f"with {' to '.join(dict.fromkeys((moved[0].name, moved[-1].name)))} of stage {at} in stage {other} the "
            f"schedule takes {abs(longer):.2%} {'more' if longer >= 0 else 'less'}, messages included"
        )


def _list_places(stage: Stage, *, first: bool) -> Iterator[tuple[list[fx.Node], tuple[Boundary, ...]]]:
    """Yield the nodes that a stage gives away if it begins later, or (not `first`) ends earlier, and its new boundary.

    A boundary has whole tensors only, and no partial sums.
    """
    nodes = [node for node in stage.graph.nodes if node.op == "call_function"]
    carried = [node for node in stage.graph.nodes if info(node).role == "boundary"]
    rooted = {*carried, *(node for node in stage.graph.nodes if node.op == "get_attr")}
    for node in nodes:
        if not rooted.isdisjoint(node.all_input_nodes):
            rooted.add(node)
            carried.append(node)
    for count in range(1, len(nodes)) if first else range(len(nodes) - 1, 0, -1):
        ahead, behind = nodes[:count], {*nodes[count:], stage.graph.output_node()}
        live = [n for n in carried if n not in behind and not behind.isdisjoint(n.users)]
        summed = any(
            info(n).is_partial
            or n.target is copy_to_tensor
            or reduce_from_tensor in {u.target for u in n.users}
            for n in live
        )
        if live and not summed and all(isinstance(n.meta["val"], torch.Tensor) for n in live):
            yield ahead if first else nodes[count:], tuple(map(make_boundary, live))


# Other settings


def _change(
    manifest: Manifest, recompute: str | int, estimator: Estimator, simulated: Simulation
) -> Iterator[Change]:
    mesh, m, v = manifest.mesh, manifest.num_microbatches, manifest.num_model_chunks
    sizes = mesh.tensor, mesh.pipeline, mesh.data, manifest.microbatch_size, m, v
    own = Candidate(*sizes, recompute, manifest.schedule)
    estimated = estimator.estimate(own)
    now = estimated.step_seconds / (m * mesh.data)
    off = abs(estimated.step_seconds / simulated.step_seconds - 1)
    memory_off = abs(max(estimated.memory_bytes) / max(simulated.memory_bytes) - 1)
    for what, candidate in _list_neighbours(own):
        if candidate.schedule == "interleaved_1f1b" and candidate.num_microbatches % candidate.pipeline:
            reason = f"{candidate.num_microbatches} microbatches are no multiple of {candidate.pipeline} pipeline ranks"
            yield Change(what, refused=reason)
            continue
        try:
            found = estimator.estimate(candidate)
        except ValueError as error:
            yield Change(what, refused=str(error))
            continue
        each = found.step_seconds / (candidate.num_microbatches * candidate.data)
        yield Change(what, found.step_seconds, max(found.memory_bytes), each / now, off, memory_off)


def _list_neighbours(own: Candidate) -> Iterator[tuple[str, Candidate]]:
    p, m, v, t, d = own.pipeline, own.num_microbatches, own.num_model_chunks, own.tensor, own.data
    if p > 1:
        chunk = replace(own, num_model_chunks=v + 1, schedule="interleaved_1f1b")
        how = "" if own.schedule in ("1f1b", chunk.schedule) else f", {chunk.schedule} for {own.schedule}"
        yield f"{v + 1} model chunks for {v}{how}", chunk
    more = p if own.schedule == "interleaved_1f1b" else 1
    yield f"{m + more} microbatches for {m} (a larger batch)", replace(own, num_microbatches=m + more)
    twice, halved = f"{2 * t} tensor ranks for {t}, and half the", replace(own, tensor=2 * t)
    if d % 2 == 0:
        yield f"{twice} replicas", replace(halved, data=d // 2, num_microbatches=2 * m)
    elif p % 2 == 0:
        yield f"{twice} pipeline", replace(halved, pipeline=p // 2)
