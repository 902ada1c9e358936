"""The planner on the runs of SC21 table 1: is the paper's (t, p) near to our best, and how long does it take?

The search is limited to what the paper used: all layers recomputed, no ZeRO, sends and sums of gradients that nothing
hides, the same number of layers on every stage. Run:
    python -m samples.benchmarks.planner [--write] [row ...]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import autoptd
from autoptd.options import Options
from autoptd.passes.cost.cluster import Cluster
from autoptd.planning.estimator import Estimate, Estimator
from autoptd.planning.plan import Candidate, Plan, Space
from samples.benchmarks.paper_model import build_paper_model
from samples.benchmarks.paper_rows import CLUSTER, MEGATRON, TABLE_1, PaperRow
from samples.benchmarks.report import publish

LARGEST = 16  # sequences of a microbatch, as in the paper


COLUMNS = (
    *("model", "devices", "best (t, p, d)", "v, b, m", "holds", "step", "paper's (t, p)", "its step"),
    "slower by",
    *("plan", "of it CPU"),
)
NOTES = (
    "Predicted, on dgx-a100. The step of the paper's (t, p) is with its best b and m.",
    "As in Megatron-LM of 2021, stages have as many layers each, and nothing hides sends and sums of gradients.",
    "v is what the released scripts have for the row; with --any-chunks each mesh has its best.",
    "holds: the best plan's fullest rank, of 80 GB, of which plans leave 6 % free.",
    "Where another (t, p) is ahead of the paper's it has the smaller t, and loses less in all-reduces.",
    "plan: what autoptd.plan took here, the model being built already.",
)


def main(arguments: list[str]) -> None:
    names = [name for name in arguments if not name.startswith("--")]
    free = "--any-chunks" in arguments
    cells = []
    for row in TABLE_1:
        if not names or row.name in names:
            cells.append(measure(row, None if free else row.chunks))
            print(*cells[-1], sep=" | ", flush=True)
    name, title = ("planner_any_chunks", ", any v") if free else ("planner", "")
    title = f"The planner on SC21 table 1{title}"
    publish(name, title, COLUMNS, cells, NOTES, "--write" in arguments, script="planner")


def measure(row: PaperRow, chunks: int | None) -> tuple[object, ...]:
    """One line of the table."""
    cluster, model = Cluster.load(CLUSTER), build_paper_model(row.layers, row.heads, row.hidden)
    fixed: Any = {"num_model_chunks": chunks, "recompute": "full"}
    size: Any = {"world_size": row.devices, "global_batch": row.batch, "cluster": cluster}
    start, busy = time.perf_counter(), time.process_time()
    plans = autoptd.plan(model, **size, **fixed, **asdict(MEGATRON), sequence_parallel=False)
    wall, cpu = time.perf_counter() - start, time.process_time() - busy
    options = Options(sequence_parallel=False)  # of 2021
    estimator = Estimator(model, cluster, row.devices, training=MEGATRON, options=options)
    space = Space(*size.values(), **fixed)
    own = min(step for step, _ in time_mesh(row, (row.tensor, row.pipeline), estimator, space))
    best, estimate = find_best(row, plans, estimator, space)
    return (
        row.name,
        row.devices,
        f"({best.tensor}, {best.pipeline}, {best.data})",
        f"{best.num_model_chunks}, {best.microbatch_size}, {best.num_microbatches}",
        f"{max(estimate.memory_bytes) / 1e9:.1f} GB",
        f"{estimate.step_seconds:.2f} s",
        f"({row.tensor}, {row.pipeline})",
        f"{own:.2f} s",
        f"{own / estimate.step_seconds - 1:.2%}",
        f"{wall:.1f} s",
        f"{cpu:.1f} s",
    )


def find_best(row: PaperRow, plans: Sequence[Plan], estimator: Estimator, space: Space) -> tuple[Candidate, Estimate]:
    """The best of the plans with even stages; what the planner has only a bound of is simulated while that is lower."""
    found: list[tuple[float, Candidate]] = []
    for plan in sorted((plan for plan in plans if plan.fits is not False), key=lambda plan: plan.step_seconds):
        if found and min(found)[0] <= plan.step_seconds:
            break
        found += time_mesh(row, (plan.tensor, plan.pipeline), estimator, space)
    _, best = min(found)
    return best, estimator.estimate(best)


def time_mesh(
    row: PaperRow, shape: tuple[int, int], estimator: Estimator, space: Space
) -> Iterator[tuple[float, Candidate]]:
    """Seconds of all that fit with these t and p and the same number of layers on every stage."""
    whole = estimator.measure(1, 1, "full")
    for candidate in space.candidates(whole.layers, whole.units):
        even = row.layers % (candidate.pipeline * candidate.num_model_chunks) == 0
        if even and (candidate.tensor, candidate.pipeline) == shape and candidate.microbatch_size <= LARGEST:
            estimate = estimator.estimate(candidate)
            if max(estimate.memory_bytes) <= space.cluster.device.usable_bytes:
                yield estimate.step_seconds, candidate


if __name__ == "__main__":
    main(sys.argv[1:])
