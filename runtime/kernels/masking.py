"""Masks of the kernels with a dropout inside, for a rank's tensors."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from autoptd.runtime.comm.rank import Rank
from autoptd.runtime.randomness import draw_mask, mask_key


def find_key(
    rank: Rank,
    x: Tensor,
    p: float,
    operator: int,
    sample: int | None,
    divided: int | None,
    shape: Sequence[int] | None,
) -> list[int]:
    """Return the key of the mask of `x`, for the arguments of `keyed_dropout.dropout`; empty: nothing is dropped."""
    if not 0 <= p <= 1:
        raise ValueError(f"dropout probability is {p}, expected 0 to 1")
    if p == 0 or not rank.randomness.training:
        return []
    shape = x.shape if shape is None else shape
    if prod(shape) != x.numel():
        raise ValueError(f"a dropout's tensor {list(x.shape)} cannot be seen as {list(shape)}")
    return mask_key(
        rank.randomness,
        operator,
        shape,
        sample=sample,
        divided=divided,
        size=rank.group("tensor").size,
        index=rank.group("tensor").index,
    )


def apply_mask(x: Tensor, p: float, key: Sequence[int], causal: bool = False) -> Tensor:
    """Return `x` times the mask of `key`, unscaled, like `x` in memory; `causal` scores are zero above the diagonal."""
    mask = draw_mask(key, p, x.shape, x.device, causal)
    return torch.empty_like(x).copy_(mask).mul_(x)


def keep_factor(p: float) -> float:
    """Return the factor of a kept element; no element is kept where p is 1."""
    return 0.0 if p == 1 else 1 / (1 - p)
