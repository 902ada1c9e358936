"""Dropout by a keyed mask, the same on every mesh."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from autoptd.runtime.randomness import keep_mask
from autoptd.runtime.rank import Rank


def dropout(
    rank: Rank,
    x: Tensor,
    p: float,
    operator: int,
    sample: int | None = 0,
    divided: int | None = None,
    shape: Sequence[int] | None = None,
) -> Tensor:
    """Zero each element with probability `p` and scale the others by 1 / (1 - p); identity when not training.

    The mask is that of `x` viewed as `shape` (this rank's), whose dimension `sample` is the batch (None: no
    batch) and whose dimension `divided` is this tensor rank's equal, contiguous part; see
    runtime/randomness.py.
    """
    if not 0 <= p <= 1:
        raise ValueError(f"dropout probability is {p}, expected 0 to 1")
    if p == 0 or not rank.randomness.training:
        return x
    if p == 1:
        return x * 0
    if x.is_meta:
        return x * (1 / (1 - p))
    keep = keep_mask(
        rank.randomness,
        p,
        operator,
        x.shape if shape is None else shape,
        x.device,
        sample=sample,
        divided=divided,
        size=rank.tensor.size,
        index=rank.tensor.index,
    )
    return (x * keep.reshape(x.shape)).mul_(1 / (1 - p))
