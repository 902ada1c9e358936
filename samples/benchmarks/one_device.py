"""One device: a step of the program compiled for mesh (1, 1, 1) beside a step of the user's model in eager mode.

On a GPU also beside torch.compile, plain and with mode="reduce-overhead", which makes CUDA graphs. All take turns, step
by step, on the same weights and batch, so that a busy machine slows all; each in a process of its own, as users run
them: in one, each would work in memory that another has just freed. A process that does not answer in time is killed.
A step is the forward, the backward and the gradients' clearing; no optimizer, which would be the same. Page faults are
counted, because memory that a step gives back to the system costs the next one time.
"""

from __future__ import annotations

import argparse
import math
import resource
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch
import transformers
from torch import Tensor, nn

import autoptd
from samples.benchmarks.bounded_process import BoundedProcess
from samples.benchmarks.report import publish
from samples.gpt import GPT, GPTConfig

WARM_UP_STEPS = 3
VOCABULARY, SEQUENCE, BATCH = 4096, 128, 8
EAGER, OURS = "eager", "compiled"
# Arguments of torch.compile, on a GPU.
RIVALS: Mapping[str, Mapping[str, str]] = {"torch.compile": {}, "reduce-overhead": {"mode": "reduce-overhead"}}


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


def serve(number: int, way: str, fuses: bool, asked: Connection) -> None:
    """Take a step of case `number` in one way whenever `asked`, and answer with it."""
    case, device = CASES[number], find_device()
    torch.manual_seed(0)
    model = case.make().to(device)
    batch = {name: torch.randint(0, VOCABULARY, (BATCH, SEQUENCE), device=device) for name in case.inputs}
    if way == OURS:
        program = autoptd.compile(
            model, mesh=(1, 1, 1), microbatch_size=BATCH, num_microbatches=1, example_inputs=batch, fuse=fuses
        )
        model = program.bind(device)
    elif way in RIVALS:
        model.compile(**RIVALS[way])
    while asked.recv():
        asked.send(time_step(model, batch))


def take_turns(number: int, ways: Sequence[str], steps: int, fuses: bool, limit: float) -> dict[str, list[Step] | str]:
    """The steps of each way, or the reason why it has none."""
    taken: dict[str, list[Step]] = {way: [] for way in ways}
    with ExitStack() as stack:
        running = {way: stack.enter_context(BoundedProcess(serve, number, way, fuses, limit=limit)) for way in ways}
        for turn in range(WARM_UP_STEPS + steps):
            for way in ways if turn % 2 else reversed(ways):
                if step := running[way].ask():
                    taken[way].append(step)
        return {way: running[way].failure or taken[way][WARM_UP_STEPS:] for way in ways}


def divide(steps: list[Step] | str, others: list[Step] | str) -> str:
    """How many times as long `steps` took as `others`, which were taken in turn with them."""
    if isinstance(steps, str) or isinstance(others, str):
        return "-"
    ratios = [one.seconds / two.seconds for one, two in zip(steps, others, strict=True)]
    low, high = find_interval(ratios)
    return f"{statistics.median(ratios):.3f} ({low:.3f} to {high:.3f})"


def median(steps: list[Step] | str, field: str, scale: float, digits: int) -> str:
    if isinstance(steps, str):
        return steps
    return f"{scale * statistics.median(getattr(step, field) for step in steps):.{digits}f}"


def compare(number: int, ways: Sequence[str], steps: int, fuses: bool, limit: float) -> list[str]:
    """Median milliseconds of each way, the medians of ours' ratios, median page faults, and the losses' distance."""
    case, taken = CASES[number], take_turns(number, ways, steps, fuses, limit)
    plain, ours = taken[EAGER], taken[OURS]
    distance = "-"
    if "dropout" in case.name:
        distance = "other masks"
    elif not isinstance(plain, str) and not isinstance(ours, str):
        pairs = zip(plain, ours, strict=True)
        distance = f"{max(abs(one.loss - two.loss) / abs(one.loss) for one, two in pairs):.1e}"
    return [
        case.name,
        *(median(taken[way], "seconds", 1000, 1) for way in ways),
        *(divide(taken[way], ours) for way in ways if way != OURS),
        " / ".join(median(own, "faults", 1, 0) for own in (plain, ours)),
        distance,
    ]


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--only", help="cases whose name contains this")
    parser.add_argument("--no-fuse", action="store_true")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for a step, the first one included")
    parser.add_argument("--write", action="store_true", help="keep the table under results/")
    given = parser.parse_args(words)
    numbers = [number for number, case in enumerate(CASES) if (given.only or "") in case.name]
    there = torch.cuda.is_available()
    ways = [EAGER, OURS, *(RIVALS if there else ())]
    rows = [compare(number, ways, given.steps, not given.no_fuse, given.limit) for number in numbers]
    publish(
        "one_device_gpu" if there else "one_device",
        "One device: compiled for mesh (1, 1, 1) beside eager",
        [
            "model",
            *(f"{way}, ms a step" for way in ways),
            "times as fast (95 % interval)",
            *(f"as fast as {way}" for way in ways[2:]),
            "page faults, eager / compiled",
            "loss, relative",
        ],
        rows,
        [
            f"8 layers, hidden 256, vocabulary {VOCABULARY}, {BATCH} sequences of {SEQUENCE} tokens, float32; forward "
            "and backward, the ways in turn, each in a process of its own.",
            "Times as fast: the median of the pairs' ratios, and between which two of them the true median is.",
            f"{given.steps} steps after {WARM_UP_STEPS}; {torch.get_num_threads()} threads.",
        ],
        given.write,
    )


if __name__ == "__main__":
    main()
