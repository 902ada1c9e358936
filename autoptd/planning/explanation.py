"""An explanation of the time of a program's step on a cluster, and of settings that would change it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

import torch
from torch import nn

from autoptd.capture.example_inputs import make_example
from autoptd.options import Options
from autoptd.passes.ir.nodes import module_path
from autoptd.passes.ir.program import Stage
from autoptd.passes.tensor_parallel.sequence import has_divided_tokens
from autoptd.planning.estimator import Estimator
from autoptd.planning.plan import Candidate
from autoptd.runtime.program.manifest import Manifest
from autoptd.runtime.program.schedule import make_schedule
from autoptd.simulate.step import Simulation, Training, simulate_program

UNKNOWN = "the estimate needs the model, which a loaded program does not have: load(folder, model), report --model"
WORTH = 0.01  # of the time of a sequence that a recommended change must save
REORDERED = "estimates are for ranks in the default order, tensor innermost: compile for mesh=(tensor, pipeline, data)"


@dataclass(frozen=True)
class Change:
    """A step with another setting, simulated or estimated: `step_seconds`, and bytes of the fullest rank.

    `seconds_per_sequence` is relative to that of the program itself: below 1 is faster. It knows no memory limit. With
    `trains_alike` the batch is the same. `refused` is the reason why there is no estimate.
    """

    what: str
    step_seconds: float = 0.0
    memory_bytes: int = 0
    seconds_per_sequence: float = 0.0
    refused: str = ""
    trains_alike: bool = True

    def __str__(self) -> str:
        if self.refused:
            return f"{self.what}: not estimated, because {self.refused}"
        faster = 1 - self.seconds_per_sequence
        difference = f"{abs(faster):.1%} {'less' if faster > 0 else 'more'} time a sequence"
        return f"{self.what}: {difference}, {self.memory_bytes / 1e9:.3g} GB on the fullest rank"


@dataclass(frozen=True)
class Explanation:
    """The explanation of a step; `bubble_ideal` is (p - 1)/(v m).

    `exposed` are the seconds of communication in the critical rank's step, by kind, and `work_seconds` those of every
    pipeline rank's work. `changes` say what other settings would do.
    """

    simulation: Simulation
    modules: str
    bubble_ideal: float
    exposed: Mapping[str, float]
    work_seconds: tuple[float, ...]
    changes: tuple[Change, ...]

    @property
    def recommended(self) -> Change | None:
        """The change with the shortest step that fits in memory; None if the program fits and none is worth it."""
        size = self.simulation.cluster.device.usable_bytes
        fitting = [c for c in self.changes if c.trains_alike and not c.refused and c.memory_bytes <= size]
        best = min(fitting, key=lambda change: change.seconds_per_sequence, default=None)
        worth = best is not None and best.seconds_per_sequence < 1 - WORTH
        return best if worth or not self.simulation.fits else None

    @property
    def conclusion(self) -> str:
        """The sentence that says what to do."""
        if self.recommended is not None:
            return f"recommended: {self.recommended}" + ", which fits" * (not self.simulation.fits)
        if self.simulation.fits:
            return f"no other setting here saves {WORTH:.0%} of the time: keep these; autoptd.plan compares all meshes"
        return "no setting here fits: autoptd.plan searches all meshes, microbatch sizes and recomputation for one"

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
            *(f"with {change}" for change in self.changes),
            self.conclusion,
        )

    def __str__(self) -> str:
        return "\n".join((str(self.simulation), *self.lines))


def explain_program(
    manifest: Manifest,
    stages: Sequence[Stage],
    simulation: Simulation,
    model: nn.Module | None,
    loss_fn: Callable[..., torch.Tensor] | None,
    options: Options | None,
    training: Training,
) -> Explanation:
    """See `CompiledProgram.explain`; the `simulation` is of `training`.

    Without the `model`, or where ranks have their own order, only changes that leave the texts as they are have times.
    """
    p, v, m = manifest.mesh.pipeline, manifest.num_model_chunks, manifest.num_microbatches
    computed = ([entry for entry in row if entry.action.kind.computes] for row in simulation.timeline)
    work = tuple(sum(entry.end - entry.start for entry in row) for row in computed)
    reordered = manifest.mesh.ranks is not None
    divided = any(has_divided_tokens(stage.graph) for stage in stages)
    cluster, device = simulation.cluster, manifest.device
    options = options or Options(manifest.recompute, sequence_parallel=divided, device=device, cluster=cluster)
    model = None if reordered else model
    changes = [*_simulate_changes(manifest, stages, simulation, training, larger=model is None)]
    if model is None:
        changes.append(Change("other settings", refused=REORDERED if reordered else UNKNOWN))
    else:
        known = model, cluster, manifest.mesh.size, simulation.dtype, training
        given: Any = {"example_inputs": make_example(manifest), "loss_fn": loss_fn}
        settings = replace(options, sequence_parallel=False) if divided else options  # a candidate says where
        given |= {"scatter_gather": manifest.scatter_gather, "options": settings}
        changes += _change(manifest, options.recompute, Estimator(*known, **given), divided)
    modules = ", ".join(_name_modules(stage) for stage in stages[simulation.critical_rank :: p])
    exposed = {kind: simulation.breakdown[kind] for kind in ("tensor", "pipeline", "data")}
    return Explanation(simulation, modules, (p - 1) / (v * m), exposed, work, tuple(changes))


def _name_modules(stage: Stage) -> str:
    paths = [path for node in stage.graph.nodes if (path := module_path(node))]
    return f"{paths[0]} to {paths[-1]}" if paths else "no named module"


# Other settings


def _simulate_changes(
    manifest: Manifest, stages: Sequence[Stage], simulation: Simulation, training: Training, *, larger: bool
) -> Iterator[Change]:
    """Yield the changes that leave the texts as they are: more microbatches if `larger`, divided optimizer states."""
    p, m, v = manifest.mesh.pipeline, manifest.num_microbatches, manifest.num_model_chunks
    count = m + (p if manifest.schedule == "interleaved_1f1b" else 1)
    rows = [(f"{count} microbatches for {m} (a larger batch)", count, training)] if larger else []
    if manifest.mesh.data > 1 and not training.zero:
        rows.append(("zero=1 (parallel.shard_optimizer)", m, replace(training, zero=1)))
    for what, number, how in rows:
        changed, order = replace(manifest, num_microbatches=number), make_schedule(manifest.schedule, p, number, v)
        found = simulate_program(changed, stages, order, simulation.cluster, simulation.dtype, how)
        each = found.step_seconds / number / (simulation.step_seconds / m)
        yield Change(what, found.step_seconds, max(found.memory_bytes), each, trains_alike=number == m)


def _change(manifest: Manifest, recompute: str | int, estimator: Estimator, divided: bool) -> Iterator[Change]:
    """Yield the changes from a program whose tokens are `divided`, or whole."""
    mesh, m, v = manifest.mesh, manifest.num_microbatches, manifest.num_model_chunks
    sizes = mesh.tensor, mesh.pipeline, mesh.data, manifest.microbatch_size, m, v
    expert = mesh.expert if mesh.expert > mesh.tensor else 0
    own = Candidate(*sizes, recompute, manifest.schedule, expert=expert, sequence_parallel=divided)
    now = estimator.fit(own, None, search=True).step_seconds / (m * mesh.data)
    rows = [*_list_neighbours(own)]
    if mesh.tensor > 1:
        other = replace(own, sequence_parallel=not divided)
        rows.append((f"{'whole' if divided else 'divided'} tokens between divided regions", other))
    if own.expert:
        rows.append(("the experts of a tensor rank whole on each replica", replace(own, expert=0)))
    elif (groups := gcd(mesh.data, estimator.measure(*own.key).experts // mesh.tensor or 1)) > 1:
        ranks = mesh.tensor * groups
        rows.append((f"experts divided over {ranks} ranks", replace(own, expert=ranks)))
    for what, candidate in rows:
        try:
            found = estimator.fit(candidate, None, search=True)
        except ValueError as error:
            yield Change(what, refused=str(error))
            continue
        each = found.step_seconds / (candidate.num_microbatches * candidate.data)
        alike = candidate.num_microbatches * candidate.data == m * mesh.data
        yield Change(what, found.step_seconds, max(found.memory_bytes), each / now, trains_alike=alike)


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
