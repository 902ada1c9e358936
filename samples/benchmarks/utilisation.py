"""One GPU's model FLOPs utilisation and peak memory: the sample GPT in eager mode, under torch.compile, and ours.

Each way runs in a process of its own, one after the other: a process keeps memory that it once had. A step is the
forward, the backward, fused AdamW's step and the gradients' clearing, in bfloat16. Without a GPU a small model runs on
the CPU, which shows that the script does, and nothing else.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
from torch import nn

import autoptd
from samples.benchmarks.one_device import find_device, loss_of, synchronize
from samples.benchmarks.report import publish
from samples.gpt import GPT, GPTConfig

WARM_UP_STEPS = 3
LARGE = GPTConfig(vocab_size=51200, block_size=2048, n_layer=4, n_head=32, n_embd=4096)
SMALL = GPTConfig(vocab_size=512, block_size=64, n_layer=2, n_head=4, n_embd=64)
# What names a card, and the cluster of such cards.
CLUSTERS = {
    "B200": "gb200-nvl72",
    "H200": "dgx-h200",
    "H100": "dgx-h100",
    "A100": "dgx-a100",
    "V100": "dgx-1-v100",
}
OURS = "autoptd"
WAYS: Mapping[str, str | None] = {
    "eager": None,
    "torch.compile": "inductor",
    OURS: None,
}


class Measured(NamedTuple):
    seconds: float  # the median step
    loss: float  # of the last one
    peak: int  # bytes of tensors on the GPU, 0 without one


def compile_program(config: GPTConfig, batch: int) -> autoptd.CompiledProgram:
    """For one device; of a model on the meta device."""
    with torch.device("meta"):
        model = GPT(config).to(torch.bfloat16)
    example = {name: torch.zeros(batch, config.block_size, dtype=torch.long) for name in ("idx", "targets")}
    return autoptd.compile(model, (1, 1, 1), example_inputs=example, num_microbatches=1)


def make_model(way: str, config: GPTConfig, batch: int, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    backend = WAYS[way]
    if way == OURS:
        return compile_program(config, batch).bind(device)
    with device:
        model = GPT(config).to(torch.bfloat16)
    return model if backend is None else torch.compile(model, backend=backend)  # type: ignore[return-value]


def train(way: str, config: GPTConfig, batch: int, steps: int, answer: Connection) -> None:
    """Train in one of the `WAYS`, and answer with what was measured."""
    device = find_device()
    model = make_model(way, config, batch, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    torch.manual_seed(1)  # what a way drew for its weights is its own
    ids = torch.randint(config.vocab_size, (batch, config.block_size + 1)).to(device)
    seconds = []
    for _ in range(WARM_UP_STEPS + steps):
        synchronize()
        begin = time.perf_counter()
        loss = loss_of(model(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        synchronize()
        seconds.append(time.perf_counter() - begin)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    answer.send(Measured(statistics.median(seconds[WARM_UP_STEPS:]), float(loss.detach()), peak))


def measure(*arguments: Any) -> Measured | None:
    """What `train` measured in a process of its own; None where that failed, and said why on stderr."""
    spawning = multiprocessing.get_context("spawn")
    own, other = spawning.Pipe()
    process = spawning.Process(target=train, args=(*arguments, other))
    process.start()
    other.close()  # so that its end is an error here
    try:
        measured: Measured = own.recv()
        return measured
    except EOFError:
        return None
    finally:
        process.join()


def find_cluster() -> str:
    if not torch.cuda.is_available():
        return "laptop-cpu"
    card = torch.cuda.get_device_name()
    found = [cluster for name, cluster in CLUSTERS.items() if name in card]
    if not found:
        raise SystemExit(f"no shipped cluster has the card {card!r}: name one by --cluster")
    return found[0]


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=4, help="sequences a step")
    parser.add_argument("--cluster", help="name or TOML file of one with this card, for its peak")
    parser.add_argument("--write", action="store_true", help="keep the table under results/")
    given = parser.parse_args(words)
    there = torch.cuda.is_available()
    config, cluster = LARGE if there else SMALL, autoptd.Cluster.load(given.cluster or find_cluster())
    program = compile_program(config, given.batch)
    flops = program.manifest.model_flops
    predicted = program.simulate(cluster, dtype="bf16").memory_bytes[0]
    rows = []
    for way in WAYS:
        one = measure(way, config, given.batch, given.steps)
        if one is None:
            rows.append([way, "failed", *["-"] * 4])
            continue
        used = f"{flops / one.seconds / cluster.device.peak('bf16'):.1%}" if there else "-"
        peak = f"{one.peak / 1e9:.2f}" if there else "-"
        share = f"{predicted / one.peak:.2f}" if there and way == OURS else "-"
        rows.append([way, f"{1000 * one.seconds:.1f}", used, peak, share, f"{one.loss:.4f}"])
    publish(
        "utilisation",
        f"One device, {torch.cuda.get_device_name() if there else 'no GPU'}: utilisation and memory of the sample GPT",
        ["way", "ms a step", "model FLOPs utilisation", "peak, GB", "predicted over it", "loss"],
        rows,
        [
            f"{config.n_layer} layers, hidden {config.n_embd}, vocabulary {config.vocab_size}, {given.batch} sequences "
            f"of {config.block_size} tokens, bfloat16; forward, backward and AdamW: {flops / 1e12:.4g} TFLOP.",
            f"Of the peak of {cluster.device.name}. Medians of {given.steps} steps after {WARM_UP_STEPS}.",
            f"{OURS} steps float32 weights and sums gradients in float32; eager and torch.compile step bfloat16 alone.",
        ],
        given.write,
    )


if __name__ == "__main__":
    main()
