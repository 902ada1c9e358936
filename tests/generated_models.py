"""Plain GPTs in every way people write them: one module whose sizes and style a `ModelConfig` chooses.

It knows nothing of the compiler. Letters in shapes: b sequences, s tokens, h hidden, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Projection = Literal["three", "packed", "per_head", "unequal"]
Attention = Literal["fused", "written"]
Grouping = Literal["repeat", "expand", "native"]


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and style of one model.

    `projection`: query, key and value from three linears; from one packed [3 * heads * size] or, per head,
    [heads * 3 * size]; or from one of unequal widths [(heads + 2 * kv_heads) * size]. `grouping` says how
    fewer key/value heads meet the queries: repeated, expanded, or by torch's own ``enable_gqa``.
    """

    layers: int = 2
    heads: int = 4
    kv_heads: int = 4
    head_size: int = 6
    vocabulary: int = 53
    length: int = 8
    width: int = 48
    projection: Projection = "three"
    attention: Attention = "fused"
    grouping: Grouping = "repeat"
    bias: bool = True
    qkv_bias: bool = True
    head_bias: bool = False
    tied: bool = False
    gated: bool = False
    packed_gate: bool = False
    parallel_residual: bool = False
    rms_norm: bool = False
    query_key_norm: bool = False
    rotary: bool = False
    sequence_first: bool = False

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} heads are no multiple of {self.kv_heads} key/value heads")
        if self.projection in ("packed", "per_head") and self.heads != self.kv_heads:
            raise ValueError(f"projection {self.projection!r} has as many key/value heads as heads")
        if self.tied and self.head_bias:
            raise ValueError("a tied head has no bias here")

    @property
    def hidden(self) -> int:
        return self.heads * self.head_size

    def __str__(self) -> str:
        """A short name: what differs from the plainest GPT."""
        heads = f"{self.heads}" if self.heads == self.kv_heads else f"{self.heads}of{self.kv_heads}"
        flags = [
            name
            for name in (
                "head_bias",
                "tied",
                "gated",
                "packed_gate",
                "parallel_residual",
                "rms_norm",
                "query_key_norm",
                "rotary",
                "sequence_first",
            )
            if getattr(self, name)
        ]
        if not self.bias:
            flags.append("no_bias")
        style = [self.projection, self.attention, *flags]
        return f"L{self.layers}-h{heads}-V{self.vocabulary}-{'-'.join(style)}"


class RMSNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        variance = x.pow(2).mean(-1, keepdim=True)
        out: Tensor = self.weight * (x * torch.rsqrt(variance + 1e-6))
        return out


