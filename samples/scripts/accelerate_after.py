"""Train a GPT on text with Accelerate, using its accumulation, its clipping and its schedule."""

import sys
from pathlib import Path

import accelerate
import torch
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import autoptd
from samples import corpus
from samples.gpt import GPT, GPTConfig

max_steps = int(sys.argv[1]) if len(sys.argv) > 1 else 50
batch_size, length, cpu = 8, 64, not torch.cuda.is_available()

options = accelerate.DataLoaderConfiguration(split_batches=True)  # the schedule counts steps, not processes
accelerator = accelerate.Accelerator(cpu=cpu, gradient_accumulation_steps=2, dataloader_config=options)
torch.manual_seed(1337)
tokens = torch.from_numpy(corpus.load_corpus()[: 4096 * (length + 1)].astype("int64")).view(-1, length + 1)
tokens = tokens[torch.randperm(len(tokens))].to(accelerator.device)
dataset = TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
model = GPT(GPTConfig(corpus.VOCAB_SIZE, length, n_layer=4, n_head=4, n_embd=64, tie_weights=False))
program = autoptd.compile(model, mesh=(2, 2, 1), num_microbatches=8)
model = program.bind(accelerator.device)
sampler = DistributedSampler(dataset, program.mesh.data, model.coordinates.data, shuffle=False)
loader = DataLoader(dataset, batch_size, sampler=sampler)
optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4)
scheduler = LinearLR(optimizer, 0.1, 1.0, 10)
model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)

for step, (idx, targets) in zip(range(2 * max_steps), loader, strict=False):
    with accelerator.accumulate(model):
        _, loss = model(idx, targets)
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            accelerator.print(f"step {step // 2}: loss {loss.item():.5f}, gradient norm {norm.item():.5f}")
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

Path("out/accelerate").mkdir(parents=True, exist_ok=True)
state = model.full_state_dict()
accelerator.save(state, "out/accelerate/model.safetensors", safe_serialization=True)
