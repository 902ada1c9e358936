"""Tokens per second of the demo's GPT on meshes of CPU processes, beside one process with two threads.

The same cores do the work in every row, so the ratio is what parallel execution costs on one machine.
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
from dataclasses import dataclass
from pathlib import Path

from samples import corpus
from samples.benchmarks.report import publish

WARM_UP_STEPS = 2


@dataclass(frozen=True)
class Case:
    """A way to run the training sample on a mesh (tensor, pipeline, data)."""

    mesh: tuple[int, int, int]
    num_model_chunks: int
    module: str

    @property
    def name(self) -> str:
        schedule = "1F1B" if self.num_model_chunks == 1 else f"interleaved, v = {self.num_model_chunks}"
        return f"{self.mesh}, {math.prod(self.mesh)} processes, {schedule}"


# As torchrun starts the ranks, and kept on cores under batch scheduling.
MODULES = {"free": "samples.train", "pinned": "samples.benchmarks.pinned"}


def train(case: Case, plain: bool, steps: int, log: Path) -> list[dict[str, float]]:
    """Run the training sample once; its log, one entry a step."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(math.prod(case.mesh))]
    kind = ["--plain"] if plain else ["--chunks", str(case.num_model_chunks)]
    sample = ["-m", case.module, "--mesh", ",".join(map(str, case.mesh)), *kind]
    launched = [*([] if plain else launcher), *sample]
    command = [sys.executable, *launched, "--steps", str(steps), "--losses", str(log)]
    threads = {"OMP_NUM_THREADS": "2" if plain else "1"}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, **threads})
    return [json.loads(line) for line in log.read_text().splitlines()]


def median_rate(entries: list[dict[str, float]]) -> float:
    return statistics.median(entry["tokens_per_second"] for entry in entries[WARM_UP_STEPS:])


def loss_distance(entries: list[dict[str, float]], reference: list[dict[str, float]]) -> float:
    """Largest relative difference of the loss over the steps."""
    pairs = zip(entries, reference, strict=True)
    return max(abs(one["loss"] - two["loss"]) / abs(two["loss"]) for one, two in pairs)


def compare(case: Case, repetitions: int, steps: int) -> list[str]:
    """Both rates, their ratio and the distance of the losses, the two runs in turn."""
    ours, plain, distances = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(repetitions):
            parallel_log = train(case, False, steps, Path(folder) / "parallel.jsonl")
            plain_log = train(case, True, steps, Path(folder) / "plain.jsonl")
            ours.append(median_rate(parallel_log))
            plain.append(median_rate(plain_log))
            distances.append(loss_distance(parallel_log, plain_log))
    ratios = [one / two for one, two in zip(ours, plain, strict=True)]
    return [
        f"{statistics.median(ours):.0f}",
        f"{statistics.median(plain):.0f}",
        f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
        f"{max(distances):.1e}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mesh", action="append", help="tensor,pipeline,data; may be given several times")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="keep the table in samples/benchmarks/results")
    args = parser.parse_args()
    corpus.load_corpus()
    rows = []
    for text in args.mesh or ["2,2,2", "1,2,2"]:
        tensor, pipeline, data = (int(size) for size in text.split(","))
        for launch, module in MODULES.items():
            for chunks in (1, 2) if pipeline > 1 else (1,):
                case = Case((tensor, pipeline, data), chunks, module)
                rows.append([case.name, launch, *compare(case, args.repetitions, args.steps)])
    publish(
        "throughput",
        "Tokens per second: mesh of processes beside one process with two threads",
        [
            "mesh (tensor, pipeline, data)",
            "ranks",
            "tokens/s",
            "one process",
            "ratio",
            "largest relative loss difference",
        ],
        rows,
        [
            f"{args.repetitions} repetitions of {args.steps} steps, float32 fused AdamW, in turn",
            f"rate: median step after the first {WARM_UP_STEPS}; ratio: median (range) of the repetitions",
            "free: as torchrun starts them; pinned: each rank kept on its share of the cores, neighbours together, "
            "under Linux's batch scheduling (samples/benchmarks/pinned.py); the one process has all cores",
        ],
        args.write,
    )


if __name__ == "__main__":
    main()
