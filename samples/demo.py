"""Compile, verify and train a GPT on 8 processes of one machine, and compare it with one device (``make demo``).

A GPT of 7.4 million parameters learns the standard library on a mesh of 2 tensor x 2 pipeline x 2 data ranks, with two
stages per pipeline rank, and then on one device with the same batches. The results are in out/demo.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from samples import corpus, train

MESH = (2, 2, 2)
NUM_MODEL_CHUNKS = 2


def compile_program(console: Console, folder: Path, arguments: Sequence[str]) -> None:
    """Compile the sample's GPT without a process group, verify it, and save its texts in `folder`.

    Compiling checks the program of all ranks; verifying runs them all, as threads of this process.
    """
    started = time.perf_counter()
    args = train.parse_arguments([*arguments, "--mesh", ",".join(map(str, MESH))])
    program = train.compile_program(train.make_model(args), args)
    program.save(folder)
    seconds = time.perf_counter() - started
    console.print(str(program), markup=False, highlight=False)
    console.print(f"\ncompiled, checked and saved in {seconds:.1f} s")
    console.print(str(program.verify()), markup=False, highlight=False, end="\n\n")


def run_training(console: Console, name: str, arguments: Sequence[str], num_processes: int, steps: int) -> None:
    """Run the training sample in its own processes; show a bar, or its lines without a terminal."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(num_processes)]
    command = [sys.executable, *(launcher if num_processes > 1 else []), "-m", "samples.train", *arguments]
    environment = {**os.environ, **({"OMP_NUM_THREADS": "1"} if num_processes > 1 else {})}
    if torch.cuda.device_count() < math.prod(MESH):  # all on the CPU, as a GPU serves one rank
        environment["CUDA_VISIBLE_DEVICES"] = ""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        Progress(*columns, console=console, disable=not console.is_terminal) as progress,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as run,
    ):
        task = progress.add_task(name, total=steps)
        assert run.stdout is not None
        for line in run.stdout:
            if not console.is_terminal:
                console.print(f"{name}  {line.rstrip()}", markup=False, highlight=False)
            elif line.startswith("step"):
                progress.update(task, advance=1, description=f"{name}  {line.rstrip()}")
    if run.returncode:
        raise SystemExit(f"{name} failed with exit status {run.returncode}: {' '.join(command)}")


def read_log(file: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def show_losses(console: Console, parallel: list[dict[str, float]], plain: list[dict[str, float]]) -> None:
    """Print both losses and their relative difference for some steps, then the tokens per second of both."""
    table = Table(title=f"The same {len(plain)} steps on a {MESH} mesh and on one device")
    for column in ("step", f"loss, {math.prod(MESH)} processes", "loss, one device", "relative difference"):
        table.add_column(column, justify="right")
    every = max(1, len(plain) // 10)
    for ours, theirs in zip(parallel, plain, strict=True):
        if ours["step"] == 1 or ours["step"] % every == 0:
            difference = abs(ours["loss"] - theirs["loss"]) / theirs["loss"]
            table.add_row(f"{ours['step']}", f"{ours['loss']:.6f}", f"{theirs['loss']:.6f}", f"{difference:.1e}")
    rates = [statistics.median(step["tokens_per_second"] for step in log[1:]) for log in (parallel, plain)]
    table.add_section()
    table.add_row("tokens/s", f"{rates[0]:,.0f}", f"{rates[1]:,.0f}", f"{rates[0] / rates[1]:.2f} times")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", type=Path, default=Path("out/demo"))
    args = parser.parse_args()
    if args.steps < 2:
        parser.error(f"--steps {args.steps}: the first step warms up and is not timed; give 2 or more")
    console = Console(soft_wrap=True)
    args.out.mkdir(parents=True, exist_ok=True)
    console.print(f"{len(corpus.load_corpus()):,} tokens of the standard library's sources\n")
    chunks = ["--chunks", str(NUM_MODEL_CHUNKS)]
    compile_program(console, args.out, chunks)
    logs = {name: args.out / f"{name}.jsonl" for name in ("parallel", "plain")}
    shared = ["--mesh", ",".join(map(str, MESH)), "--steps", str(args.steps)]
    run_training(
        console, "8 processes", [*shared, *chunks, "--losses", str(logs["parallel"])], math.prod(MESH), args.steps
    )
    run_training(console, "one device ", [*shared, "--plain", "--losses", str(logs["plain"])], 1, args.steps)
    show_losses(console, read_log(logs["parallel"]), read_log(logs["plain"]))
    console.print(
        f"\n{args.out}/program_00.py, program_01.py   the programs of the two pipeline ranks: read them\n"
        f"{args.out}/schedule.txt                   every action of every pipeline rank\n"
        f"{args.out}/manifest.json                  the plan",
        highlight=False,
    )


if __name__ == "__main__":
    main()