def make_norm(config: ModelConfig) -> nn.Module:
    return RMSNorm(config.hidden) if config.rms_norm else nn.LayerNorm(config.hidden, bias=config.bias)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the two halves of the last dimension of `x` [b, heads, s, size] by angles [s, size]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class SelfAttention(nn.Module):
    inverse: Tensor
    causal: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        h, size, bias = config.hidden, config.head_size, config.qkv_bias
        if config.projection == "three":
            self.q = nn.Linear(h, h, bias=bias)
            self.k = nn.Linear(h, config.kv_heads * size, bias=bias)
            self.v = nn.Linear(h, config.kv_heads * size, bias=bias)
        else:
            self.qkv = nn.Linear(h, (config.heads + 2 * config.kv_heads) * size, bias=bias)
        self.out = nn.Linear(h, h, bias=config.bias)
        if config.query_key_norm:
            self.q_norm = RMSNorm(size)
            self.k_norm = RMSNorm(size)
        if config.rotary:
            inverse = 1.0 / (10000.0 ** (torch.arange(0, size, 2).double() / size))
            self.register_buffer("inverse", inverse, persistent=False)
        if config.attention == "written":
            causal = torch.tril(torch.ones(config.length, config.length, dtype=torch.bool))
            self.register_buffer("causal", causal.view(1, 1, config.length, config.length))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [b, heads, s, size], keys and values [b, kv_heads, s, size] of `x` [b, s, h]."""
        c = self.config
        b, s, h = x.shape
        if c.projection == "three":
            q, k, v = self.q(x), self.k(x), self.v(x)
        elif c.projection == "packed":
            q, k, v = self.qkv(x).split(h, dim=2)
        elif c.projection == "per_head":
            q, k, v = self.qkv(x).view(b, s, c.heads, 3 * c.head_size).chunk(3, dim=-1)
        else:
            narrow = c.kv_heads * c.head_size
            q, k, v = self.qkv(x).split([h, narrow, narrow], dim=-1)
        q = q.reshape(b, s, c.heads, c.head_size).transpose(1, 2)
        k = k.reshape(b, s, c.kv_heads, c.head_size).transpose(1, 2)
        v = v.reshape(b, s, c.kv_heads, c.head_size).transpose(1, 2)
        return q, k, v

    def spread(self, x: Tensor) -> Tensor:
        """Repeat grouped keys or values [b, kv_heads, s, size] to all heads."""
        b, kv_heads, s, size = x.shape
        groups = self.config.heads // kv_heads
        if groups == 1:
            return x
        if self.config.grouping == "expand":
            return x[:, :, None].expand(b, kv_heads, groups, s, size).reshape(b, kv_heads * groups, s, size)
        return x.repeat_interleave(groups, dim=1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.config.attention == "written":
            s = q.shape[2]
            scores = (q @ self.spread(k).transpose(-2, -1)) / math.sqrt(q.shape[-1])
            scores = scores.masked_fill(~self.causal[:, :, :s, :s], float("-inf"))
            return F.softmax(scores, dim=-1) @ self.spread(v)
        if self.config.grouping == "native" and q.shape[1] != k.shape[1]:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return F.scaled_dot_product_attention(q, self.spread(k), self.spread(v), is_causal=True)

    def forward(self, x: Tensor) -> Tensor:
        if self.config.sequence_first:
            x = x.transpose(0, 1)
        b, s, h = x.shape
        q, k, v = self.project(x)
        if self.config.query_key_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.config.rotary:
            angles = torch.outer(torch.arange(s, device=x.device).to(x.dtype), self.inverse)
            angles = torch.cat((angles, angles), dim=-1)
            q, k = (rotate(y, angles.cos(), angles.sin()) for y in (q, k))
        y = self.attend(q, k, v).transpose(1, 2).reshape(b, s, h)
        if self.config.sequence_first:
            y = y.transpose(0, 1)
        out: Tensor = self.out(y)
        return out


class MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        h, width, bias = config.hidden, config.width, config.bias
        if config.gated and config.packed_gate:
            self.gate_up = nn.Linear(h, 2 * width, bias=bias)
        else:
            self.up = nn.Linear(h, width, bias=bias)
            if config.gated:
                self.gate = nn.Linear(h, width, bias=bias)
        self.down = nn.Linear(width, h, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.config.gated and self.config.packed_gate:
            gate, up = self.gate_up(x).chunk(2, dim=-1)
            y = F.silu(gate) * up
        elif self.config.gated:
            y = F.silu(self.gate(x)) * self.up(x)
        else:
            y = F.gelu(self.up(x), approximate="tanh")
        out: Tensor = self.down(y)
        return out


class Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.parallel_residual = config.parallel_residual
        self.attention_norm = make_norm(config)
        self.attention = SelfAttention(config)
        self.mlp_norm = make_norm(config)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        if self.parallel_residual:
            out: Tensor = x + self.attention(self.attention_norm(x)) + self.mlp(self.mlp_norm(x))
            return out
        x = x + self.attention(self.attention_norm(x))
        out = x + self.mlp(self.mlp_norm(x))
        return out


class GeneratedGPT(nn.Module):
    """``model(idx, targets)`` gives the mean loss; both are [b, s], or [s, b] when sequence-first."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.hidden)
        if not config.rotary:
            self.positions = nn.Embedding(config.length, config.hidden)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = make_norm(config)
        self.head = nn.Linear(config.hidden, config.vocabulary, bias=config.head_bias)
        if config.tied:
            self.head.weight = self.tokens.weight

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(idx)
        if not self.config.rotary:
            s = idx.shape[0 if self.config.sequence_first else 1]
            positions = self.positions(torch.arange(s, device=idx.device))
            x = x + (positions[:, None] if self.config.sequence_first else positions)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))


def make_model(config: ModelConfig, seed: int = 0, dtype: torch.dtype = torch.float64) -> GeneratedGPT:
    """The model with random weights in every parameter: no bias is zero and no norm weight one."""
    model = GeneratedGPT(config).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            if p.dim() > 1:
                p.copy_(noise / math.sqrt(p.shape[-1]))
            else:
                p.copy_(0.2 * noise + (p.detach() == 1))
    return model


def make_batch(config: ModelConfig, sequences: int, seed: int = 0, ignored: float = 0.0) -> dict[str, Tensor]:
    """Random tokens and targets of `sequences`; a share `ignored` of the targets is -100."""
    generator = torch.Generator().manual_seed(seed + 1)
    idx, targets = torch.randint(0, config.vocabulary, (2, sequences, config.length), generator=generator)
    hidden = torch.rand(targets.shape, generator=generator) < ignored
    hidden[:, 0] = False  # every sequence counts for something
    targets = targets.masked_fill(hidden, -100)
    if config.sequence_first:
        idx, targets = idx.t().contiguous(), targets.t().contiguous()
    return {"idx": idx, "targets": targets}
