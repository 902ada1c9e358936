"""Train a plain language model on a mesh of devices, or on one.

    python -m samples.corpus                                                          # once: the text
    python -m samples.train --plain                                                   # one device
    torchrun --nproc-per-node 8 -m samples.train --mesh 2,2,2 --chunks 2              # tensor, pipeline, data
    torchrun --nproc-per-node 8 -m samples.train --mesh 2,2,2 --model hf-llama

A one-device script does not have the lines marked (+).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import pkgutil
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import autoptd
from samples import corpus
from samples.gpt import GPTConfig

# imported on demand, so that only a run which trains a Hugging Face model needs transformers
MODELS = {
    "gpt": "samples.gpt:GPT",
    "hf-gpt2": "samples.huggingface:make_gpt2",
    "hf-llama": "samples.huggingface:make_llama",
}

# Arguments of `bind`; by default a program on CUDA runs in CUDA graphs.
WITHOUT_GRAPHS: Mapping[str, Any] = {"graphs": False}


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), default="gpt")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--length", type=int, default=128, help="tokens in a sequence")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--mesh", default="1,1,1", help="tensor,pipeline,data")
    parser.add_argument("--chunks", type=int, default=None, help="stages per pipeline rank")
    parser.add_argument("--microbatches", type=int, default=4, help="per replica and step")
    parser.add_argument("--microbatch-size", type=int, default=2, help="sequences in a microbatch")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--learning-rate", type=float, default=6e-4)
    parser.add_argument("--warm-up", type=int, default=20, help="steps of rising learning rate")
    parser.add_argument("--dtype", choices=["float32", "float64", "bfloat16"], default="float32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plain", action="store_true", help="the model itself on one device, the mesh's batches")
    parser.add_argument("--no-graphs", action="store_true", help="launch kernels one by one on CUDA devices")
    parser.add_argument("--losses", type=Path, default=None, help="write a JSON line per step to this file")
    args = parser.parse_args(argv)
    args.mesh = tuple(int(size) for size in args.mesh.split(","))
    return args


def make_model(args: argparse.Namespace) -> nn.Module:
    """Return the model on this process's CPU, its weights drawn from the seed: the same on every rank."""
    torch.manual_seed(args.seed)
    sizes = GPTConfig(corpus.VOCAB_SIZE, args.length, args.layers, args.heads, args.hidden, args.dropout)
    model: nn.Module = pkgutil.resolve_name(MODELS[args.model])(sizes)
    return model.to(getattr(torch, args.dtype))


def name_inputs(model: str, idx: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Name the batch after the model's own arguments; Hugging Face models shift the labels themselves."""
    return {"idx": idx, "targets": targets} if model == "gpt" else {"input_ids": idx, "labels": idx.clone()}


def compile_program(model: nn.Module, args: argparse.Namespace) -> autoptd.CompiledProgram:
    """Compile the program of all ranks in this process; only shapes and dtypes of the example count."""
    example = torch.zeros(args.microbatch_size, args.length, dtype=torch.long)
    return autoptd.compile(
        model,
        mesh=args.mesh,
        example_inputs=name_inputs(args.model, example, example.clone()),
        num_microbatches=args.microbatches,
        num_model_chunks=args.chunks,
        seed=args.seed,
    )


def find_loss(output: object) -> Tensor:
    """Return the loss of the model's output: ``(logits, loss)``, or an output with a ``loss`` field."""
    loss = output[1] if type(output) is tuple else getattr(output, "loss", None)
    if not isinstance(loss, Tensor):
        raise TypeError(f"the model returned {type(output).__name__} without a loss")
    return loss


def accumulate_gradients(model: nn.Module, batch: dict[str, Tensor], num_microbatches: int) -> Tensor:
    """Run one device's step over the mesh's microbatches, in replica order; return the mean loss."""
    losses = []
    for rows in zip(*(x.chunk(num_microbatches) for x in batch.values()), strict=True):
        loss = find_loss(model(**dict(zip(batch, rows, strict=True)))) / num_microbatches
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()


def train(args: argparse.Namespace) -> Iterator[tuple[float, float]]:
    """Train step after step; yield the loss and the seconds of each."""
    rank, replica, replicas = int(os.environ.get("RANK", 0)), 0, 1
    num_sequences = args.microbatches * args.microbatch_size
    model = make_model(args)
    if args.plain:
        num_sequences *= args.mesh[2]
        model.to("cuda" if torch.cuda.is_available() else "cpu")
        clip_gradients: Callable[[float], Tensor] = partial(nn.utils.clip_grad_norm_, list(model.parameters()))
    else:
        program = compile_program(model, args)  # (+)
        model = parallel = program.bind(**WITHOUT_GRAPHS if args.no_graphs else {})  # (+)
        clip_gradients = parallel.clip_grad_norm_  # (+)
        replica, replicas = program.rank(rank).coordinates.data, args.mesh[2]  # (+)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, betas=(0.9, 0.95), fused=True)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / args.warm_up, 1.0, args.warm_up)
    device = next(model.parameters()).device
    data = corpus.batches(
        corpus.load_corpus(), num_sequences, args.length, seed=args.seed, replica=replica, replicas=replicas
    )
    for idx, targets in itertools.islice(data, args.steps):
        started = time.perf_counter()
        batch = name_inputs(args.model, idx.to(device), targets.to(device))
        if args.plain:
            loss = accumulate_gradients(model, batch, args.microbatches * args.mesh[2])
        else:
            loss = find_loss(model(**batch))
            loss.backward()
        clip_gradients(1.0)
        optimizer.step()
        warm_up.step()
        optimizer.zero_grad()
        yield loss.item(), time.perf_counter() - started


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    rank = int(os.environ.get("RANK", 0))
    for step, (loss, seconds) in enumerate(train(args), 1):
        report_step(args, rank, step, loss, seconds)


def report_step(args: argparse.Namespace, rank: int, step: int, loss: float, seconds: float) -> None:
    if rank != 0:
        return
    tokens = args.mesh[2] * args.microbatches * args.microbatch_size * args.length
    print(f"step {step:4d}  loss {loss:.6f}  {tokens / seconds:8.0f} tokens/s", flush=True)
    if args.losses is not None:
        with args.losses.open("a" if step > 1 else "w") as file:
            file.write(json.dumps({"step": step, "loss": loss, "tokens_per_second": tokens / seconds}) + "\n")


if __name__ == "__main__":
    main()
