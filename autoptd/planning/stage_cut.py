"""Cut a model into the stages of a pipeline, in the memory that a simulated step of them takes."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from autoptd.passes.cost.schedule_times import live_microbatches, order_actions
from autoptd.passes.stages.choice import choose_cut
from autoptd.passes.stages.cut import fit_cut
from autoptd.passes.stages.solver import Cut
from autoptd.planning.layer_costs import LayerCosts
from autoptd.runtime.program.mesh import Mesh
from autoptd.simulate.step import Training, hold_memory


def find_cut(
    costs: LayerCosts,
    mesh: Mesh,
    schedule: str,
    num_microbatches: int,
    chunks: int,
    *,
    training: Training,
    limit: int | None = None,
    scatter_gather: bool = True,
    search: bool = True,
) -> tuple[Cut, Sequence[int]]:
    """Return the cut with the shortest step whose ranks hold at most `limit` bytes, and what they hold.

    The bytes are those of a simulated step run as `training` says; where no cut is found to fit, the leanest one that
    was tried is returned. Without a limit nothing is counted. Without `search` the slowest stage is as fast as can be,
    which is quicker to find. ValueError for more stages than `costs.units`.
    """
    p = mesh.pipeline
    pipeline = costs.pipeline(mesh, schedule, num_microbatches, chunks)
    if limit is None:
        return choose_cut(pipeline, search=search), ()
    # A longer step holds no more, but with GPipe.
    count = num_microbatches if schedule == "gpipe" else min(num_microbatches, 3 * p)
    actions, _ = order_actions(schedule, p, count, chunks)
    states = training.states(costs.precision, mesh.data)

    def hold(cut: Cut) -> Sequence[int]:
        manifest, times = costs.divide(mesh, chunks, scatter_gather, cut.positions)
        manifest = replace(manifest, num_microbatches=count)
        _, memory = hold_memory(manifest, times, actions, costs.cluster, states)
        return [round(sum(own.values())) for own in memory]

    alive = live_microbatches(actions, p * chunks, lasting=costs.cluster.device.graphed_launch_seconds > 0)
    memory = costs.memory(alive, states, [0] * p, limit)
    found = fit_cut(partial(choose_cut, pipeline, search=search), hold, memory)
    if max(found[1]) > limit and search and chunks > 1:
        even = fit_cut(partial(choose_cut, pipeline, search=False), hold, memory)
        found = min(found, even, key=lambda own: max(own[1]))
    return found


def describe_cut(cut: Cut, pipeline: int, name: str) -> str:
    """Return the line of the log: the cut, timed on the cluster of that `name`."""
    mean = sum(cut.stage_costs) / pipeline
    return (
        f"cut_stages {len(cut.stage_costs)} stages on {pipeline} pipeline ranks, the slowest "
        f"{cut.bottleneck / 1e6:.3g} ms of forward and backward a microbatch on {name}: "
        f"{cut.bottleneck / mean:.3f} of the mean, {cut.gap:.1%} above the lower bound ({cut.method})"
    )
