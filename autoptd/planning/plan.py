"""A way to train a model on a cluster, its time and memory, and the reason for its rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autoptd.planning.estimator import Candidate
from autoptd.runtime.program.mesh import Mesh

CAUSES = {
    "compute": "in computing (sizes of GEMMs, recomputation, stages that differ)",
    "tensor": "in the tensor group's all-reduces",
    "pipeline": "in messages between stages",
    "data": "in summing gradients over the replicas",
    "optimizer": "in the optimizer's step",
    "bubble": "of bubble",
}


@dataclass(frozen=True)
class Plan:
    """One mesh with its best settings.

    If it is `simulated`, `breakdown` has the parts of `step_seconds` on the busiest rank (see `Simulation`), and
    `memory_bytes` is the peak of the fullest rank. Otherwise both are lower bounds for the mesh with any settings, and
    the settings are those with the lowest bound; then `fits` is False if the bound exceeds the memory, and None if it
    is unknown. `why` is the reason why the plan is the best, or its largest loss.
    """

    mesh: Mesh
    schedule: str
    num_model_chunks: int
    microbatch_size: int
    num_microbatches: int
    recompute: str | int
    step_seconds: float
    memory_bytes: int
    fits: bool | None
    breakdown: Mapping[str, float] = field(default_factory=dict)
    why: str = ""

    @property
    def simulated(self) -> bool:
        """Whether the step was simulated; otherwise its time is a lower bound."""
        return bool(self.breakdown)

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of `autoptd.compile` that follow the plan."""
        names = ("mesh", "schedule", "num_model_chunks", "microbatch_size", "num_microbatches", "recompute")
        return {name: getattr(self, name) for name in names}

    def __str__(self) -> str:
        at = "" if self.simulated else "at least "
        return (
            f"{self.mesh}, {self.num_microbatches} microbatches of {self.microbatch_size}, "
            f"{self.num_model_chunks} chunks, recompute {self.recompute}: {at}{self.step_seconds:.4g} s, "
            f"{at}{self.memory_bytes / 1e9:.3g} GB; {self.why}"
        )


def make_plan(
    candidate: Candidate,
    step_seconds: float,
    memory_bytes: int,
    fits: bool | None,
    breakdown: Mapping[str, float] | None = None,
) -> Plan:
    """Return the plan of a candidate, without a reason yet."""
    sizes = candidate.num_model_chunks, candidate.microbatch_size, candidate.num_microbatches
    settings = candidate.mesh, candidate.schedule, *sizes, candidate.recompute
    return Plan(*settings, step_seconds, memory_bytes, fits, breakdown or {})


def explain_rank(plan: Plan, ranked: Sequence[Plan]) -> str:
    """Return the reason for the rank of a simulated plan: its largest loss against the best plan."""
    best = ranked[0]
    if plan is best:
        parts = sorted(plan.breakdown.items(), key=lambda part: -part[1])
        spent = ", ".join(f"{name} {seconds / plan.step_seconds:.0%}" for name, seconds in parts[:3])
        lead = (
            f", {ranked[1].step_seconds / plan.step_seconds - 1:.1%} ahead of the next" if ranked[1:] else ""
        )
        return f"the fastest that fits{lead}: {spent}"
    slower = plan.step_seconds - best.step_seconds
    losses = {name: seconds - best.breakdown.get(name, 0.0) for name, seconds in plan.breakdown.items()}
    worst = max(losses, key=lambda name: losses[name])
    return f"{slower / best.step_seconds:.1%} slower: {losses[worst]:.3g} s more {CAUSES[worst]}"
