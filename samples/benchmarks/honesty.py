"""The step that the simulator predicts beside the step that is run: the demo's GPT on this machine.

`autoptd.calibrate` measures the machine; `program.simulate` predicts each mesh with at most one process a core; then
the training sample runs on as many processes, each with one thread. A step is all that training does: forwards,
backwards, sums of gradients, clipping, fused AdamW. Each round calibrates anew and runs every mesh, so that a machine
whose speed changes is compared with itself. Last, the bytes that one microbatch keeps for its backward, by the ledger
and as autograd saves them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

import autoptd
from autoptd.passes.cost.durations import Precision
from autoptd.simulate.stage_times import time_stages
from samples import corpus, train
from samples.benchmarks.activation_memory import SavedTensors
from samples.benchmarks.report import publish
from samples.benchmarks.throughput import Case

MESHES = ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (1, 2, 2), (2, 2, 2))
CHUNKS = ((2, 2, 2), 2)  # the demo's own
WARM_UP_STEPS = 2


def measure_step(case: Case, steps: int) -> float:
    """Median seconds of a step, in processes of their own."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(math.prod(case.mesh))]
    sample = ["-m", "samples.train", "--mesh", ",".join(map(str, case.mesh))]
    settings = ["--chunks", str(case.num_model_chunks), "--steps", str(steps)]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "steps.jsonl"
        command = [sys.executable, *launcher, *sample, *settings, "--losses", str(log)]
        threads = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=threads)
        rates = [json.loads(line)["tokens_per_second"] for line in log.read_text().splitlines()]
    args = train.parse_arguments([])
    tokens = case.mesh[2] * args.microbatches * args.microbatch_size * args.length
    return float(tokens / statistics.median(rates[WARM_UP_STEPS:]))


def predict_steps(case: Case, clusters: Sequence[autoptd.Cluster]) -> list[autoptd.Simulation]:
    """The same step on the machine as it was measured in each round."""
    words = ["--mesh", ",".join(map(str, case.mesh)), "--chunks", str(case.num_model_chunks)]
    args = train.parse_arguments(words)
    program = train.compile_program(train.make_model(args), args)
    return [program.simulate(cluster) for cluster in clusters]


def count_kept() -> tuple[int, int]:
    """Bytes that a microbatch of the whole model keeps for its backward: what the ledger says, what autograd saves."""
    args = train.parse_arguments(["--microbatches", "1"])
    program = train.compile_program(train.make_model(args), args)
    tokens = torch.zeros(args.microbatch_size, args.length, dtype=torch.long)
    batch = train.name_inputs(args.model, tokens, tokens.clone())
    parallel = program.bind("cpu")
    saved = SavedTensors({**dict(parallel.named_parameters()), **dict(parallel.named_buffers()), **batch})
    with saved:
        parallel(**batch)
    cluster, precision = autoptd.Cluster.load("laptop-cpu"), Precision.of(program.stages)
    (times,) = time_stages(program.manifest, program.stages, cluster, precision)
    return round(times.kept), saved.nbytes


def row(case: Case, predicted: list[autoptd.Simulation], measured: list[float]) -> list[str]:
    """Both times and their ratio, medians of the rounds, and where the first round's predicted step goes."""
    steps = [simulation.step_seconds for simulation in predicted]
    ratios = [step / seconds for step, seconds in zip(steps, measured, strict=True)]
    parts = sorted(predicted[0].breakdown.items(), key=lambda part: -part[1])
    return [
        case.name,
        f"{1e3 * statistics.median(steps):.0f}",
        f"{1e3 * statistics.median(measured):.0f}",
        f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
        ", ".join(f"{name} {seconds / steps[0]:.0%}" for name, seconds in parts[:4]),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mesh", action="append", help="tensor,pipeline,data; may be given several times")
    parser.add_argument("--write", action="store_true", help="keep the table in samples/benchmarks/results")
    args = parser.parse_args()
    corpus.load_corpus()
    wanted = [tuple(map(int, text.split(","))) for text in args.mesh or ()] or MESHES
    first = autoptd.calibrate()
    cases = [Case((t, p, d), 1) for t, p, d in wanted]
    cases += [Case(*CHUNKS)] if CHUNKS[0] in wanted else []
    cases = [case for case in cases if math.prod(case.mesh) <= first.devices_per_node]
    machines: list[autoptd.Cluster] = []
    measured: dict[Case, list[float]] = {case: [] for case in cases}
    for _ in range(args.rounds):
        machines.append(autoptd.calibrate() if machines else first)
        for case in cases:
            measured[case].append(measure_step(case, args.steps))
    ledger, saved = count_kept()
    publish(
        "honesty",
        "A step predicted after `autoptd calibrate`, and measured",
        ["mesh (tensor, pipeline, data)", "predicted ms", "measured ms", "ratio", "predicted parts"],
        [row(case, predict_steps(case, machines), measured[case]) for case in cases],
        [
            f"{machines[0].name}, at most one process on each",
            f"{args.rounds} rounds: in each a calibration, and of every mesh the median of "
            f"{args.steps - WARM_UP_STEPS} steps; each value is the median of "
            "the rounds, the ratio that of their own ratios (range); the parts are the first round's",
            f"one microbatch on mesh (1, 1, 1) keeps {ledger:,} bytes by the ledger; autograd saves {saved:,}",
        ],
        args.write,
    )


if __name__ == "__main__":
    main()
