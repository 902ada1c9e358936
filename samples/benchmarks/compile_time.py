"""CPU seconds and memory to compile a GPT of 1008 billion parameters for 3072 devices, beside torch.export.

Hugging Face GPT-2 with 128 layers, hidden 25600, 160 heads, vocabulary 51200, sequence 2048, on meta tensors.
Each run is a process of its own; the clock starts after imports and construction of the model, in both.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import autoptd
from samples.benchmarks.report import publish

MESH = (8, 64, 6)


def make_model(layers: int) -> nn.Module:
    config = GPT2Config(n_layer=layers, n_embd=25600, n_head=160, vocab_size=51200, n_positions=2048, use_cache=False)
    with torch.device("meta"):
        return GPT2LMHeadModel(config)


def make_inputs() -> dict[str, Tensor]:
    """One sequence and its labels, as two tensors (one given twice would be captured as one)."""
    names = ("input_ids", "labels")
    return {name: torch.zeros(1, 2048, dtype=torch.long, device="meta") for name in names}


def export_alone(model: nn.Module) -> dict[str, object]:
    exported = torch.export.export(model, (), make_inputs(), strict=False)
    return {"what": f"{len(exported.graph.nodes):,} nodes"}


def compile_whole(model: nn.Module) -> dict[str, object]:
    """The plan, the program text of every pipeline rank, and the static proof over all ranks, which compile makes."""
    program = autoptd.compile(model, mesh=MESH, example_inputs=make_inputs())
    texts = [program.rank(pipeline * MESH[0]).code for pipeline in range(MESH[1])]
    lines = sum(text.count("\n") for text in texts)
    return {"what": f"{len(program.stages)} stages, {len(set(texts))} texts, {lines:,} lines"}


RUNS = {"torch.export alone": export_alone, "autoptd: compile, texts, check": compile_whole}


def measure(name: str, layers: int) -> None:
    """Do one run in this process and print its figures as JSON; memory is the process's peak in MiB."""
    model = make_model(layers)
    wall, cpu = time.perf_counter(), time.process_time()
    result = RUNS[name](model)
    result |= {
        "cpu": time.process_time() - cpu,
        "wall": time.perf_counter() - wall,
        "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "parameters": sum(p.numel() for p in model.parameters()) / 1e9,
    }
    print(json.dumps(result))


def measure_apart(name: str, layers: int) -> dict[str, float]:
    command = [sys.executable, "-m", "samples.benchmarks.compile_time", "--run", name, "--layers", str(layers)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    result: dict[str, float] = json.loads(output.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", choices=list(RUNS), help=argparse.SUPPRESS)
    parser.add_argument("--layers", type=int, default=128)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="keep the table in samples/benchmarks/results")
    args = parser.parse_args()
    if args.run:
        measure(args.run, args.layers)
        return
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in RUNS}
    for _ in range(args.repetitions):
        for name in RUNS:
            measured[name].append(measure_apart(name, args.layers))
    alone = statistics.median(run["cpu"] for run in measured["torch.export alone"])
    rows = []
    for name, runs in measured.items():
        cpu = statistics.median(run["cpu"] for run in runs)
        wall, memory = min(run["wall"] for run in runs), max(run["memory"] for run in runs)
        rows.append([name, f"{cpu:.1f}", f"{cpu / alone:.2f}", f"{wall:.1f}", f"{memory:.0f}", runs[0]["what"]])
    parameters = measured["torch.export alone"][0]["parameters"]
    publish(
        "compile_time",
        f"Compile Hugging Face GPT-2, {args.layers} layers, {parameters:.1f} B parameters, mesh {MESH}",
        ["run", "CPU s", "over export", "wall s", "peak MiB", "result"],
        rows,
        [f"Median CPU seconds of {args.repetitions} runs in turn, quickest wall, highest memory."],
        args.write,
    )


if __name__ == "__main__":
    main()
