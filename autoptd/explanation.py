"""Why a program's step takes what it takes on a cluster, and what would change it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx, nn

from autoptd.estimation import Candidate, Estimator
from autoptd.example_inputs import make_example
from autoptd.options import Options
from autoptd.passes.cluster import Cluster
from autoptd.passes.durations import NANOSECONDS, Durations, Precision
from autoptd.passes.ledger import find_repeated
from autoptd.passes.program import Stage
from autoptd.passes.work import find_trained
from autoptd.runtime.manifest import Manifest
from autoptd.simulation import Simulation, Training

UNKNOWN = "as what they would do is estimated from the model, which a loaded program does not know"
REORDERED = (
    "as estimates are of ranks in the default order, tensor innermost, and this mesh has another: see them of a "
    "program for mesh=(tensor, pipeline, data)"
)


@dataclass(frozen=True)
class Change:
    """What another setting would make of a step: `step_seconds` and bytes of the fullest rank, as estimated.

    `seconds_per_sequence` is relative to the program's own, estimated too: below 1 is faster. `error` is that of the
    program's own estimate, which knows no limit of memory, and `memory_error` that of its bytes; a change that is
    `within_error` may be of the other sign. `refused` says why it cannot be.
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
        """Whether it changes the time of a sequence by no more than the program's own estimate is off."""
        return not self.refused and abs(1 - self.seconds_per_sequence) <= self.error

    def __str__(self) -> str:
        if self.refused:
            return f"{self.what}: cannot be, {self.refused}"
        faster = 1 - self.seconds_per_sequence
        within = f" (within the estimate's error of {self.error:.1%})" if self.within_error else ""
        return (
            f"{self.what}: {abs(faster):.1%} {'less' if faster > 0 else 'more'} time a sequence{within}, "
            f"{self.memory_bytes / 1e9:.3g} GB on the fullest rank; estimates, of which those of the program "
            f"itself are {self.error:.1%} off in time and {self.memory_error:.1%} in memory"
        )


@dataclass(frozen=True)
class Explanation:
    """`bubble_ideal` is (p - 1)/(v m); `exposed` the seconds of communication in the critical rank's step, by kind.

    `work_seconds` are those of every pipeline rank's work in a step. `moves` say what the slowest stage's neighbours
    would take if the cut moved by one operator; `changes` what other settings would do.
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
        """What there is to say beside the simulation, a sentence each."""
        sim, work = self.simulation, self.work_seconds
        mean = sum(work) / len(work)
        bubble = sim.breakdown["bubble"]
        exposed = ", ".join(
            f"{name} {s:.3g} s ({s / sim.step_seconds:.1%})" for name, s in self.exposed.items()
        )
        return (
            f"critical is pipeline rank {sim.critical_rank} ({self.modules}): {max(work):.4g} s of work, "
            f"{max(work) / mean - 1:.1%} more than the mean rank",
            f"its bubble costs {bubble:.3g} s, {bubble / sim.step_seconds:.1%} of the step; idle over work is "
            f"{sim.bubble_fraction:.1%}, and (p - 1)/(v m) is {self.bubble_ideal:.1%}",
            f"communication that nothing hides: {exposed}",
            *(f"cut: {move}" for move in self.moves),
            *(f"with {change}" for change in self.changes),
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

    Without the `model` and its `options`, or where ranks have an order of their own, no change is estimated, which is
    said.
    """
    p, v, m = manifest.mesh.pipeline, manifest.num_model_chunks, manifest.num_microbatches
    work = tuple(
        sum(entry.end - entry.start for entry in row if entry.action.kind in ("F", "B"))
        for row in simulation.timeline
    )
    kinds = ("tensor", "pipeline", "data")
    shared = simulation.cluster.shared_by(manifest.mesh.size)
    reordered = manifest.mesh.ranks is not None
    changes: tuple[Change, ...] = (Change("other settings", refused=REORDERED if reordered else UNKNOWN),)
    if model is not None and options is not None and not reordered:
        estimator = Estimator(
            model,
            simulation.cluster,
            manifest.mesh.size,
            simulation.dtype,
            training,
            example_inputs=make_example(manifest),
            loss_fn=loss_fn,
            scatter_gather=manifest.scatter_gather,
            fuse=options.fuse,
            layout=options.layout,
            rules=options.rules,
            search=True,
        )
        changes = tuple(_change(manifest, options.recompute, estimator, simulation))
    return Explanation(
        simulation,
        ", ".join(_name_modules(stage) for stage in stages[simulation.critical_rank :: p]),
        (p - 1) / (v * m),
        {kind: simulation.breakdown[kind] for kind in kinds},
        work,
        tuple(_move_cuts(manifest, stages, shared, simulation.dtype)),
        changes,
    )


