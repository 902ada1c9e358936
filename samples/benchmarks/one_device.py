"""One device: a step of the program compiled for mesh (1, 1, 1) beside a step of the user's model in eager mode.

The two take turns, step by step, on the same weights and batch, so that a busy machine slows both; each in a process of
its own, as users run them: in one, each would work in memory that the other has just freed. A step is the forward, the
backward and the gradients' clearing; no optimizer, which would be the same. Page faults are counted, because memory
that a step gives back to the system costs the next one time.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch
import transformers
from torch import Tensor, nn

import autoptd
from samples.benchmarks.report import publish
from samples.gpt import GPT, GPTConfig

WARM_UP_STEPS = 3
VOCABULARY, SEQUENCE, BATCH = 4096, 128, 8


@dataclass(frozen=True)
class Case:
    """A model, and what `autoptd.compile` is asked beside the mesh."""

    name: str
    make: Callable[[], nn.Module]
    inputs: tuple[str, str] = ("input_ids", "labels")


def _gpt(dropout: float) -> nn.Module:
    return GPT(GPTConfig(vocab_size=VOCABULARY, block_size=SEQUENCE, dropout=dropout))


def _gpt2(dropout: float) -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=SEQUENCE, n_embd=256, n_layer=8, n_head=8,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
    )  # fmt: skip
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    return model


def _llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, max_position_embeddings=SEQUENCE, hidden_size=256, intermediate_size=688,
        num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4,
    )  # fmt: skip
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


CASES = (
    Case("sample GPT", lambda: _gpt(0.0), ("idx", "targets")),
    Case("sample GPT, dropout 0.1", lambda: _gpt(0.1), ("idx", "targets")),
    Case("GPT-2", lambda: _gpt2(0.0)),
    Case("GPT-2, dropout 0.1", lambda: _gpt2(0.1)),
    Case("Llama", _llama),
)


def loss_of(output: object) -> Tensor:
    found = output[1] if isinstance(output, tuple) else getattr(output, "loss", output)
    assert isinstance(found, Tensor)
    return found


class Step(NamedTuple):
    seconds: float
    faults: int  # pages that the system had to give
    loss: float


def time_step(model: nn.Module, batch: dict[str, Tensor]) -> Step:
    synchronize()
    faults, start = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.perf_counter()
    loss = loss_of(model(**batch))
    loss.backward()
    model.zero_grad(set_to_none=True)
    synchronize()
    seconds = time.perf_counter() - start
    return Step(seconds, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults, float(loss.detach()))


def find_interval(values: Sequence[float]) -> tuple[float, float]:
    """Between which two of `values` the median of all that could be measured is, at 95 %: by order alone."""
    half = 0.98 * math.sqrt(len(values))  # 1.96 standard deviations of how many are below it
    first = max(0, math.floor(len(values) / 2 - half))
    ordered = sorted(values)
    return ordered[first], ordered[-1 - first]


def find_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def serve(number: int, compiles: bool, fuses: bool, asked: Connection) -> None:
    """Take a step of case `number` whenever `asked`, in one of the two ways, and answer with it; None ends it."""
    case, device = CASES[number], find_device()
    torch.manual_seed(0)
    model = case.make().to(device)
    batch = {name: torch.randint(0, VOCABULARY, (BATCH, SEQUENCE), device=device) for name in case.inputs}
    if compiles:
        program = autoptd.compile(
            model, mesh=(1, 1, 1), microbatch_size=BATCH, num_microbatches=1, example_inputs=batch, fuse=fuses
        )
        model = program.bind(device)
    while asked.recv():
        asked.send(time_step(model, batch))


@contextmanager
def start(number: int, compiles: bool, fuses: bool) -> Iterator[Connection]:
    """A process that serves; what to ask it by."""
    spawning = multiprocessing.get_context("spawn")
    own, other = spawning.Pipe()
    process = spawning.Process(target=serve, args=(number, compiles, fuses, other), daemon=True)
    process.start()
    other.close()  # so that its end is an error here
    try:
        yield own
        own.send(None)
    finally:
        process.join()


def compare(number: int, steps: int, fuses: bool) -> list[str]:
    """Median milliseconds of both, the median of the ratios, median page faults, and the losses' distance."""
    case, pairs = CASES[number], []
    with start(number, False, fuses) as eager, start(number, True, fuses) as compiled:
        for turn in range(WARM_UP_STEPS + steps):
            timed: dict[Connection, Step] = {}
            for each in [eager, compiled] if turn % 2 else [compiled, eager]:
                each.send(True)
                timed[each] = each.recv()
            pairs.append((timed[eager], timed[compiled]))
    del pairs[:WARM_UP_STEPS]
    plain, ours = zip(*pairs, strict=True)
    ratios = [one.seconds / two.seconds for one, two in pairs]
    low, high = find_interval(ratios)
    dropped = "dropout" in case.name
    distance = max(abs(one.loss - two.loss) / abs(one.loss) for one, two in pairs)
    return [
        case.name,
        *(f"{1000 * statistics.median(step.seconds for step in steps):.1f}" for steps in (plain, ours)),
        f"{statistics.median(ratios):.3f} ({low:.3f} to {high:.3f})",
        " / ".join(f"{statistics.median(step.faults for step in steps):.0f}" for steps in (plain, ours)),
        "other masks" if dropped else f"{distance:.1e}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--only", help="cases whose name contains this")
    parser.add_argument("--no-fuse", action="store_true")
    parser.add_argument("--write", action="store_true", help="keep the table under results/")
    given = parser.parse_args()
    numbers = [number for number, case in enumerate(CASES) if (given.only or "") in case.name]
    rows = [compare(number, given.steps, not given.no_fuse) for number in numbers]
    publish(
        "one_device_gpu" if torch.cuda.is_available() else "one_device",
        "One device: compiled for mesh (1, 1, 1) beside eager",
        [
            "model",
            "eager, ms a step",
            "compiled, ms a step",
            "times as fast (95 % interval)",
            "page faults, eager / compiled",
            "loss, relative",
        ],
        rows,
        [
            f"8 layers, hidden 256, vocabulary {VOCABULARY}, {BATCH} sequences of {SEQUENCE} tokens, float32; forward "
            "and backward, the two in turn, each in a process of its own.",
            "Times as fast: the median of the pairs' ratios, and between which two of them the true median is.",
            f"{given.steps} steps after {WARM_UP_STEPS}; {torch.get_num_threads()} threads.",
        ],
        given.write,
    )


if __name__ == "__main__":
    main()
