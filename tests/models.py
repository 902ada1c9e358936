"""The GPTs that most tests compile, each compiled once: programs are frozen, and no two tests need one of their own."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

import autoptd
from autoptd.compiled import CompiledProgram
from autoptd.runtime.program.mesh import Mesh
from samples.gpt import GPT, GPTConfig

SMALL = GPTConfig(vocab_size=40, block_size=8, n_layer=2, n_head=2, n_embd=8)
# Large enough for the times and bytes that are simulated; its weights are on the meta device.
MIDDLE = GPTConfig(vocab_size=512, block_size=128, n_layer=8, n_head=4, n_embd=256)


def make_gpt(
    config: GPTConfig = SMALL, dtype: torch.dtype = torch.float32, *, device: str = "cpu", seed: int = 0
) -> GPT:
    """A GPT whose weights are those of `seed`."""
    torch.manual_seed(seed)
    with torch.device(device):
        return GPT(config).to(dtype)


def compile_tiny(
    mesh: tuple[int, int, int] | Mesh,
    config: GPTConfig = SMALL,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    **options: Any,
) -> CompiledProgram:
    """A program of its own of `make_gpt`, with these `options` of `compile`."""
    return autoptd.compile(make_gpt(config, dtype, device=device), mesh, **options)


compile_once = cache(compile_tiny)


def tiny(mesh: tuple[int, int, int] | Mesh, *sizes: Any, **options: Any) -> CompiledProgram:
    """The program that `compile_tiny` makes of equal arguments, which must be hashable: made once."""
    if any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):  # which is no argument
        return compile_tiny(mesh, *sizes, **options)
    return compile_once(mesh, *sizes, **options)


def tokens(config: GPTConfig = SMALL, rows: int = 4, seed: int = 0) -> Tensor:
    """Rows of random tokens, the same for the same `seed`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(config.vocab_size, (rows, config.block_size), generator=generator)
