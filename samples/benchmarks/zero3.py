"""ZeRO-3 data parallelism, the baseline of SC21 table 2: every replica gathers each layer when it needs it (§5.2)."""

from __future__ import annotations

from dataclasses import dataclass

from autoptd.compiled import CompiledProgram
from autoptd.passes.cost.cluster import ITEM_BYTES, Cluster
from autoptd.passes.cost.durations import Precision
from autoptd.passes.ir.program import recomputed_groups
from autoptd.runtime.program.manifest import Manifest
from autoptd.simulate.memory import States, count_owned, freeze_idle
from autoptd.simulate.stage_times import time_stages

# The share of a ring that DeepSpeed's gathers of 2021 reached, which copied every piece into and out of a flat
# buffer. Fitted on the six rows of table 2; what the rest of the model says comes from elsewhere.
RING_SHARE = 0.6


@dataclass(frozen=True)
class Zero3Step:
    """One step of sharded data parallelism, with the fields of `Simulation`; `memory_bytes` is a device's peak."""

    step_seconds: float
    tflops_per_device: float
    breakdown: dict[str, float]
    memory_bytes: int


def simulate_zero3(program: CompiledProgram, cluster: Cluster, devices: int) -> Zero3Step:
    """Time a step of a program of mesh (1, 1, 1) on `devices` replicas that shard parameters, gradients and states.

    Every parameter is gathered for the forward and for the backward, with recomputation for that too, and its
    gradient is reduce-scattered; nothing overlaps. The share of the ring's rate that the copies leave (`RING_SHARE`)
    is fitted to SC21 table 2, for DeepSpeed on Selene.
    """
    manifest, stages = program.manifest, program.stages
    precision = Precision.of(stages)
    (times,) = time_stages(manifest, stages, cluster, precision)
    m, ranks, item = manifest.num_microbatches, range(devices), ITEM_BYTES[precision.dtype]
    passes = 4 if any(recomputed_groups(stage.graph) for stage in stages) else 3
    whole, sizes = count_owned(freeze_idle(manifest, stages), 0), _parameter_bytes(manifest, item)
    moved = sum(cluster.all_gather_seconds(size, ranks) for size in sizes)
    # The ring's latency is paid in full; its bandwidth is shared with the copies.
    latency = len(sizes) * cluster.ring_latency(ranks)
    rate = cluster.device.memory_bandwidth * cluster.device.memory_efficiency
    breakdown = {
        "compute": m * (times.forward.compute + times.backward.compute),
        "data": m * passes * (latency + (moved - latency) / RING_SHARE),
        "optimizer": States(precision, devices, wide=False).moved(whole) / rate,
    }
    step = sum(breakdown.values())
    static = sum(States(precision, wide=False).held(whole).values()) / devices
    copied = States(precision, devices, wide=False).copied(whole)
    return Zero3Step(
        step,
        times.flops * m / step / 1e12,
        breakdown,
        round(static + max(times.kept + times.working + 2 * max(sizes), copied)),
    )


def _parameter_bytes(manifest: Manifest, item: float) -> list[float]:
    """Return the bytes of each gather: one for every parameter, tied ones once."""
    parameters = (p for p in manifest.parameters.values() if p.kind == "parameter")
    return [p.bytes / p.dtype.itemsize * item for p in parameters]
