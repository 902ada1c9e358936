"""The vocabulary-parallel embedding (SC21 §2.3)."""

from __future__ import annotations

import torch
from torch import Tensor

from autoptd.runtime.comm.rank import Rank


def embedding(rank: Rank, weight: Tensor, ids: Tensor, vocabulary: int, padding_idx: int = -1) -> Tensor:
    """Look `ids` up in this tensor rank's rows of the table: partial, zero where another rank owns the row.

    `weight` [ceil(V / t), h] holds rows index * ceil(V / t) on; the last rank's may be padded. An id outside
    0 to V - 1 is torch's own IndexError on every rank. The row `padding_idx` (-1: none) gets no gradient.
    """
    if rank.group("tensor").size == 1:
        return torch.embedding(weight, ids, padding_idx)
    rows = weight.shape[0]
    local = ids - rank.group("tensor").index * rows
    elsewhere = (local < 0) | (local >= rows)
    illegal = (ids < 0) | (ids >= vocabulary)
    local = local.masked_fill(elsewhere, 0).masked_fill(illegal, rows)
    own_padding = padding_idx - rank.group("tensor").index * rows
    own_padding = own_padding if 0 <= own_padding < rows else -1
    return torch.embedding(weight, local, own_padding).masked_fill(elsewhere.unsqueeze(-1), 0)
