"""Tell whether gradients are finite, without waiting for the device."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm


def are_finite(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return whether all elements of `gradients` are finite: a bool on `device`."""
    # On a CPU a sum takes a fortieth of a norm's time; it is not finite where an element is not.
    if device.type == "cpu" and all(gradient.sum().isfinite() for gradient in gradients):
        return torch.ones((), dtype=torch.bool)
    filled = [gradient for gradient in gradients if gradient.numel()]
    if not filled:
        return torch.ones((), dtype=torch.bool, device=device)
    # The maximum norm does not overflow, as a sum may.
    return get_total_norm(filled, torch.inf).isfinite()
