"""Train LoRA adapters of a Llama, and its embeddings, on text with Hugging Face's Trainer."""

import sys

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader, DistributedSampler
from transformers import Trainer, TrainingArguments

import autoptd
from samples import corpus
from samples.gpt import GPTConfig
from samples.huggingface import make_llama

max_steps = int(sys.argv[1]) if len(sys.argv) > 1 else 50
length = 64

torch.manual_seed(1337)
tokens = torch.from_numpy(corpus.load_corpus()[: 4096 * length].astype("int64")).view(-1, length)
tokens = tokens[torch.randperm(len(tokens))]
dataset = [{"input_ids": row, "labels": row.clone()} for row in tokens]
for number, row in enumerate(dataset):
    row["labels"][: number * 7 % 40] = -100  # a prompt, whose tokens are not learned
base = make_llama(GPTConfig(corpus.VOCAB_SIZE, length, n_layer=4, n_head=4, n_embd=64))
trained = ["embed_tokens", "lm_head"]
lora = LoraConfig(r=8, target_modules="all-linear", modules_to_save=trained, task_type="CAUSAL_LM")
model = get_peft_model(base, lora)
program = autoptd.compile(model, mesh=(2, 2, 1), num_microbatches=8)
parallel = program.bind()
sampler = DistributedSampler(dataset, program.mesh.data, parallel.coordinates.data, shuffle=False)

arguments = TrainingArguments(
    "out/peft",
    use_cpu=not torch.cuda.is_available(),
    max_steps=max_steps,
    per_device_train_batch_size=8,
    gradient_accumulation_steps=2,
    learning_rate=6e-3,
    lr_scheduler_type="cosine",
    warmup_steps=10,
    max_grad_norm=1.0,
    logging_steps=1,
    report_to="none",
    disable_tqdm=True,
    save_strategy="no",
    train_sampling_strategy="sequential",
)
trainer = Trainer(parallel, arguments, train_dataset=dataset)
trainer.get_train_dataloader = lambda: DataLoader(dataset, arguments.train_batch_size, sampler=sampler)
trainer.train()
state = parallel.full_state_dict()
if trainer.is_world_process_zero():
    model.save_pretrained("out/peft", state_dict=state)
