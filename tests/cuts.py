"""Cut a program as `compile` does, at the positions that the search finds."""

from __future__ import annotations

from typing import Any

from autoptd.options import Options
from autoptd.pass_list import select_passes
from autoptd.passes.cost.cluster import Cluster
from autoptd.passes.cost.durations import Durations, Precision
from autoptd.passes.ir.program import Program
from autoptd.passes.stages.cut import cut_at
from autoptd.passes.stages.fused_order import FusedOrder
from autoptd.planning.layer_costs import LayerCosts
from autoptd.planning.stage_cut import describe_cut, find_cut
from autoptd.simulate.step import Training


def finish_uncut(program: Program, recompute: str | int = "none", fuse: bool = True) -> FusedOrder:
    """Return the one stage of a program in the order that the cut divides."""
    return FusedOrder(program, select_passes(Options(recompute, fuse), "finish"))


def time_uncut(program: Program, cluster: Cluster | None = None, **options: Any) -> LayerCosts:
    """Return the costs of the one stage of a program on a cluster, default "dgx-a100"; `options` of `finish_uncut`."""
    precision = Precision.of(program.stages)
    durations = Durations(cluster or Cluster.load("dgx-a100"), program.mesh, precision)
    return LayerCosts(finish_uncut(program, **options), 0, durations)


def cut_stages(
    program: Program,
    *,
    num_stages: int,
    schedule: str = "interleaved_1f1b",
    num_microbatches: int | None = None,
    cluster: Cluster | None = None,
    **options: Any,
) -> Program:
    """Cut the one stage of `program` as `compile` does, in the memory of a given `cluster`."""
    costs, mesh = time_uncut(program, cluster, **options), program.mesh
    m = num_microbatches or 8 * mesh.pipeline
    limit = None if cluster is None else int(cluster.device.usable_bytes)
    cut, held = find_cut(costs, mesh, schedule, m, num_stages // mesh.pipeline, training=Training(), limit=limit)
    entry = describe_cut(cut, mesh.pipeline, costs.cluster.name)
    return cut_at(program, cut.positions, entry + "; it does not fit" * (limit is not None and max(held) > limit))
