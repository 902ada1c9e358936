"""Train Hugging Face's GPT-2 on preferences (DPO): the chosen answer more likely than the rejected one."""

import copy
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import autoptd
from samples import corpus
from samples.gpt import GPTConfig
from samples.huggingface import make_gpt2

max_steps = int(sys.argv[1]) if len(sys.argv) > 1 else 50
pairs, length, prompt, beta = 16, 64, 24, 0.5
out_dir = Path("out/dpo")

master_process = int(os.environ.get("RANK", "0")) == 0
device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"
torch.manual_seed(1337)


def sequence_logps(logits: Tensor, labels: Tensor) -> Tensor:
    """The log-probability of each row's answer."""
    losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none")
    return -losses.sum(-1)


def dpo_loss(output: Any, labels: Tensor, reference_logps: Tensor) -> Tensor:
    """Rows are chosen and rejected answers by turns."""
    gains = sequence_logps(output.logits, labels) - reference_logps
    chosen, rejected = gains.view(-1, 2).unbind(1)
    return -F.logsigmoid(beta * (chosen - rejected)).mean()


model = make_gpt2(GPTConfig(corpus.VOCAB_SIZE, length, n_layer=4, n_head=4, n_embd=64)).eval()
reference = copy.deepcopy(model).requires_grad_(False)
example = {"input_ids": torch.ones(2, length).long(), "labels": torch.ones(2, length).long()}
inputs = {**example, "reference_logps": torch.ones(2)}
program = autoptd.compile(model, (2, 2, 1), example_inputs=inputs, loss_fn=dpo_loss)
others = autoptd.compile(reference, (2, 2, 1), example_inputs=example, outputs=("logits",))
model, reference = program.bind(device), others.bind(device)

tokens = torch.from_numpy(corpus.load_corpus()[: 2048 * length].astype("int64")).view(-1, length)
generator = torch.Generator().manual_seed(1337)


def get_batch() -> tuple[Tensor, Tensor]:
    rows = tokens[torch.randint(len(tokens), (pairs,), generator=generator)]
    rejected = rows.clone()  # the answer of another row
    rejected[:, prompt:] = rows.roll(1, 0)[:, prompt:]
    input_ids = torch.stack([rows, rejected], 1).flatten(0, 1)
    labels = input_ids.clone()
    labels[:, :prompt] = -100
    return input_ids.to(device), labels.to(device)


optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step in range(max_steps):
    input_ids, labels = get_batch()
    with torch.no_grad():
        moved = F.pad(labels[:, 1:], (0, 1), value=-100)
        reference_logps = reference(input_ids, labels=labels).logits.log_prob(moved).sum(-1)
    loss = model(input_ids, labels=labels, reference_logps=reference_logps)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if master_process:
        print(f"step {step}: loss {loss.item():.5f}, gradient norm {norm.item():.5f}", flush=True)

out_dir.mkdir(parents=True, exist_ok=True)
state = model.full_state_dict()
if master_process:
    torch.save(state, out_dir / "model.pt")
