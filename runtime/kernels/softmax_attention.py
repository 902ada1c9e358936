"""Softmax attention whose dropout is keyed; without dropout the compiler keeps torch's own."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from autoptd.runtime.kernels.keyed_dropout import dropout
from autoptd.runtime.rank import Rank


def attention(
    rank: Rank,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    p: float,
    operator: int,
    is_causal: bool = False,
    scale: float | None = None,
    sample: int | None = 0,
    divided: int | None = None,
    shape: Sequence[int] | None = None,
) -> Tensor:
    """Compute ``dropout(softmax(q k^T * scale + mask)) v``; q, k, v are [b, heads, s, head_size].

    `mask`, `is_causal` and `scale` (default 1 / sqrt(head_size)) mean what they mean to torch's
    ``scaled_dot_product_attention``: a mask is True where a key may be seen, or is added to the scores; a
    query that sees no key gives zeros. What is dropped are the weights [b, heads, s, s]: `divided` is 1 where
    the heads are divided over the tensor ranks, `sample` the batch dimension; both count the dimensions of
    `shape` where it is given: batch and heads unmerged.
    """
    if mask is not None and is_causal:
        raise ValueError("attention was given a mask and is_causal=True; give one of the two")
    scores = (q * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)) @ k.transpose(-2, -1)
    blind = None
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    elif mask is not None:
        seen = mask if mask.dtype == torch.bool else mask != -torch.inf
        blind = ~seen.any(-1, keepdim=True)
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        scores = scores.masked_fill(blind, 0)
    weights = scores.softmax(-1)
    if blind is not None:
        weights = weights.masked_fill(blind, 0)
    unmerged = None if shape is None else [*shape, *weights.shape[-2:]]
    return dropout(rank, weights, p, operator, sample, divided, unmerged) @ v
