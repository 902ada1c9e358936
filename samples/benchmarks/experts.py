"""A step of a mixture of 8 experts on two processes, with experts divided over them and with experts on both.

The ways take turns in the same two processes. Tensor ranks with whole experts compute all of them, as they would where
no pass knows experts; replicas compute as many rows with divided experts as with whole ones, and sum fewer gradients.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import transformers
from torch import fx, nn

import autoptd
from autoptd.compiled import CompiledProgram
from autoptd.passes.operators import axes, table
from autoptd.passes.operators.axis_map import AxisMap
from autoptd.runtime import kernels
from samples.benchmarks.report import publish

WORLD, VOCABULARY, LENGTH, SEQUENCES = 2, 512, 256, 4
CONFIG: dict[str, Any] = {
    **{"vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 896, "num_hidden_layers": 4},
    **{"num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": LENGTH},
    **{"num_local_experts": 8, "num_experts_per_tok": 2, "use_cache": False},
}
# By name, two and two to compare: the mesh, and the ranks over which experts are divided.
WAYS = {
    "(2, 1, 1), experts whole": ((2, 1, 1), None),
    "(2, 1, 1), divided": ((2, 1, 1), 2),
    "(1, 1, 2), experts whole": ((1, 1, 2), None),
    "(1, 1, 2), expert=2": ((1, 1, 2), 2),
}


@contextmanager
def whole_experts() -> Iterator[None]:
    """Let compile divide no weight of experts in this block."""
    rules = table.OPERATORS[kernels.grouped_linear]

    def block(axis_map: AxisMap, node: fx.Node) -> axes.Axes:
        result: axes.Axes = rules.axes(axis_map, node)
        for axis in axis_map.of(node.args[1]):
            axes.block(axis, "it is measured whole")
        return result

    with patch.dict(table.OPERATORS, {kernels.grouped_linear: replace(rules, axes=block)}):
        yield


def make_programs() -> dict[str, CompiledProgram]:
    torch.manual_seed(0)
    model: nn.Module = transformers.MixtralForCausalLM(transformers.MixtralConfig(**CONFIG))
    ids = torch.zeros(SEQUENCES // 2, LENGTH, dtype=torch.long)
    given: Any = {"example_inputs": {"input_ids": ids, "labels": ids}, "num_microbatches": 2}
    programs = {}
    for name, (mesh, expert) in WAYS.items():
        with nullcontext() if expert else whole_experts():
            programs[name] = autoptd.compile(model, mesh, expert=expert, **given)
    return programs


def train(rank: int, port: int, programs: dict[str, CompiledProgram], rounds: int, steps: int, result: Any) -> None:
    """Let the programs take turns; put the median seconds of a step of each round into `result`."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(WORLD)}
    torch.set_num_threads(1)
    running = {name: program.bind() for name, program in programs.items()}
    optimizers = {name: torch.optim.SGD(parallel.parameters(), lr=1e-4) for name, parallel in running.items()}
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for turn in range(rounds + 1):
        for name, parallel in running.items():
            own = []
            for step in range(steps):
                replica = parallel.coordinates.data
                ids = torch.randint(0, VOCABULARY, (SEQUENCES, LENGTH), generator=_seed(turn, step, replica))
                begin = time.perf_counter()
                parallel(input_ids=ids, labels=ids)["loss"].backward()
                optimizers[name].step()
                optimizers[name].zero_grad()
                own.append(time.perf_counter() - begin)
            if turn:  # the first warms up
                seconds[name].append(statistics.median(own))
    if rank == 0:
        result.put(seconds)


def _seed(*numbers: int) -> torch.Generator:
    return torch.Generator().manual_seed(hash(numbers) % 2**31)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="keep the table in samples/benchmarks/results")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    result = fork.SimpleQueue()
    given = (port, make_programs(), args.rounds, args.steps, result)
    processes = [fork.Process(target=train, args=(rank, *given), daemon=True) for rank in range(WORLD)]
    for process in processes:
        process.start()
    seconds = result.get()
    medians = {name: statistics.median(own) for name, own in seconds.items()}
    rows = []
    for whole, divided in zip(list(WAYS)[::2], list(WAYS)[1::2], strict=True):
        ratios = [a / b for a, b in zip(seconds[whole], seconds[divided], strict=True)]
        rows.append([whole, f"{medians[whole]:.3f}", ""])
        rows.append([divided, f"{medians[divided]:.3f}", f"{statistics.median(ratios):.2f}"])
    publish(
        "experts",
        "Seconds of a step of a mixture of 8 experts on two processes",
        ["mesh", "seconds", "times as fast"],
        rows,
        [
            f"Mixtral with {CONFIG['num_hidden_layers']} layers of {CONFIG['hidden_size']} x "
            f"{CONFIG['intermediate_size']}, two of eight experts for a token, {SEQUENCES} sequences of {LENGTH} "
            f"tokens a replica in two microbatches; medians of {args.rounds} turns of {args.steps} steps"
        ],
        args.write,
    )


if __name__ == "__main__":
    main()
