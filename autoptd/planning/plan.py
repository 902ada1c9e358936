"""The ways to train a model on a cluster, and a plan: one of them with its time, memory and the reason for its rank."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd
from typing import Any

from sympy import divisors

from autoptd.passes.cost.call_work import describe_uncounted
from autoptd.passes.cost.cluster import Cluster
from autoptd.passes.cost.throughput import Throughput
from autoptd.runtime.program.mesh import Mesh

RECOMPUTE = ("none", "selective", "full")
LEAST_SHARE, LEAST_LOSS = 0.005, 0.0005  # less would be printed as 0 %
MOST_CHUNKS = 8  # more save little bubble and send as much again
Key = tuple[int, int, str | int, int, bool]  # tensor ranks, microbatch size, recomputation, expert ranks, tokens


@dataclass(frozen=True, order=True)
class Candidate:
    """A way to train: t, p, d, b (sequences), m (microbatches per pipeline), v, the recomputation and the schedule.

    Experts of a mixture are divided over `expert` ranks; 0: over the tensor ranks. With `sequence_parallel` tokens are
    divided; else as the options of `compile` say, by default where it pays.
    """

    tensor: int
    pipeline: int
    data: int
    microbatch_size: int
    num_microbatches: int
    num_model_chunks: int
    recompute: str | int
    schedule: str
    expert: int = field(default=0, kw_only=True)
    sequence_parallel: bool = field(default=False, kw_only=True)

    @property
    def mesh(self) -> Mesh:
        return Mesh(self.tensor, self.pipeline, self.data, expert=self.expert)

    @property
    def num_stages(self) -> int:
        return self.pipeline * self.num_model_chunks

    @property
    def key(self) -> Key:
        """The settings that the costs of its calls depend on."""
        return self.tensor, self.microbatch_size, self.recompute, self.expert, self.sequence_parallel

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of `autoptd.compile` that follow it."""
        names = ("mesh", "schedule", "num_model_chunks", "microbatch_size", "num_microbatches", "recompute")
        further = (name for name in ("expert", "sequence_parallel") if getattr(self, name))
        return {name: getattr(self, name) for name in (*names, *further)}

    def __str__(self) -> str:
        return (
            f"{self.mesh}, {self.num_microbatches} microbatches of {self.microbatch_size}, "
            f"{self.num_model_chunks} chunks, recompute {self.recompute}{', tokens divided' * self.sequence_parallel}"
        )


