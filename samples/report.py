"""Write the report of a GPT with 39 billion parameters on 64 A100s, for the browser; this needs no GPU.

    python -m samples.report              # writes out/report.html

samples/report.png is a picture of it.
"""

from __future__ import annotations

from pathlib import Path

import torch

import autoptd
from samples.gpt import GPT, GPTConfig

OUTPUT = Path("out/report.html")


def compile_program() -> autoptd.CompiledProgram:
    """Compile a GPT of SC21's table 1 on the meta device for 8 tensor, 4 pipeline and 2 data ranks."""
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=51_200, block_size=2048, n_layer=48, n_head=64, n_embd=8192))
    return autoptd.compile(
        model.to(torch.bfloat16),
        mesh=(8, 4, 2),
        num_microbatches=16,
        num_model_chunks=2,
        schedule="interleaved_1f1b",
        cluster="dgx-a100",
    )


if __name__ == "__main__":
    OUTPUT.parent.mkdir(exist_ok=True)
    compile_program().save_report(OUTPUT, "dgx-a100")
    print(f"{OUTPUT}: open it in a browser")
