"""Step time of a pipeline over its closed form, with stages that sleep; and the CPU cost of an action.

A rank sleeps 20 ms forward and 40 ms backward per microbatch, whatever its number of chunks. The closed form
is the compute of the slowest rank, run alone in the same repetition, times 1 + (p - 1) / (v m).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch.distributed as dist

from samples.benchmarks.pinned import schedule_in_batches
from samples.benchmarks.report import publish
from samples.benchmarks.sleeping import Case, compare

Measured = dict[str, list[tuple[float, float]]]


def measure_apart(cases: list[Case]) -> list[Measured]:
    """Compare the cases, all of one number of ranks, in that many processes of their own."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "measured.json"
        work = json.dumps([dataclasses.asdict(case) for case in cases])
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(cases[0].num_ranks)]
        sample = ["-m", "samples.benchmarks.pipeline_efficiency", "--cases", work, "--output", str(output)]
        subprocess.run([sys.executable, *launcher, *sample], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        measured: list[Measured] = json.loads(output.read_text())
    return measured


def measure(cases: list[Case], output: Path) -> None:
    """Compare the cases as one of the ranks; the first writes what all saw."""
    schedule_in_batches()  # more threads than cores: else much of an action's time is context switches
    dist.init_process_group("gloo")
    measured = [compare(case) for case in cases]
    if dist.get_rank() == 0:
        output.write_text(json.dumps(measured))
    dist.barrier()
    dist.destroy_process_group()


def efficiency_row(case: Case, measured: Measured) -> list[str]:
    """Median and quickest step over the closed form, for both runtimes."""
    alone = [wall for wall, _ in measured["alone"]]
    cells = [case.schedule, *map(str, (case.num_ranks, case.num_model_chunks, case.num_microbatches))]
    cells.append(f"{statistics.median(alone) * case.formula * 1e3:.0f}")
    for name in ("autoptd", "torch"):
        steps = [wall for wall, _ in measured[name]]
        ratios = [step / (compute * case.formula) for step, compute in zip(steps, alone, strict=True)]
        best = min(steps) / (min(alone) * case.formula)
        cells += [f"{statistics.median(steps) * 1e3:.0f}", f"{statistics.median(ratios):.3f}", f"{best:.3f}"]
    return cells


def action_row(case: Case, measured: Measured) -> list[str]:
    """Milliseconds of CPU per action beyond the same stages run alone."""
    alone = statistics.median(cpu for _, cpu in measured["alone"])
    cells = [case.schedule, *map(str, (case.num_ranks, case.num_model_chunks, case.num_microbatches))]
    for name in ("autoptd", "torch"):
        costs = [(cpu - alone) / case.num_actions * 1e3 for _, cpu in measured[name]]
        cells += [f"{statistics.median(costs):.2f}", f"{min(costs):.2f}"]
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="keep the tables in samples/benchmarks/results")
    args = parser.parse_args()
    if args.cases:
        measure([Case(**case) for case in json.loads(args.cases)], args.output)
        return
    shapes = [("1f1b", 1), ("interleaved_1f1b", 2)]
    rows = []
    for p in args.ranks:
        cases = [Case(name, p, v, 4 * p, 0.02, 0.04, 256, args.repetitions) for name, v in shapes]
        rows += [efficiency_row(*pair) for pair in zip(cases, measure_apart(cases), strict=True)]
    shape = ["schedule", "p", "v", "m"]
    publish(
        "pipeline_efficiency",
        "Pipeline step over its closed form, sleeping stages",
        [*shape, "formula ms", "autoptd ms", "over", "best", "torch ms", "over", "best"],
        rows,
        [
            f"over: median ratio of {args.repetitions} repetitions; best: quickest step over quickest compute",
            "all under Linux's batch scheduling",
        ],
        args.write,
    )
    cases = [Case(name, 2, v, 8, 0.0, 0.0, 64, 4 * args.repetitions) for name, v in shapes]
    publish(
        "action_cost",
        "CPU milliseconds per action, empty stages",
        [*shape, "autoptd median", "least", "torch median", "least"],
        [action_row(*pair) for pair in zip(cases, measure_apart(cases), strict=True)],
        [
            "an action: one forward or backward of one chunk and microbatch, its sends and receives included",
            "all under Linux's batch scheduling",
        ],
        args.write,
        script="pipeline_efficiency",
    )


if __name__ == "__main__":
    main()
