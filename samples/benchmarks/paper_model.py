"""The GPT of SC21 as Megatron-LM of 2021 ran it: attention written out, its dropout a kernel of its own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from samples.gpt import GPT, MLP, GPTConfig, SelfAttention

VOCABULARY, SEQUENCE, DROPOUT = 51_200, 2_048, 0.1  # SC21 §5


class WrittenAttention(SelfAttention):
    """Product, scale and mask and softmax, dropout, product: SC21 §4.2, before fused attention was known.

    Each head's query, key and value lie beside each other, in even steps for any number of sequences. The dropout sees
    the weights turned: so the compiler leaves it out of the softmax's kernel, as theirs did.
    """

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        heads = self.c_attn(x).view(b, s, self.n_head, 3 * h // self.n_head).transpose(1, 2)
        q, k, v = heads.chunk(3, dim=3)
        future = torch.ones(s, s, dtype=torch.bool, device=x.device).triu(1)
        scores = q @ k.transpose(2, 3) * (h // self.n_head) ** -0.5
        weights = scores.masked_fill(future, torch.finfo(scores.dtype).min).softmax(dim=3)
        weights = F.dropout(weights.transpose(2, 3), self.dropout, self.training).transpose(2, 3)
        y = (weights @ v).transpose(1, 2).contiguous().view(b, s, h)
        out: Tensor = self.resid_dropout(self.c_proj(y))
        return out


class UnfusedAttention(SelfAttention):
    """The same without Megatron-LM's fused softmax: cast to float32, scaled, masked, normalised and cast back in turn.

    Keys are in rows and queries in columns: no rule knows it, and each operator stays what it is.
    """

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        heads = self.c_attn(x).view(b, s, self.n_head, 3 * h // self.n_head).transpose(1, 2)
        q, k, v = heads.chunk(3, dim=3)
        future = torch.ones(s, s, dtype=torch.bool, device=x.device).tril(-1)
        scores = (k @ q.transpose(2, 3)).float() * (h // self.n_head) ** -0.5
        weights = scores.masked_fill(future, torch.finfo(scores.dtype).min).softmax(dim=2).to(v.dtype)
        weights = F.dropout(weights, self.dropout, self.training).transpose(2, 3)
        y = (weights @ v).transpose(1, 2).contiguous().view(b, s, h)
        out: Tensor = self.resid_dropout(self.c_proj(y))
        return out


class UnfusedMLP(MLP):
    """Without the fused bias and GeLU: one is added, then the other taken."""

    def forward(self, x: Tensor) -> Tensor:
        wide = F.linear(x, self.c_fc.weight) + self.c_fc.bias
        out: Tensor = self.dropout(self.c_proj(F.gelu(wide, approximate="tanh")))
        return out


def build_paper_model(layers: int, heads: int, hidden: int, fused: bool = True) -> GPT:
    """The GPT of that size on the meta device, in half precision; `fused`: with the kernels of SC21 §4.2."""
    config = GPTConfig(VOCABULARY, SEQUENCE, layers, heads, hidden, DROPOUT)
    with torch.device("meta"):
        model = GPT(config)
        for block in model.h:
            block.attn = WrittenAttention(config) if fused else UnfusedAttention(config)
            if not fused:
                block.mlp = UnfusedMLP(config)
    return model.to(torch.bfloat16)
