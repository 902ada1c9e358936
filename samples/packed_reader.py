"""The model of the zoo of wrong gradients: packed documents, grouped queries, normed queries, a tied head, dropout."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoptd
from autoptd.compiled import CompiledProgram

VOCABULARY, LENGTH, HIDDEN, HEADS, KV_HEADS = 37, 8, 16, 4, 2


class Block(nn.Module):
    """A layer with grouped queries, a packed projection, normed queries and biases, as many models have them."""

    def __init__(self) -> None:
        super().__init__()
        size = HIDDEN // HEADS
        self.norm, self.mlp_norm, self.q_norm = nn.RMSNorm(HIDDEN), nn.LayerNorm(HIDDEN), nn.RMSNorm(size)
        self.qkv = nn.Linear(HIDDEN, (HEADS + 2 * KV_HEADS) * size)
        self.out = nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        b, s, _ = x.shape
        heads = self.qkv(self.norm(x)).view(b, s, HEADS + 2 * KV_HEADS, -1).transpose(1, 2)
        q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        k, v = (y.repeat_interleave(HEADS // KV_HEADS, dim=1) for y in (k, v))
        y = F.scaled_dot_product_attention(self.q_norm(q), k, v, attn_mask=mask)
        x = x + F.dropout(self.out(y.transpose(1, 2).reshape(b, s, HIDDEN)), 0.1, self.training)
        mlp: Tensor = self.down(F.gelu(self.up(self.mlp_norm(x)), approximate="tanh"))
        return x + mlp


class Reader(nn.Module):
    """A model of packed documents, which must not attend to each other, with a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(LENGTH, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, idx: Tensor, documents: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of `idx`, the number of each token's document, and `targets`, all [b, s]."""
        s = idx.shape[1]
        same = documents[:, None, :, None] == documents[:, None, None, :]
        mask = same & torch.ones(s, s, dtype=torch.bool, device=idx.device).tril()
        x = self.tokens(idx) + self.positions(torch.arange(s, device=idx.device))
        for block in self.blocks:
            x = block(x, mask)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def make_batch(rows: int) -> dict[str, Tensor]:
    """Return `rows` random sequences of two documents each."""
    generator = torch.Generator().manual_seed(1)
    idx, targets = torch.randint(VOCABULARY, (2, rows, LENGTH), generator=generator)
    documents = (torch.arange(LENGTH) >= LENGTH // 2).long().expand(rows, LENGTH).clone()
    return {"idx": idx, "documents": documents, "targets": targets}


@cache
def make_program(*mesh: int, sequence_parallel: bool = False) -> CompiledProgram:
    """Return the right program of the model on `mesh`, with four microbatches of one sequence."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"num_microbatches": 4, "schedule": "1f1b", "num_model_chunks": 1}
    options["sequence_parallel"] = sequence_parallel
    return autoptd.compile(Reader(), mesh, example_inputs=make_batch(1), **options)
