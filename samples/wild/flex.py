"""FlexAttention as people write it, and a forward that runs on CUDA alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_block_mask, flex_attention

from samples.wild.decoder import HEADS, LENGTH, Attention, Case, Decoder

attend: Callable[..., Any] = torch.compile(flex_attention)  # kept before, as many do


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def nearby(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q - k < 5


def make_mask(mod: Callable[..., Tensor], batch: int | None = None) -> BlockMask:
    return create_block_mask(mod, batch, None, LENGTH, LENGTH, device="cpu")


class Windowed(Attention):
    """torchtitan's: grouped heads and a mask that is made once."""

    def __init__(self) -> None:
        super().__init__(kv_heads=2)
        self.mask = make_mask(and_masks(causal, nearby))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = attend(q, k, v, block_mask=self.mask, enable_gqa=True)
        return out


class Biased(Attention):
    """The linear biases of torch's own examples."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        def add_bias(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return score + (k - q) * torch.exp2(-((h + 1) * 8.0 / HEADS))

        out: Tensor = attend(q, k, v, score_mod=add_bias, block_mask=make_mask(causal))
        return out


class Relative(Attention):
    """A learned bias of each head and distance, and capped scores."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(HEADS, 2 * LENGTH))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        def cap(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return 2 * torch.tanh(score / 2) + self.table[h][q - k + LENGTH]

        out: Tensor = attend(q, k, v, score_mod=cap, block_mask=make_mask(causal))
        return out


class Documents(Decoder):
    """A token 0 begins a document, and no token sees another one's."""

    def forward(self, idx: Tensor, targets: Tensor) -> Any:
        documents, x = (idx == 0).cumsum(-1), self.embed(idx)

        def same(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return documents[b, q] == documents[b, k]

        mask: Any = make_mask(and_masks(causal, same), len(idx))
        for block in self.blocks:
            x = block(x, mask=mask)
        return self.find_loss(x, targets)


class MaskedAttention(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:  # type: ignore[override]
        out: Tensor = attend(q, k, v, block_mask=mask)
        return out


class Summed(Attention):
    """A function of a score that is not of that one alone."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = attend(q, k, v, score_mod=lambda score, *_: score - score.sum())
        return out


class OnCuda(Attention):
    """Asks for CUDA, and makes its mask there."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not q.is_cuda or q.device.type != "cuda":
            raise RuntimeError("this kernel needs CUDA")
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device="cuda").tril() & torch.ones(1).bool().cuda()
        with torch.autocast("cuda", torch.bfloat16):
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return out.to(q.device, q.dtype)


def vary(attention: type[nn.Module], decoder: type[nn.Module] = Decoder) -> Any:
    """Return a decoder class with another attention."""
    return type("Varied", (decoder,), {"attention": attention})


CASES = (
    Case("flex_attention in a window", "torchtitan", vary(Windowed)),
    Case("flex_attention with linear biases", "attention-gym", vary(Biased)),
    Case("flex_attention with learned biases and a cap", "attention-gym", vary(Relative)),
    Case("flex_attention within documents", "torchtune", vary(MaskedAttention, Documents)),
    Case("flex_attention over sums of scores", "attention-gym", vary(Summed), refused="element by element"),
    Case("a forward for CUDA alone", "modded-nanogpt", vary(OnCuda), {"device": "cuda"}, written=1),
)