@dataclass(frozen=True)
class Plan(Candidate):
    """One mesh with its best settings.

    If it is `simulated`, `breakdown` has the parts of `step_seconds` on the busiest rank (see `Simulation`), and
    `memory_bytes` is the peak of the fullest rank. Otherwise both are lower bounds for the mesh with any settings, and
    the settings are those with the lowest bound; then `fits` is False if the bound exceeds the memory, and None if it
    is unknown. `why` is the reason why the plan is the best, or its largest loss. `given` are the arguments of
    `autoptd.compile` that it was planned with; `uncounted` and `mfu` as of `Simulation`; a step has so many `tokens`.
    """

    step_seconds: float
    memory_bytes: int
    fits: bool | None
    breakdown: Mapping[str, float] = field(default_factory=dict)
    why: str = ""
    given: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    uncounted: Mapping[str, float] = field(default_factory=dict)
    tokens: int = 0
    mfu: float = 0.0

    @property
    def throughput(self) -> Throughput:
        return Throughput(self.step_seconds, self.mesh.size, self.tokens)

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of `autoptd.compile` that make its program, but for those of the model and its inputs."""
        own = super().options
        return {**own, **self.given, **own}  # in this order

    @property
    def simulated(self) -> bool:
        """Whether the step was simulated; otherwise its time is a lower bound."""
        return bool(self.breakdown)

    def __str__(self) -> str:
        at = "" if self.simulated else "at least "
        words = f"{super().__str__()}: {at}{self.step_seconds:.4g} s, {at}{self.memory_bytes / 1e9:.3g} GB; {self.why}"
        return "; ".join((words, *describe_uncounted(self.uncounted)))


def explain_rank(plan: Plan, ranked: Sequence[Plan]) -> str:
    """Return the reason for the rank of a simulated plan: its largest loss against the best plan."""
    best, whole = ranked[0], plan.step_seconds
    if plan is best:
        parts = sorted(plan.breakdown.items(), key=lambda part: -part[1])
        spent = ", ".join(f"{name} {s / whole:.0%}" for name, s in parts[:3] if s >= LEAST_SHARE * whole)
        ahead = ranked[1].step_seconds / whole - 1 if ranked[1:] else 0.0
        lead = f", {ahead:.1%} ahead of the next" if ahead >= LEAST_LOSS else ""
        return f"the fastest that fits{lead}: {spent}"
    slower = whole / best.step_seconds - 1
    if slower < LEAST_LOSS:
        return "as fast as the best"
    losses = {name: seconds - best.breakdown.get(name, 0.0) for name, seconds in plan.breakdown.items()}
    worst = max(losses, key=lambda name: losses[name])
    words = f"{worst} communication" if worst in ("tensor", "pipeline", "data") else worst
    return f"{slower:.1%} slower: {losses[worst]:.3g} s more {words}"


@dataclass(frozen=True)
class Space:
    """The limits of the search space; None is free."""

    world_size: int
    global_batch: int
    cluster: Cluster
    max_tensor: int | None = None
    microbatch_size: int | None = None
    num_model_chunks: int | None = None
    schedule: str | None = None
    recompute: str | None = None
    mesh: Mesh | None = None

    def meshes(self) -> Iterator[tuple[int, int, int]]:
        """Yield all (t, p, d) whose replicas divide the batch; tensor groups span nodes only with `max_tensor`."""
        for t in divisors(self.world_size):
            if t <= self.max_tensor if self.max_tensor else self._in_node(t):
                for p in divisors(self.world_size // t):
                    d = self.world_size // t // p
                    if self.global_batch % d == 0 and self.mesh in (None, Mesh(t, p, d)):
                        yield t, p, d

    def _in_node(self, t: int) -> bool:
        size = self.cluster.devices_per_node
        return t <= size and (size % t == 0 or self.world_size <= size)

    def candidates(self, layers: int, units: int, experts: int = 0, *, cores: bool = True) -> Iterator[Candidate]:
        """Yield all ways to train a model of so many `layers` that can be cut into so many stages (`units`).

        The `experts` are divided over any data ranks that divide what a tensor rank has of them. "selective" is of
        attention that is written out (`cores`), "full" of repeated layers.
        """
        free = [how for how, has in zip(RECOMPUTE, (True, cores, layers), strict=True) if has]
        for t, p, d in self.meshes():
            share = self.global_batch // d
            sizes = [2**k for k in range(share.bit_length())]
            for b in [self.microbatch_size] if self.microbatch_size else sizes:
                if share % b == 0:
                    for v, schedule in self._chunks(p, share // b, layers, units):
                        for recompute in [self.recompute] if self.recompute else free:
                            settings = t, p, d, b, share // b, v, recompute, schedule
                            for k in divisors(gcd(d, experts // t)) if experts and experts % t == 0 else (1,):
                                yield Candidate(*settings, expert=t * k if k > 1 else 0)

    def _chunks(self, p: int, m: int, layers: int, units: int) -> Iterator[tuple[int, str]]:
        """Yield model chunks with their schedule, only chunks of equal numbers of layers, which do not wait."""
        for v in [self.num_model_chunks] if self.num_model_chunks else range(1, MOST_CHUNKS + 1):
            schedule = self.schedule or ("1f1b" if v == 1 else "interleaved_1f1b")
            even = v == 1 or (p > 1 and layers % (p * v) == 0) or v == self.num_model_chunks
            grouped = schedule != "interleaved_1f1b" or m % p == 0
            if p * v <= (layers or units) and grouped and even and not (schedule == "1f1b" and v > 1):
                yield v, schedule
