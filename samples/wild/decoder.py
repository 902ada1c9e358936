"""The decoder that the wild models vary: a plain GPT whose parts are methods, and the description of a case."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, LENGTH, HIDDEN, HEADS, LAYERS = 48, 16, 32, 4, 2
SIZE = HIDDEN // HEADS


class Attention(nn.Module):
    """Causal attention; a case overrides `attend`, which gets [b, heads, s, size]."""

    def __init__(self, kv_heads: int = HEADS) -> None:
        super().__init__()
        self.kv_heads = kv_heads
        self.query, self.output = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.key, self.value = (nn.Linear(HIDDEN, kv_heads * SIZE) for _ in range(2))

    def forward(self, x: Tensor, **given: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (f(x).view(b, s, -1, SIZE).transpose(1, 2) for f in (self.query, self.key, self.value))
        out: Tensor = self.output(self.attend(q, k, v, **given).transpose(1, 2).reshape(b, s, HIDDEN))
        return out

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x)))
        return out


class Block(nn.Module):
    def __init__(self, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.attention, self.mlp = attention, mlp

    def forward(self, x: Tensor, **given: Tensor) -> Tensor:
        x = x + self.attention(self.first(x), **given)
        out: Tensor = x + self.mlp(self.second(x))
        return out


class Decoder(nn.Module):
    """``model(idx, targets)`` returns the mean loss; a case overrides one of the methods."""

    attention: type[nn.Module] = Attention
    mlp: type[nn.Module] = MLP

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(LENGTH, HIDDEN)
        self.blocks = nn.ModuleList(Block(self.attention(), self.mlp()) for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, idx: Tensor, targets: Tensor) -> Any:
        return self.find_loss(self.run(self.embed(idx)), targets)

    def embed(self, idx: Tensor) -> Tensor:
        x: Tensor = self.tokens(idx) + self.positions(torch.arange(idx.shape[1], device=idx.device))
        return x

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def find_loss(self, x: Tensor, targets: Tensor) -> Any:
        """Return the loss of the last hidden states `x`, [b, s, h]."""
        return self.compare(self.head(self.norm(x)), targets)

    def compare(self, logits: Tensor, targets: Tensor) -> Any:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_inputs() -> dict[str, Tensor]:
    """Return one microbatch of the decoder."""
    idx, targets = torch.randint(VOCABULARY, (2, 2, LENGTH), generator=torch.Generator().manual_seed(0))
    return {"idx": idx, "targets": targets}


@dataclass(frozen=True)
class Case:
    """A model in the style of a code base: what it stands for, and how it is compiled.

    `written` are the lines that a user adds or changes for autoptd. `refused` is the text that refuses it, where that
    is right; `share` the largest share of the FLOPs on one of two tensor ranks.
    """

    name: str
    style: str
    make: Callable[[], nn.Module]
    options: dict[str, Any] = field(default_factory=dict)
    written: int = 0
    refused: str = ""
    share: float = 0.52
