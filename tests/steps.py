"""A training step as a plain loop makes it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from autoptd.capture.results import find_loss
from autoptd.runtime.module.parallel import Parallel


def train_step(parallel: Parallel, batch: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> Tensor:
    """Call, differentiate, step and clear the gradients; return the loss."""
    loss, _ = find_loss(parallel(**batch), None, {}, wanted=True)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()
