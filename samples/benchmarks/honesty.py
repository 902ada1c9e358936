"""The step that the simulator predicts beside the step that is run: the demo's GPT on this machine.

`autoptd.calibrate` measures the machine; `program.simulate` predicts each mesh on it, more processes than there are
cores included; then the training sample runs on as many processes, each with one thread. A step is all that training
does: forwards, backwards, sums of gradients, clipping, fused AdamW. Calibrations and runs take turns, and of each the
one counts during which other programs used least of the cores. Last, the bytes that one microbatch keeps for its
backward, by the ledger and as autograd saves them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import torch

import autoptd
from autoptd.passes.durations import Precision
from autoptd.stage_times import time_stages
from samples import corpus, train
from samples.benchmarks.activation_memory import SavedTensors
from samples.benchmarks.report import publish
from samples.benchmarks.throughput import Case

T = TypeVar("T")
MESHES = ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (1, 2, 2), (2, 2, 2))
CHUNKS = ((2, 2, 2), 2)  # the demo's own
WARM_UP_STEPS = 2
STAT = Path("/proc/stat")


@dataclass(frozen=True)
class Taken(Generic[T]):
    """A result, and the cores that other programs used meanwhile."""

    result: T
    others: float


def watch(call: Callable[[], T]) -> Taken[T]:
    """Call, and count what the machine computed beside it."""
    own, all_cores, start = _own_seconds(), _busy_seconds(), time.perf_counter()
    result = call()
    others = _busy_seconds() - all_cores - (_own_seconds() - own)
    return Taken(result, max(0.0, others) / (time.perf_counter() - start))


def _own_seconds() -> float:
    """CPU seconds of this process and of those it has started and waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def _busy_seconds() -> float:
    """CPU seconds of all programs of the machine and of its host, as Linux counts them; elsewhere of nobody."""
    if not STAT.exists():
        return _own_seconds()
    user, nice, system, _, _, interrupts, soft, stolen = map(int, STAT.read_text().split()[1:9])
    return (user + nice + system + interrupts + soft + stolen) / os.sysconf("SC_CLK_TCK")


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


def predict_step(case: Case, cluster: autoptd.Cluster) -> autoptd.Simulation:
    """The same step on the measured machine."""
    words = ["--mesh", ",".join(map(str, case.mesh)), "--chunks", str(case.num_model_chunks)]
    args = train.parse_arguments(words)
    return train.compile_program(train.make_model(args), args).simulate(cluster)


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


def quietest(found: list[Taken[T]]) -> Taken[T]:
    return min(found, key=lambda taken: taken.others)


def row(case: Case, measured: list[Taken[float]], cluster: autoptd.Cluster) -> list[str]:
    """Both times, their ratio, and where the predicted step goes."""
    predicted, best = predict_step(case, cluster), quietest(measured)
    parts = sorted(predicted.breakdown.items(), key=lambda part: -part[1])
    return [
        case.name,
        f"{1e3 * predicted.step_seconds:.0f}",
        f"{1e3 * best.result:.0f}",
        f"{predicted.step_seconds / best.result:.2f}",
        f"{best.others:.2f}",
        ", ".join(f"{name} {seconds / predicted.step_seconds:.0%}" for name, seconds in parts[:4]),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mesh", action="append", help="tensor,pipeline,data; may be given several times")
    parser.add_argument("--write", action="store_true", help="keep the table in samples/benchmarks/results")
    args = parser.parse_args()
    corpus.load_corpus()
    wanted = [tuple(map(int, text.split(","))) for text in args.mesh or ()] or MESHES
    cases = [Case((t, p, d), 1) for t, p, d in wanted]
    cases += [Case(*CHUNKS)] if CHUNKS[0] in wanted else []
    machines: list[Taken[autoptd.Cluster]] = []
    steps: dict[Case, list[Taken[float]]] = {case: [] for case in cases}
    for _ in range(args.rounds):
        machines.append(watch(lambda: autoptd.calibrate(devices=8)))
        for case in cases:
            steps[case].append(watch(lambda: measure_step(case, args.steps)))  # noqa: B023 (called at once)
    machine = quietest(machines)
    ledger, saved = count_kept()
    publish(
        "honesty",
        "A step predicted after `autoptd calibrate`, and measured",
        [
            "mesh (tensor, pipeline, data)",
            "predicted ms",
            "measured ms",
            "ratio",
            "cores of others",
            "predicted parts",
        ],
        [row(case, steps[case], machine.result) for case in cases],
        [
            f"{machine.result.name}, {machine.result.devices_at_once} compute at a time; other programs used "
            f"{machine.others:.2f} cores while it was calibrated",
            f"measured: the median of {args.steps - WARM_UP_STEPS} steps, of {args.rounds} rounds the one in which "
            "other programs used least",
            f"one microbatch on mesh (1, 1, 1) keeps {ledger:,} bytes by the ledger; autograd saves {saved:,}",
            "sharing: by how much the schedule is longer because the ranks share cores",
        ],
        args.write,
    )


if __name__ == "__main__":
    main()
