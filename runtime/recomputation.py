"""Compute a part of a stage again in the backward, instead of keeping what it saves (SC21 §3.5)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from autoptd.runtime.rank import Rank


def recompute(rank: Rank, function: Callable[..., Any], *values: Tensor) -> Any:
    """Give ``function(*values)``; for the backward keep `values` alone, and call the function once more there.

    Dropout draws the same masks as before, although the schedule has moved on to other microbatches. The second
    call stops after the last operator that saves anything. Collectives before that are repeated, in the same
    order on all tensor ranks. Without gradients there is no second call.
    """
    if not torch.is_grad_enabled():
        return function(*values)
    then = replace(rank.randomness)

    def call(*values: Tensor) -> Any:
        now, rank.randomness = rank.randomness, then
        try:
            return function(*values)
        finally:
            rank.randomness = now

    return checkpoint(call, *values, use_reentrant=False, preserve_rng_state=False)
