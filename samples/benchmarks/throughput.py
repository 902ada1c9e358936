"""Tokens per second of the demo's GPT on meshes of CPU processes, beside one process with two threads.

The same cores do the work in every row, so the ratio is what parallel execution costs on one machine. Beside the
compiled program runs the same GPT divided by hand with torch.distributed (samples/benchmarks/hand_written.py): in the
same processes, the two and the one process in turn, a few steps each, so that a busy machine slows all of them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist

from samples import corpus, train
from samples.benchmarks.pinned import keep_cores, schedule_in_batches
from samples.benchmarks.report import publish

MESHES = ("2,2,2", "2,2,1", "1,2,2", "1,1,2", "1,1,1")
THREADS = 2  # of the one process
MOST_ERROR = 2.0  # of the losses' errors against float64, over those of the one process
LEAST_ERROR = 1e-6  # some last bits of a float32: what is below says nothing


@dataclass(frozen=True)
class Case:
    """The training sample on a mesh (tensor, pipeline, data)."""

    mesh: tuple[int, int, int]
    num_model_chunks: int

    @property
    def name(self) -> str:
        count = math.prod(self.mesh)
        processes = "1 process" if count == 1 else f"{count} processes"
        kind = "1F1B" if self.num_model_chunks == 1 else f"interleaved, v = {self.num_model_chunks}"
        return f"{self.mesh}, {processes}" + (f", {kind}" if self.mesh[1] > 1 else "")


@dataclass(frozen=True)
class Turn:
    """Losses and seconds of consecutive steps."""

    losses: list[float]
    seconds: list[float]

    @property
    def step(self) -> float:
        """The median step after the first, which finds cold caches."""
        return statistics.median(self.seconds[1:])


class Runners:
    """The processes of one way, or of several that share them, and their turns."""

    def __init__(self, processes: Sequence[subprocess.Popen[str]]) -> None:
        self._processes = processes

    def run(self, way: str, steps: int) -> Turn:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{way} {steps}\n")
            process.stdin.flush()
        answer = self._processes[0].stdout
        assert answer is not None
        line = answer.readline()
        if not line:
            raise RuntimeError(f"a process of {way} has ended; its standard error says why")
        losses, seconds = zip(*json.loads(line), strict=True)
        return Turn(list(losses), list(seconds))


@contextmanager
def start(ways: Sequence[str], case: Case, pinned: bool, processes: int) -> Iterator[Runners]:
    """As many `processes` of samples/benchmarks/turns.py, with torchrun's environment."""
    with socket.create_server(("127.0.0.1", 0), backlog=4 * processes) as listener:
        port = listener.getsockname()[1]
        store = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
    sample = ["--mesh", ",".join(map(str, case.mesh)), "--chunks", str(case.num_model_chunks)]
    module = [sys.executable, "-m", "samples.benchmarks.turns", *ways]
    started: list[subprocess.Popen[str]] = []
    try:
        for rank in range(processes):
            places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
            address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
            threads = {"OMP_NUM_THREADS": THREADS if processes == 1 else 1}
            environment = {key: str(value) for key, value in {**places, **address, **threads}.items()}
            started.append(
                subprocess.Popen(
                    [*module, "--", *sample, "--steps", str(10**6)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env={**os.environ, **environment},
                )
            )
            if pinned:  # before it has threads, which inherit both
                keep_cores(rank, case.mesh, started[-1].pid)
                schedule_in_batches(started[-1].pid)
        yield Runners(started)
        for process in started:
            process.communicate()  # ends its input
    finally:
        for process in started:
            process.kill()
            process.wait()
        del store  # the server lives until here


def compare(case: Case, pinned: bool, rounds: int, steps: int) -> list[str]:
    """The cells of a row: rates, ratios over the one process and over the hand-written, errors of the losses."""
    processes = math.prod(case.mesh)
    ways = ["compiled"] if processes == 1 else ["compiled", "by-hand"]
    turns: dict[str, list[Turn]] = {}
    alone = processes == 1  # then one process has both: two would differ by where their memory lies
    with (
        start([*ways, "plain"] if alone else ways, case, pinned, processes) as ranks,
        nullcontext(ranks) if alone else start(["plain"], case, False, 1) as one,
    ):
        for _ in range(rounds + 1):
            for way in ways:
                turns.setdefault(way, []).append(ranks.run(way, steps))
            turns.setdefault("plain", []).append(one.run("plain", steps))
    exact = exact_losses(case.mesh[2], (rounds + 1) * steps)
    errors = {way: largest_error(own, exact) for way, own in turns.items()}
    for way in ways:
        if not errors[way] <= max(MOST_ERROR * errors["plain"], LEAST_ERROR):  # nan is refused
            raise SystemExit(
                f"{case.name}: losses of {way} are {errors[way]:.1e} off those in float64, of the one process "
                f"{errors['plain']:.1e}"
            )
    counted = {way: [turn.step for turn in own[1:]] for way, own in turns.items()}  # the first warms up
    sample = train.parse_arguments([])
    tokens = case.mesh[2] * sample.microbatches * sample.microbatch_size * sample.length
    rates = [f"{tokens / statistics.median(counted[way]):.0f}" for way in ("plain", *ways)]
    ratios = [write_ratios(counted[way], counted["compiled"]) for way in ("plain", *ways[1:])]
    missing = [] if len(ways) > 1 else ["-"]
    return [*rates, *missing, *ratios, *missing, *(f"{errors[way]:.1e}" for way in ("plain", *ways)), *missing]


def write_ratios(others: Sequence[float], ours: Sequence[float]) -> str:
    """How many times as fast as the others we are: the median of the pairs, and their range."""
    ratios = [other / own for other, own in zip(others, ours, strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


@cache
def exact_losses(replicas: int, steps: int) -> list[float]:
    """Those of the plain model in float64, on the batches of so many replicas."""
    words = ["--plain", "--dtype", "float64", "--mesh", f"1,1,{replicas}", "--steps", str(steps)]
    return [loss for loss, _ in train.train(train.parse_arguments(words))]


def largest_error(turns: Sequence[Turn], exact: Sequence[float]) -> float:
    """Largest relative difference of a step's loss from the exact one."""
    losses = [loss for turn in turns for loss in turn.losses]
    found = torch.tensor(losses, dtype=torch.float64)
    true = torch.tensor(exact, dtype=torch.float64)
    return float(((found - true) / true).abs().max())  # nan if any is


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", action="append", help="tensor,pipeline,data; may be given several times")
    parser.add_argument("--chunks", type=int, default=1, help="stages per pipeline rank, where there are several")
    parser.add_argument("--launch", choices=["free", "pinned", "both"], default="both")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="of each way in a round")
    parser.add_argument("--write", action="store_true", help="keep the table in samples/benchmarks/results")
    args = parser.parse_args()
    corpus.load_corpus()
    rows = []
    for text in args.mesh or MESHES:
        tensor, pipeline, data = (int(size) for size in text.split(","))
        case = Case((tensor, pipeline, data), args.chunks if pipeline > 1 else 1)
        launches = ("free", "pinned") if args.launch == "both" else (args.launch,)
        for launch in launches if math.prod(case.mesh) > 1 else launches[:1]:
            rows.append([case.name, launch, *compare(case, launch == "pinned", args.rounds, args.steps)])
            print(*rows[-1], sep="  ", file=sys.stderr, flush=True)
    publish(
        "throughput",
        "Tokens per second: mesh of processes beside one process with two threads, and beside torch by hand",
        [
            "mesh (tensor, pipeline, data)",
            "ranks",
            "one process",
            "compiled",
            "by hand",
            "compiled over one process",
            "compiled over by hand",
            "losses' error, one process",
            "compiled",
            "by hand",
        ],
        rows,
        [
            "GPT of 8 layers, hidden 256, 8 heads, 4096 tokens, tied embedding; per replica 4 microbatches of 2 "
            "sequences of 128 tokens; float32, fused AdamW, gradients clipped",
            f"{args.rounds} rounds of {args.steps} steps each way, in turn, after one to warm up; a turn's step is its "
            "median after the first, ratios are medians (ranges) of the rounds",
            "by hand: DTensor's column and row parallel layers, vocabulary and loss; torch.distributed.pipelining; "
            "DistributedDataParallel, which takes neither DTensors nor the interleaved schedule: there one flat sum "
            "after the step",
            "losses' error: largest relative distance, over all steps, from the plain model in float64; a way whose "
            f"error is over {MOST_ERROR:g} times the one process's is refused",
            "on (1, 1, 1) the plain model and the compiled one take turns in one process",
            "free: as torchrun starts them; pinned: each rank kept on its share of the cores, pipeline neighbours "
            "together, under Linux's batch scheduling (samples/benchmarks/pinned.py); the one process has all cores",
        ],
        args.write,
    )


if __name__ == "__main__":
    main()
