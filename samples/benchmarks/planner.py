"""The planner on the runs of SC21 table 1: is the paper's (t, p) near to our best, and how long does it take?

The search is limited to what the paper used: all layers recomputed, no ZeRO. Run:
    python -m samples.benchmarks.planner [--write] [row ...]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

import autoptd
from autoptd.estimation import Estimator
from autoptd.passes.cluster import Cluster
from autoptd.planner import Space
from samples.benchmarks.paper_model import build_paper_model
from samples.benchmarks.paper_rows import CLUSTER, TABLE_1, PaperRow
from samples.benchmarks.report import publish

LARGEST = 16  # sequences of a microbatch, as in the paper


COLUMNS = (
    *("model", "devices", "best (t, p, d)", "v, b, m", "holds", "step", "paper's (t, p)", "its step"),
    "slower by",
    *("plan", "of it CPU"),
)
NOTES = (
    "Predicted, on dgx-a100. The step of the paper's (t, p) is with its best b and m.",
    "v is what the released scripts have for the row; with --any-chunks each mesh has its best.",
    "holds: the best plan's fullest rank, of 80 GB; nothing is set aside for what a device needs besides.",
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
    start, busy = time.perf_counter(), time.process_time()
    best = autoptd.plan(model, world_size=row.devices, global_batch=row.batch, cluster=cluster, **fixed)[0]
    wall, cpu = time.perf_counter() - start, time.process_time() - busy
    space = Space(row.devices, row.batch, cluster, **fixed)
    own = min(time_mesh(row, Estimator(model, cluster), space))
    return (
        row.name,
        row.devices,
        f"({best.mesh.tensor}, {best.mesh.pipeline}, {best.mesh.data})",
        f"{best.num_model_chunks}, {best.microbatch_size}, {best.num_microbatches}",
        f"{best.memory_bytes / 1e9:.1f} GB",
        f"{best.step_seconds:.2f} s",
        f"({row.tensor}, {row.pipeline})",
        f"{own:.2f} s",
        f"{own / best.step_seconds - 1:.1%}",
        f"{wall:.1f} s",
        f"{cpu:.1f} s",
    )


def time_mesh(row: PaperRow, estimator: Estimator, space: Space) -> Iterator[float]:
    """Seconds of all that fit with the paper's t and p."""
    whole = estimator.measure(1, 1, "full")
    for candidate in space.candidates(whole.layers, whole.units):
        ours = (candidate.tensor, candidate.pipeline) == (row.tensor, row.pipeline)
        if ours and candidate.microbatch_size <= LARGEST:
            estimate = estimator.estimate(candidate)
            if max(estimate.memory_bytes) <= space.cluster.device.memory_bytes:
                yield estimate.step_seconds


if __name__ == "__main__":
    main(sys.argv[1:])
