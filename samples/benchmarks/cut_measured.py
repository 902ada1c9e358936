"""Two pipeline ranks on this machine: our cut beside one by layers, as predicted and as run.

Models of transformers, their vocabulary and widths divided, so that a head weighs as many layers as in the real one.
The two programs take turns, step by step, on two gloo processes of one thread each.

Run: python -m samples.benchmarks.cut_measured [--write] [--steps N] [--parts N] [--only NAME]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import autoptd
from autoptd.passes.cost.cluster import Cluster
from autoptd.passes.cost.durations import Precision
from autoptd.simulate.stage_times import time_stages
from samples.benchmarks.heavy_models import CASES, Case
from samples.benchmarks.report import publish
from samples.benchmarks.uniform_cut import uniform_cuts

MICROBATCHES, TOKENS = 4, 64
WARM_UP_STEPS = 1
COLUMNS = (
    *("model", "predicted: slowest rank, times", "slowest rank by layers, CPU s", "ours", "times (range)"),
    *("step by layers, s", "ours", "times (range)", "loss, relative"),
)


def laptop() -> Cluster:
    """The shipped description, with this machine's memory: a rank may have it all."""
    cluster = Cluster.load("laptop-cpu")
    return replace(cluster, device=replace(cluster.device, memory_bytes=float(1 << 34)))


def compile_both(case: Case, model: nn.Module, parts: int) -> dict[str, autoptd.CompiledProgram]:
    def compile_one() -> autoptd.CompiledProgram:
        return autoptd.compile(
            model,
            mesh=(1, 2, 1),
            example_inputs=case.batch(1, TOKENS, parts),
            num_microbatches=MICROBATCHES,
            num_model_chunks=1,
            cluster=laptop(),
        )

    with uniform_cuts():
        uniform = compile_one()
    return {"by layers": uniform, "ours": compile_one()}


def predict(program: autoptd.CompiledProgram) -> float:
    """Seconds of a step's work on the slowest rank."""
    times = time_stages(program.manifest, program.stages, laptop(), Precision.of(program.stages))
    return MICROBATCHES * max(time.forward.total + time.backward.total for time in times)


def run_rank(case: Case, parts: int, steps: int, output: Path) -> None:
    """As one of the ranks: CPU seconds of every rank and wall seconds of every step, of both programs in turn."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = case.make(parts)
    programs = compile_both(case, model, parts)
    predicted = {name: predict(program) for name, program in programs.items()}
    bound = {name: program.bind(torch.device("cpu")) for name, program in programs.items()}
    batch = case.batch(MICROBATCHES, TOKENS, parts)
    measured: dict[str, list[list[float]]] = {name: [] for name in bound}
    for _ in range(WARM_UP_STEPS + steps):
        for name, parallel in bound.items():
            dist.barrier()
            wall, busy = time.perf_counter(), time.process_time()
            loss = parallel(**batch).loss
            loss.backward()
            parallel.zero_grad(set_to_none=True)
            own = torch.tensor([time.process_time() - busy, time.perf_counter() - wall, float(loss.detach())])
            ranks = [torch.empty_like(own) for _ in range(2)]
            dist.all_gather(ranks, own)
            measured[name].append(torch.stack(ranks).flatten().tolist())
    if dist.get_rank() == 0:
        output.write_text(json.dumps({"predicted": predicted, "measured": measured}))
    dist.barrier()
    dist.destroy_process_group()


def measure(case: Case, parts: int, steps: int) -> list[str]:
    """One line: CPU seconds of the slowest rank and wall seconds of a step, by layers and ours, and their ratios."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "measured.json"
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        own = ["-m", "samples.benchmarks.cut_measured", "--only", case.name, "--output", str(output)]
        numbers = ["--steps", str(steps), "--parts", str(parts)]
        subprocess.run([*launcher, *own, *numbers], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        found = json.loads(output.read_text())
    runs = {name: rows[WARM_UP_STEPS:] for name, rows in found["measured"].items()}
    busy = {name: [max(row[0], row[3]) for row in rows] for name, rows in runs.items()}
    wall = {name: [max(row[1], row[4]) for row in rows] for name, rows in runs.items()}
    cells = [case.name, f"{found['predicted']['by layers'] / found['predicted']['ours']:.2f}"]
    for times in (busy, wall):
        ratios = [one / two for one, two in zip(times["by layers"], times["ours"], strict=True)]
        medians = [f"{statistics.median(times[name]):.2f}" for name in ("by layers", "ours")]
        cells += [*medians, f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"]
    losses = [abs(one[2] / two[2] - 1) for one, two in zip(runs["by layers"], runs["ours"], strict=True)]
    return [*cells, f"{max(losses):.1e}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--only", help="the model of this name")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--parts", type=int, default=4, help="what vocabulary and widths are divided by")
    parser.add_argument("--write", action="store_true", help="keep the table in samples/benchmarks/results")
    args = parser.parse_args()
    cases = [case for case in CASES if args.only in (None, case.name)]
    if args.output:
        run_rank(cases[0], args.parts, args.steps, args.output)
        return
    publish(
        "cut_measured",
        "Cut by layers beside our cut, on two ranks here",
        COLUMNS,
        [measure(case, args.parts, args.steps) for case in cases],
        [
            f"Vocabulary and widths divided by {args.parts}, all layers; float32, {MICROBATCHES} microbatches of one "
            f"sequence of {TOKENS} tokens, 1F1B; two gloo processes of one thread; forward and backward, no optimizer.",
            f"Medians of {args.steps} steps after {WARM_UP_STEPS}, the programs in turn; times: by layers over ours.",
            "predicted: laptop-cpu, its shipped values; our cut is made for them. CPU s: of the rank that has most.",
        ],
        args.write,
    )


if __name__ == "__main__":
    main()
