"""Dropout masks as the kernels draw them, for tests to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autoptd.runtime.randomness import Randomness, draw_mask, mask_key


def keep_mask(
    randomness: Randomness, p: float, operator: int, shape: Sequence[int], device: torch.device, **place: Any
) -> Tensor:
    """Which elements a dropout keeps: a bool tensor of this rank's `shape`; `place` as `mask_key` takes it."""
    return draw_mask(mask_key(operator, shape, **place), randomness.locate(device), p, shape)
