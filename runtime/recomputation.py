"""Compute a part of a stage again in the backward, instead of keeping its saved tensors (SC21 §3.5)."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from autoptd.runtime.comm.rank import Rank


def recompute(rank: Rank, function: Callable[..., Any], *values: Tensor) -> Any:
    """Return ``function(rank, *values)``; keep only `values` for the backward, and call the function once more there.

    The function's rank is a copy that stays where the training stands now: dropout draws the same masks as before,
    although the schedule has moved on to other microbatches. (Setting the randomness of `rank` back for the second
    call would do on its own, but is a side effect that ``torch.compile`` does not take into a graph.) The second call
    stops after the last operator that saves anything, or is left out without gradients. Collectives are repeated.
    """
    if not torch.is_grad_enabled():
        return function(rank, *values)
    then = replace(rank, randomness=replace(rank.randomness))
    return checkpoint(partial(function, then), *values, use_reentrant=False, preserve_rng_state=False)
