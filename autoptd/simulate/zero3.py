"""ZeRO-3 data parallelism as a baseline: every replica gathers each layer when it needs it (SC21 §5.2, table 2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoptd.passes.cost.cluster import ITEM_BYTES, Cluster
from autoptd.passes.cost.durations import Precision
from autoptd.passes.ir.program import Stage, recomputed_groups
from autoptd.runtime.program.manifest import Manifest
from autoptd.simulate.memory import copied_bytes, count_owned, freeze_idle, optimizer_bytes, state_bytes
from autoptd.simulate.stage_times import time_stages

# The share of a ring that DeepSpeed's gathers of 2021 reached, which copied every piece into and out of a flat
# buffer. Fitted on the six rows of table 2; what the rest of the model says comes from elsewhere.
RING_SHARE = 0.6


@dataclass(frozen=True)
class Zero3Step:
    """One step of sharded data parallelism; see `Simulation` for the words. `memory_bytes` is a device's peak."""

    step_seconds: float
    tflops_per_device: float
    breakdown: dict[str, float]
    memory_bytes: int


def simulate_zero3(
    manifest: Manifest, stages: Sequence[Stage], cluster: Cluster, devices: int, dtype: str | None = None
) -> Zero3Step:
    """Time a step of a program of one rank on `devices` replicas that share parameters, gradients and states.

    Every parameter is gathered for the forward and for the backward, with recomputation for that too, and its
    gradient reduced and scattered; nothing overlaps. How much of the ring's rate its copies leave (`RING_SHARE`) is
    fitted to SC21 table 2, for DeepSpeed on Selene. ValueError for a program of more than one rank, or no device.
    """
    if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1:
        raise ValueError(f"devices={devices!r}: expected a whole number above 0")
    if manifest.mesh.size > 1:
        raise ValueError(
            f"ZeRO-3 is simulated for a program of mesh (1, 1, 1), and this one has {manifest.mesh}"
        )
    precision, cluster = Precision.of(stages, dtype), cluster.shared_by(devices)
    (times,) = time_stages(manifest, stages, cluster, precision)
    m, ranks, item = manifest.num_microbatches, range(devices), ITEM_BYTES[precision.dtype]
    passes = 4 if any(recomputed_groups(stage.graph) for stage in stages) else 3
    whole, sizes = count_owned(freeze_idle(manifest, stages), 0), _parameter_bytes(manifest, item)
    moved = sum(cluster.all_gather_seconds(size, ranks) for size in sizes)
    # The ring's latency is paid in full; its bandwidth is shared with the copies.
    latency = len(sizes) * cluster.ring_latency(ranks)
    rate = cluster.device.memory_bandwidth * cluster.device.memory_efficiency
    crowding = cluster.crowding(ranks)
    waiting = len(sizes) * cluster.waiting_seconds(ranks)
    gathering = latency + (moved - latency) / RING_SHARE
    breakdown = {
        "compute": crowding * m * (times.forward.compute + times.backward.compute),
        "data": m * passes * max(gathering, crowding * (gathering - waiting)),
        "optimizer": crowding * optimizer_bytes(whole, precision, devices, wide=False) / rate,
    }
    step = sum(breakdown.values())
    static = sum(state_bytes(whole, precision, 0, wide=False).values()) / devices
    copied = copied_bytes(whole, precision, devices, wide=False)
    return Zero3Step(
        step,
        times.flops * m / step / 1e12,
        breakdown,
        round(static + max(times.kept + times.working + 2 * max(sizes), copied)),
    )


def _parameter_bytes(manifest: Manifest, item: float) -> list[float]:
    """What each gather moves: a parameter, tied ones once."""
    parameters = (p for p in manifest.parameters.values() if p.kind == "parameter")
    return [p.bytes / p.dtype.itemsize * item for p in parameters]
