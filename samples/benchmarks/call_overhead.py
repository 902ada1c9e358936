"""What a call of the parallel model costs outside of its schedule, in CPU time, by the number of layers.

On a CPU, for mesh (1, 1, 1). The stage is empty: it only adds up all parameters, so that each has a gradient. A call is
the forward of the user's loop, in which the runtime runs the whole schedule.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import autoptd
from autoptd.runtime.comm.connection import connect
from autoptd.runtime.comm.rank import CPU
from autoptd.runtime.engine.executor import ShapeFunctions
from autoptd.runtime.module.parallel import Parallel
from autoptd.runtime.program.program_text import read_program
from samples.benchmarks.report import publish
from samples.gpt import GPT, GPTConfig

LAYERS = (4, 24, 96)
BATCH = {name: torch.zeros(1, 8, dtype=torch.long) for name in ("idx", "targets")}


def bind_empty(layers: int) -> Parallel:
    """Bind the program of a GPT of so many layers, with an empty stage in place of its own."""
    model = GPT(GPTConfig(vocab_size=16, block_size=8, n_layer=layers, n_head=1, n_embd=8))
    program = autoptd.compile(model, (1, 1, 1), example_inputs=BATCH, num_microbatches=1)

    def stage(rank: object, weights: dict[str, Tensor], *inputs: Tensor) -> Tensor:
        return torch.stack([each.sum() for each in weights.values() if each.is_floating_point()]).sum()

    text = replace(read_program(program.texts[0], "program"), stages={0: stage})
    return Parallel(connect(program.manifest, CPU, ""), ShapeFunctions(program.manifest, text, model.state_dict()))


def surround_schedule(parallel: Parallel, before: Callable[[], Any], after: Callable[[], Any]) -> None:
    """Call `before` and `after` each run of the schedule from now on."""
    executor = parallel._shapes[0]
    run = executor.run

    def surrounded(*args: Any, **kwargs: Any) -> list[Tensor]:
        before()
        losses = run(*args, **kwargs)
        after()
        return losses

    executor.run = surrounded  # type: ignore[method-assign]


def measure(parallel: Parallel, repetitions: int) -> list[float]:
    """Return the median milliseconds of a call less those of its schedule, in training and in evaluation."""
    marks: list[int] = []

    def mark() -> None:
        marks.append(time.thread_time_ns())

    surround_schedule(parallel, mark, mark)
    medians = []
    for training in (True, False):
        parallel.train(training)
        costs = []
        for _ in range(repetitions):
            marks.clear()
            with torch.set_grad_enabled(training):
                mark()
                _, loss = parallel(**BATCH)
                mark()
            begin, entered, left, end = marks
            costs.append((end - left + entered - begin) / 1e6)
            if training:
                loss.backward()
                parallel.zero_grad()
        medians.append(statistics.median(costs))
    return medians


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=300)
    parser.add_argument("--write", action="store_true", help="keep the table in samples/benchmarks/results")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for layers in LAYERS:
        parallel = bind_empty(layers)
        costs = measure(parallel, args.repetitions)
        rows.append([layers, len(list(parallel.parameters())), *(f"{cost:.2f}" for cost in costs)])
    publish(
        "call_overhead",
        "CPU milliseconds of a call outside of its schedule, empty stages",
        ["layers", "parameters", "training", "evaluation"],
        rows,
        [f"medians of {args.repetitions} calls, on one thread"],
        args.write,
    )


if __name__ == "__main__":
    main()
