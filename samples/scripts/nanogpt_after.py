"""Train a GPT on text in a loop like nanoGPT's: gradient accumulation, a cosine schedule, clipping, evaluation."""

import math
import os
import sys
from pathlib import Path

import torch
from torch import Tensor

import autoptd
from samples import corpus
from samples.gpt import GPT, GPTConfig

max_iters = int(sys.argv[1]) if len(sys.argv) > 1 else 50
eval_interval, eval_iters = 25, 4
batch_size, block_size, gradient_accumulation_steps = 8, 64, 2
learning_rate, min_lr, warmup_iters, lr_decay_iters = 6e-4, 6e-5, 10, 50
weight_decay, betas, grad_clip = 1e-1, (0.9, 0.95), 1.0
out_dir = Path("out/nanogpt")

master_process = int(os.environ.get("RANK", "0")) == 0
device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"
torch.manual_seed(1337)

model = GPT(GPTConfig(corpus.VOCAB_SIZE, block_size, n_layer=4, n_head=4, n_embd=64))
program = autoptd.compile(model, mesh=(2, 2, 1), num_microbatches=8)
model = program.bind(device)

tokens = torch.from_numpy(corpus.load_corpus().astype("int64"))
split = int(0.9 * len(tokens))
data = {"train": tokens[:split], "val": tokens[split:]}
generator = torch.Generator().manual_seed(1337 + model.coordinates.data)  # a replica has its own batches


def get_batch(name: str) -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(data[name]) - block_size, (batch_size,), generator=generator)
    x = torch.stack([data[name][i : i + block_size] for i in starts.tolist()])
    y = torch.stack([data[name][i + 1 : i + 1 + block_size] for i in starts.tolist()])
    return x.to(device), y.to(device)


decayed = [p for p in model.parameters() if p.dim() >= 2]
others = [p for p in model.parameters() if p.dim() < 2]
groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=betas)


def get_lr(number: int) -> float:
    if number < warmup_iters:
        return learning_rate * (number + 1) / warmup_iters
    ratio = min((number - warmup_iters) / (lr_decay_iters - warmup_iters), 1.0)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


@torch.no_grad()
def estimate_loss() -> float:
    model.eval()
    losses = [model(*get_batch("val"))[1].item() for _ in range(eval_iters)]
    model.train()
    return sum(losses) / eval_iters


for iter_num in range(max_iters):
    for group in optimizer.param_groups:
        group["lr"] = get_lr(iter_num)
    if iter_num % eval_interval == 0:
        val_loss = estimate_loss()
        if master_process:
            print(f"step {iter_num}: val loss {val_loss:.5f}", flush=True)
    for _ in range(gradient_accumulation_steps):
        _, loss = model(*get_batch("train"))
        (loss / gradient_accumulation_steps).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if master_process:
        print(f"iter {iter_num}: loss {loss.item():.5f}, gradient norm {norm.item():.5f}", flush=True)

out_dir.mkdir(parents=True, exist_ok=True)
state = model.full_state_dict()
if master_process:
    torch.save({"model": state, "iter_num": max_iters}, out_dir / "ckpt.pt")