def _name_modules(stage: Stage) -> str:
    paths = [str(n.meta["path"]) for n in stage.graph.nodes if n.op == "call_function" and n.meta.get("path")]
    return f"{paths[0]} to {paths[-1]}" if paths else "no named module"


# The cut


def _move_cuts(manifest: Manifest, stages: Sequence[Stage], cluster: Cluster, dtype: str) -> Iterator[str]:
    """What the cuts before and behind the slowest rank's longest stage would do one operator further in."""
    p = manifest.mesh.pipeline
    if len(stages) == 1:
        return
    durations = Durations(cluster, manifest.mesh, Precision.of(stages, dtype))
    costs = [list(_time_nodes(stage, durations)) for stage in stages]
    sums = [sum(cost for _, cost in own) for own in costs]
    ranks = [sum(sums[rank::p]) for rank in range(p)]
    slowest = max(ranks)
    at = max(range(ranks.index(slowest), len(stages), p), key=lambda index: sums[index])
    for other, ends in ((at - 1, costs[at]), (at + 1, costs[at][::-1])):
        moved = next(((node, cost) for node, cost in ends if cost), None)
        if moved is None or not 0 <= other < len(stages):
            continue
        node, cost = moved
        after = list(ranks)
        after[at % p] -= cost
        after[other % p] += cost
        gain = (slowest - max(after)) / NANOSECONDS
        verdict = f"saves {gain * 1e6:.3g} us" if gain > 0 else f"costs {-gain * 1e6:.3g} us"
        yield (
            f"moving {node.name} of stage {at} to stage {other} {verdict} a microbatch on the slowest rank, "
            "wider messages aside"
        )


def _time_nodes(stage: Stage, durations: Durations) -> Iterator[tuple[fx.Node, int]]:
    """Nanoseconds of each node, forward, backward and what the backward repeats."""
    trained, repeated = find_trained(stage), find_repeated(stage, durations.mesh)
    for node in stage.graph.nodes:
        forward, backward = durations.of_forward(node), durations.of_backward(node, trained)
        yield node, forward * (1 + (node in repeated)) + backward


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
    for what, candidate in _neighbours(own):
        if isinstance(candidate, str):
            yield Change(what, refused=candidate)
            continue
        try:
            found = estimator.estimate(candidate)
        except ValueError as error:
            yield Change(what, refused=str(error))
            continue
        each = found.step_seconds / (candidate.num_microbatches * candidate.data)
        yield Change(what, found.step_seconds, max(found.memory_bytes), each / now, off, memory_off)


def _neighbours(own: Candidate) -> Iterator[tuple[str, Candidate | str]]:
    """One more chunk, microbatch, and tensor rank, or the next that can be."""
    p, m, v, t, d = own.pipeline, own.num_microbatches, own.num_model_chunks, own.tensor, own.data
    chunk = own._replace(num_model_chunks=v + 1, schedule="interleaved_1f1b")
    if p > 1:
        reason = f"{m} microbatches are no multiple of {p} pipeline ranks"
        how = "" if own.schedule in ("1f1b", chunk.schedule) else f", {chunk.schedule} for {own.schedule}"
        yield f"{v + 1} model chunks for {v}{how}", chunk if m % p == 0 else reason
    more = p if own.schedule == "interleaved_1f1b" else 1
    yield f"{m + more} microbatches for {m} (a larger batch)", own._replace(num_microbatches=m + more)
    if d % 2 == 0:
        twice = own._replace(tensor=2 * t, data=d // 2, num_microbatches=2 * m)
        yield f"{2 * t} tensor ranks for {t}, and half the replicas", twice
    elif p % 2 == 0:
        yield (
            f"{2 * t} tensor ranks for {t}, and half the pipeline",
            own._replace(tensor=2 * t, pipeline=p // 2),
        )
