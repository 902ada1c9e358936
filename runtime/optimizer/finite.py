"""Tell whether gradients are finite, without waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm


def are_finite(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return whether all elements of `gradients` are finite: a bool on `device`."""
    filled = [gradient for gradient in gradients if gradient.numel()]
    if not filled:
        return torch.ones((), dtype=torch.bool, device=device)
    if device.type == "cpu":
        # No sum is finite where an element is not, and it takes a fourth of the time that extremes take, which do not
        # overflow. Norms take ten times as long as those.
        if torch.stack([gradient.sum() for gradient in filled]).isfinite().all():
            return torch.ones((), dtype=torch.bool)
        return torch.stack([end for gradient in filled for end in gradient.aminmax()]).isfinite().all()
    # The maximum norm does not overflow, as a sum of squares may.
    return get_total_norm(filled, torch.inf).isfinite()
