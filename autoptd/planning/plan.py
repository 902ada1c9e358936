"""A way to train a model on a cluster, what it takes, and why it is not another's place in the ranking."""

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
    """One mesh with what is best on it.

    Where it is `simulated`, `breakdown` says what `step_seconds` are made of on the busiest rank (see `Simulation`),
    and `memory_bytes` is what the fullest rank holds at its peak. Else both are lower bounds, for the mesh whatever its
    settings, of which those with the lowest bound stand for the rest; `fits` is False where that is too much already,
    and None where it is unknown: not simulated. `why` says why the plan is the best, or what it loses by.
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
        """Whether the step was simulated; else it is bounded from below."""
        return bool(self.breakdown)

    @property
    def options(self) -> dict[str, Any]:
        """What `autoptd.compile` is given to follow the plan."""
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
    """The plan of a candidate; why, is not said yet."""
    sizes = candidate.num_model_chunks, candidate.microbatch_size, candidate.num_microbatches
    settings = candidate.mesh, candidate.schedule, *sizes, candidate.recompute
    return Plan(*settings, step_seconds, memory_bytes, fits, breakdown or {})


def explain_rank(plan: Plan, ranked: Sequence[Plan]) -> str:
    """Why a simulated plan is where it is among others: what it loses most by against the best."""
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
