"""Attentions and blocks in the forms that people write."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samples.wild.decoder import HEADS, HIDDEN, LENGTH, SIZE, Attention, Block, Case, Decoder, make_inputs


class WrittenAttention(Attention):
    """minGPT's: a mask in a buffer, masked_fill, softmax."""

    causal: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("causal", torch.ones(LENGTH, LENGTH).tril()[None, None])

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = q.shape[2]
        scores = q @ k.transpose(-2, -1) / math.sqrt(SIZE)
        return scores.masked_fill(self.causal[:, :, :s, :s] == 0, float("-inf")).softmax(-1) @ v


class Alibi(Attention):
    bias: Tensor

    def __init__(self) -> None:
        super().__init__()
        distance = torch.arange(LENGTH)[None, :] - torch.arange(LENGTH)[:, None]
        slopes = 2.0 ** -torch.arange(1, HEADS + 1)
        bias = (distance * slopes[:, None, None]).masked_fill(distance > 0, float("-inf"))
        self.register_buffer("bias", bias, persistent=False)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias.to(q.dtype))


class Grouped(Attention):
    def __init__(self) -> None:
        super().__init__(kv_heads=2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(HEADS // self.kv_heads, dim=1) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Window(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ones = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=q.device)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=ones.tril().triu(-4))


class QueryKeyNorm(Attention):
    """nanochat's: queries and keys are normed, and turned by their position."""

    def __init__(self) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(LENGTH), 1 / 100 ** (torch.arange(SIZE // 2) / (SIZE // 2)))
        self.cos, self.sin = nn.Buffer(angles.cos()), nn.Buffer(angles.sin())

    def turn(self, x: Tensor) -> Tensor:
        first, second = F.rms_norm(x, (SIZE,)).chunk(2, dim=-1)
        return torch.cat((first * self.cos + second * self.sin, second * self.cos - first * self.sin), -1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(self.turn(q), self.turn(k), v, is_causal=True)


class BranchOnTable(QueryKeyNorm):
    """Fills its table at the first call, and asks at each: the value of a buffer decides."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.cos[0, 0] == 0:
            raise RuntimeError("the table is not filled")
        return super().attend(q, k, v)


class AskedMask(Attention):
    """Leaves a mask out that hides nothing, which it made itself."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=q.device)
        if torch.all(mask == 1):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask.tril())


class Rope(nn.Module):
    """A module with a buffer that nothing reads, which all layers share: torchtune's."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("theta", torch.ones(SIZE), persistent=False)
        self.register_buffer("table", torch.linspace(0.5, 1, SIZE), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.table


class SharedModule(Decoder):
    def __init__(self) -> None:
        super().__init__()
        rope = Rope()
        for block in self.blocks:
            attention: Any = block.attention
            attention.rope = rope
            attention.attend = lambda q, k, v: F.scaled_dot_product_attention(rope(q), rope(k), v, is_causal=True)


class ParallelBlock(Block):
    def forward(self, x: Tensor, **given: Tensor) -> Tensor:
        y = self.first(x)
        out: Tensor = x + self.attention(y) + self.mlp(y)
        return out


class ParallelResidual(Decoder):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ParallelBlock(Attention(), b.mlp) for b in self.blocks)  # type: ignore[arg-type]


class SharedLayers(Decoder):
    """One block for all layers: ALBERT's."""

    def run(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self.blocks[0](x)
        return x


class Skips(Decoder):
    """Later layers add what earlier ones gave, times a learned number."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.Parameter(torch.ones(2))

    def run(self, x: Tensor) -> Tensor:
        first = x
        for scale, block in zip(self.scales, self.blocks, strict=True):
            x = block(x + scale * first)
        return x


class Tied(Decoder):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.tokens.weight


class SquaredRelu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(HIDDEN, 4 * HIDDEN, bias=False), nn.Linear(4 * HIDDEN, HIDDEN, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.relu(self.up(x)).square())
        return out


class GatedPacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both, self.down = nn.Linear(HIDDEN, 8 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(x).chunk(2, dim=-1)
        out: Tensor = self.down(F.silu(gate) * up)
        return out


class Packed(Decoder):
    """Documents in one sequence, by positions that start anew: no token sees another document's."""

    def forward(self, idx: Tensor, targets: Tensor, positions: Tensor) -> Any:  # type: ignore[override]
        documents = (positions == 0).cumsum(-1)
        mask = (documents[:, None, :, None] == documents[:, None, None, :]).tril()
        x = self.tokens(idx) + self.positions(positions)
        for block in self.blocks:
            x = block(x, mask=mask)
        return self.find_loss(x, targets)


class PackedAttention(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def vary(**parts: Any) -> Any:
    """Return a decoder class with other `parts`."""
    return type("Varied", (Decoder,), parts)


PACKED = {**make_inputs(), "positions": (torch.arange(LENGTH) % 8).expand(2, LENGTH).clone()}

CASES = (
    Case("attention written out", "minGPT", vary(attention=WrittenAttention)),
    Case("linear biases", "x-transformers", vary(attention=Alibi)),
    Case("grouped queries", "torchtitan", vary(attention=Grouped)),
    Case("a sliding window", "litgpt", vary(attention=Window)),
    Case("normed and turned queries and keys", "nanochat", vary(attention=QueryKeyNorm)),
    Case("a branch on a buffer's value", "picotron", vary(attention=BranchOnTable)),
    Case("a branch on a mask made in forward", "transformers", vary(attention=AskedMask)),
    Case("layers that share a module", "torchtune", SharedModule),
    Case("parallel residuals", "litgpt", ParallelResidual),
    Case("one block for all layers", "x-transformers", SharedLayers),
    Case("skips with learned scales", "modded-nanogpt", Skips),
    Case("a tied head", "nanoGPT", Tied),
    Case("squared ReLU", "modded-nanogpt", vary(mlp=SquaredRelu)),
    Case("a packed gate", "lingua", vary(mlp=GatedPacked)),
    Case(
        "packed documents",
        "torchtune",
        type("PackedDecoder", (Packed,), {"attention": PackedAttention}),
        {"example_inputs": PACKED},
    ),
)
