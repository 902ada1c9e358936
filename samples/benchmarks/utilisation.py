"""One GPU's model FLOPs utilisation and peak memory: the sample GPT in eager mode, under torch.compile, and ours.

Each way runs in a process of its own, one after the other: a process keeps memory that it once had. One that takes too
long is killed, and its row says so. A step is the forward and backward of all microbatches, fused AdamW's step where it
is named, and the gradients' clearing. Without a GPU small models run on the CPU, which shows that the script does, and
nothing else.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
from torch import nn

import autoptd
from samples.benchmarks.bounded_process import BoundedProcess
from samples.benchmarks.one_device import find_device, loss_of, synchronize
from samples.benchmarks.report import publish
from samples.gpt import GPT, GPTConfig
from samples.train import WITHOUT_GRAPHS

WARM_UP_STEPS = 3
# What names a card, and the cluster of such cards.
CLUSTERS = {"B200": "gb200-nvl72", "H200": "dgx-h200", "H100": "dgx-h100", "A100": "dgx-a100", "V100": "dgx-1-v100"}


class Case(NamedTuple):
    """A model, and a step of it: m microbatches of b sequences."""

    config: GPTConfig
    b: int
    m: int
    adam: bool

    def __str__(self) -> str:
        sizes, dropout = self.config, f", dropout {self.config.dropout}" * (self.config.dropout > 0)
        step = "AdamW" if self.adam else "no optimizer"
        return f"{sizes.n_layer} x {sizes.n_embd}{dropout}, b = {self.b}, m = {self.m}, {step}"


WIDE = GPTConfig(vocab_size=51200, block_size=2048, n_layer=4, n_head=32, n_embd=4096)
DEEP = GPTConfig(vocab_size=50304, block_size=1024, n_layer=24, n_head=16, n_embd=1024)
SMALL = GPTConfig(vocab_size=512, block_size=64, n_layer=2, n_head=4, n_embd=64)


def list_cases(wide: GPTConfig, deep: GPTConfig) -> list[Case]:
    dropped = replace(deep, dropout=0.1)
    return [Case(wide, 4, 1, True), Case(wide, 1, 8, True), Case(deep, 1, 8, False), Case(dropped, 1, 8, False)]


class Way(NamedTuple):
    """How the model is run; under autocast its weights are float32, and else bfloat16."""

    compiled: bool = False
    autocast: bool = False
    bound: Mapping[str, Any] | None = None  # ours: the arguments of `bind`


OURS = "autoptd"
WAYS: Mapping[str, Way] = {
    "eager": Way(),
    "torch.compile": Way(compiled=True),
    "torch.compile, float32 weights": Way(compiled=True, autocast=True),
    OURS: Way(bound={}),
    f"{OURS} without graphs": Way(bound=WITHOUT_GRAPHS),
}


class Measured(NamedTuple):
    seconds: float  # the median step
    loss: float  # of the last one
    peak: int  # bytes of tensors on the GPU, 0 without one
    reserved: int  # bytes that torch had from the GPU for them


def compile_program(case: Case) -> autoptd.CompiledProgram:
    """For one device; of a model on the meta device."""
    with torch.device("meta"):
        model = GPT(case.config).to(torch.bfloat16)
    length = case.config.block_size
    example = {name: torch.zeros(case.b, length, dtype=torch.long) for name in ("idx", "targets")}
    return autoptd.compile(model, (1, 1, 1), example_inputs=example, num_microbatches=case.m)


def make_model(way: Way, case: Case, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    if way.bound is not None:
        return compile_program(case).bind(device, **way.bound)
    with device:
        model = GPT(case.config).to(torch.float32 if way.autocast else torch.bfloat16)
    if way.compiled:
        model.compile()
    return model


def train(name: str, case: Case, steps: int, asked: Connection) -> None:
    """Train in one of the `WAYS` when `asked`, and answer with what was measured."""
    asked.recv()
    way, device = WAYS[name], find_device()
    model = make_model(way, case, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True) if case.adam else None
    torch.manual_seed(1)  # what a way drew for its weights is its own
    ids = torch.randint(case.config.vocab_size, (case.b * case.m, case.config.block_size + 1)).to(device)
    parts = 1 if way.bound is not None else case.m  # our program divides the batch itself
    batches = [(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in ids.chunk(parts)]
    seconds = []
    for _ in range(WARM_UP_STEPS + steps):
        synchronize()
        begin, losses = time.perf_counter(), []
        for batch in batches:
            with torch.autocast(device.type, torch.bfloat16, enabled=way.autocast):
                loss = loss_of(model(*batch)) / parts
            loss.backward()
            losses.append(loss.detach())
        if optimizer is not None:
            optimizer.step()
        model.zero_grad()
        synchronize()
        seconds.append(time.perf_counter() - begin)
    held = (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()) if device.type == "cuda" else (0, 0)
    asked.send(Measured(statistics.median(seconds[WARM_UP_STEPS:]), float(sum(losses)), *held))


def find_cluster() -> str:
    if not torch.cuda.is_available():
        return "laptop-cpu"
    card = torch.cuda.get_device_name()
    found = [cluster for name, cluster in CLUSTERS.items() if name in card]
    if not found:
        raise SystemExit(f"no shipped cluster has the card {card!r}: name one by --cluster")
    return found[0]


def compare(case: Case, cluster: autoptd.Cluster, steps: int, limit: float) -> list[list[str]]:
    """A row for each way: time, utilisation, memory, and what the simulator predicts of ours."""
    there, program = torch.cuda.is_available(), compile_program(case)
    flops = program.manifest.model_flops * case.m
    step = program.simulate(cluster, dtype="bf16")
    # Without an optimizer there are no states of 8 bytes a parameter, but float32 weights of 4.
    left_out = (0.0, 0) if case.adam else (step.breakdown["optimizer"], step.held_bytes["optimizer"] * 2 // 3)
    predicted = step.step_seconds - left_out[0], step.memory_bytes[0] - left_out[1]
    rows = []
    for name in WAYS:
        with BoundedProcess(train, name, case, steps, limit=limit) as process:
            one: Measured | None = process.ask()
        if one is None:
            rows.append([str(case), name, process.failure, *["-"] * 4])
            continue
        used, peak, shares = "-", "-", "-"
        if there:
            used = f"{flops / one.seconds / cluster.device.peak('bf16'):.1%}"
            peak = f"{one.peak / 1e9:.2f} ({one.reserved / 1e9:.2f})"
        if there and name == OURS:
            shares = f"{predicted[0] / one.seconds:.2f}, {predicted[1] / one.peak:.2f}"
        rows.append([str(case), name, f"{1000 * one.seconds:.1f}", used, peak, shares, f"{one.loss:.4f}"])
    return rows


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", default="", help='cases whose name contains this: "m = 8"')
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for one way of one case")
    parser.add_argument("--cluster", help="name or TOML file of one with this card, for its peak")
    parser.add_argument("--write", action="store_true", help="keep the table under results/")
    given = parser.parse_args(words)
    there, cluster = torch.cuda.is_available(), autoptd.Cluster.load(given.cluster or find_cluster())
    cases = [case for case in list_cases(*(WIDE, DEEP) if there else (SMALL, SMALL)) if given.only in str(case)]
    publish(
        "utilisation",
        f"One device, {torch.cuda.get_device_name() if there else 'no GPU'}: utilisation and memory of the sample GPT",
        [
            "layers x hidden; sequences in a microbatch, microbatches",
            "way",
            "ms a step",
            "model FLOPs utilisation",
            "peak, GB (reserved)",
            "predicted over it: step, peak",
            "loss",
        ],
        [row for case in cases for row in compare(case, cluster, given.steps, given.limit)],
        [
            "Vocabulary 50 thousand; sequences of 2048 tokens, and of 1024 where the hidden size is 1024; bfloat16."
            if there
            else "Tiny sizes.",
            f"Of the peak of {cluster.device.name}. Medians of {given.steps} steps after {WARM_UP_STEPS}.",
            f"{OURS} steps float32 weights and sums gradients in float32, as autocast on float32 weights does; eager "
            "and torch.compile alone step and sum bfloat16. Reserved is what torch had from the GPU.",
        ],
        given.write,
    )


if __name__ == "__main__":
    main()
