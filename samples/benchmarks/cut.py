"""The cut of stages beside one by layers, and beside the exact dynamic programme of the slowest stage. Predicted.

Run: python -m samples.benchmarks.cut [--write] [--models]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from autoptd.capture.export import capture
from autoptd.options import Options
from autoptd.pass_list import run_passes, select_passes
from autoptd.passes.cost.cluster import Cluster
from autoptd.passes.cost.durations import Durations, Precision
from autoptd.passes.ir.program import Program
from autoptd.passes.stages.choice import choose_cut
from autoptd.passes.stages.fused_order import FusedOrder
from autoptd.passes.stages.solver import cut_sequence
from autoptd.planning.layer_costs import LayerCosts
from autoptd.progress import show_progress
from autoptd.runtime.program.mesh import Mesh
from samples.benchmarks.heavy_models import CASES, Case
from samples.benchmarks.paper_model import build_paper_model
from samples.benchmarks.paper_rows import CLUSTER, TABLE_1, PaperRow
from samples.benchmarks.report import publish
from samples.benchmarks.uniform_cut import uniform_positions

TOKENS, RANKS = 1024, (2, 4, 8)
LONG_EFFORT = 8.0  # deterministic seconds of CP-SAT for the lightest rank, twenty times what the compiler gives
COLUMNS = (
    *("model", "p x v", "cut, s (CPU)"),
    *("slowest rank: by layers", "even stages", "ours", "lightest"),
    *("step: by layers", "even stages", "ours", "lightest"),
)


class Cuts:
    """The cuts of a model: what its slowest rank and its step take with any of them."""

    def __init__(self, program: Program, recompute: str, m: int, v: int) -> None:
        fused_order = FusedOrder(program, select_passes(Options(recompute), "finish"))
        durations = Durations(Cluster.load(CLUSTER), program.mesh, Precision.of(program.stages))
        self.row, self.p, self.m, self.v = fused_order.row, program.mesh.pipeline, m, v
        self.pipeline = LayerCosts(fused_order, 0, durations).pipeline(program.mesh, "interleaved_1f1b", m, v)
        self.times = self.pipeline.times

    def slowest(self, positions: Sequence[int]) -> int:
        """Nanoseconds of a microbatch on the slowest rank, transfers included."""
        return int(self._stages(positions).reshape(self.v, self.p).sum(0).max())

    def _stages(self, positions: Sequence[int]) -> np.ndarray:
        tolls = np.array([self.times.boundary_costs[at] or 0 for at in positions], np.int64)
        own = np.add.reduceat(np.array(self.times.costs, np.int64), [0, *positions])
        own[1:] += tolls
        own[:-1] += tolls
        return own

    def step(self, positions: Sequence[int]) -> float:
        """A step over the work of it divided evenly: 1 + (p - 1) / (v m) for even stages and no messages."""
        even = sum(self.times.costs) * self.m / self.p
        return float(self.pipeline.of_cuts(np.array([positions]))[0]) / even


def capture_model(model: torch.nn.Module, mesh: Mesh, microbatch: int | None, inputs: Any) -> Program:
    program = capture(model, mesh=mesh, microbatch_size=microbatch, example_inputs=inputs, loss_fn=None)
    with show_progress("capture") as say:
        return run_passes(select_passes(Options(), "arrange", "divide"), program, say)


def measure_row(row: PaperRow) -> tuple[object, ...]:
    """One line of the first table: seconds of the cut, and its slowest rank and step beside others'."""
    model = build_paper_model(row.layers, row.heads, row.hidden)
    program = capture_model(model, Mesh(row.tensor, row.pipeline, row.data), row.microbatch, None)
    stages, m = row.pipeline * row.chunks, row.num_microbatches
    start, busy = time.perf_counter(), time.process_time()
    cuts = Cuts(program, "full", m, row.chunks)
    cut = choose_cut(cuts.pipeline)
    wall, cpu = time.perf_counter() - start, time.process_time() - busy
    uniform = uniform_positions(cuts.row, stages)
    even = cut_sequence(
        cuts.times.costs, cuts.times.boundary_costs, num_stages=stages, num_pipeline_ranks=row.pipeline, effort=0.0
    ).positions
    lightest = cut_sequence(
        cuts.times.costs, cuts.times.boundary_costs, num_stages=stages, num_pipeline_ranks=row.pipeline,
        stage_ceiling=None, effort=LONG_EFFORT,
    )  # fmt: skip
    bound = cut.lower_bound
    return (
        row.name,
        f"{row.pipeline} x {row.chunks}",
        f"{wall:.1f} ({cpu:.1f})",
        *(f"{cuts.slowest(positions) / bound:.3f}" for positions in (uniform, even)),
        f"{cut.bottleneck / bound:.3f}",
        f"{lightest.bottleneck / bound:.3f}",
        *(f"{cuts.step(p):.3f}" for p in (uniform, even, cut.positions, lightest.positions)),
    )


def measure_model(case: Case) -> tuple[object, ...]:
    """One line of the second table: by layers over ours, for each number of ranks."""
    with torch.device("meta"):
        model, inputs = case.make().to(torch.bfloat16), case.batch(1, TOKENS)
    program = capture_model(model, Mesh(1, 1, 1), None, inputs)
    cells: list[str] = []
    for p in RANKS:
        cuts = Cuts(replace(program, mesh=Mesh(1, p, 1)), "none", 8 * p, 1)
        cut = choose_cut(replace(cuts.pipeline, schedule="1f1b"))
        uniform = uniform_positions(cuts.row, p)
        slowest = cuts.slowest(uniform) / cut.bottleneck
        cells += [f"{slowest:.2f}", f"{cuts.step(uniform) / cuts.step(cut.positions):.2f}"]
    return (case.name, *cells)


ROW_NOTES = (
    "slowest rank: its forward and backward of a microbatch, with recomputation and transfers, over a lower bound of "
    "every cut's: for v = 1 the least possible; else the even share of work, or the slowest stage that no cut avoids.",
    "step: of all microbatches, simulated, over the work divided evenly.",
    "by layers: l / (p v) layers a stage, the embedding with the first, the head with the last.",
    "even stages: the dynamic programme's, whose slowest stage is the least possible (exact).",
    "ours: chosen by its step. lightest: the least slowest rank that CP-SAT finds, given twenty times as long.",
    "For v > 1 the bound is of work that could be cut anywhere and laid on ranks in any shares. Stages end between "
    "operators, and ranks balanced out of uneven chunks wait for each other: with a lighter slowest rank a step may be "
    "longer.",
    "v as in the released scripts; the rows of one pipeline rank have nothing to cut.",
)
MODEL_NOTES = (
    f"As many times as long by layers as by our cut; {CLUSTER}, bf16, 8 p microbatches of one sequence "
    f"of {TOKENS} tokens, 1F1B; transfers included.",
    "mT5: the layers of its encoder and its decoder, in their order.",
)


def main(arguments: Sequence[str]) -> None:
    write = "--write" in arguments
    if "--models" not in arguments:
        rows = [measure_row(row) for row in TABLE_1 if row.pipeline > 1]
        publish("cut", "The cut of SC21 table 1's models, predicted", COLUMNS, rows, ROW_NOTES, write)
    columns = ["model", *(cell for p in RANKS for cell in (f"p = {p}: slowest rank", "step"))]
    rows = [measure_model(case) for case in CASES]
    title = "Cut by layers over our cut: slowest rank and step, predicted"
    publish("cut_models", title, columns, rows, MODEL_NOTES, write, script="cut")


if __name__ == "__main__":
    main(sys.argv[1:])
