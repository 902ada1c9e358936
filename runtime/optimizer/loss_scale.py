"""Dynamic loss scaling: a loss in float16 is scaled up, so that small gradients do not become zero on the way back."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from autoptd.runtime.comm.rank import Rank

# float16 ends below 2**16. Where no factor from LEAST on makes the gradients finite, its range is not the reason.
INITIAL, LEAST = 2.0**15, 2.0**-14
GROWTH_INTERVAL = 2000  # steps


class LossScale:
    """The factor of the next step's loss, a power of two, the same on every rank.

    Halved where a step's gradients are not finite, and the step run again, so that it neither is left out nor counts
    with the rest of an accumulation alone; doubled after GROWTH_INTERVAL that were at once.
    """

    def __init__(self) -> None:
        self.value = INITIAL
        self.finite_steps = 0

    def unscale(self, rank: Rank, gradients: Sequence[Tensor], loss: Tensor) -> bool:
        """Divide `gradients` by the factor in place; return whether a smaller one may help: a collective of all ranks.

        That is where some rank's gradients are not finite, and every rank's `loss` is; the factor is halved then.
        """
        flags = torch.stack([~are_finite(gradients, rank.device), ~loss.isfinite()]).to(torch.float32)
        for gradient in gradients:
            gradient.mul_(1 / self.value)
        broken, lost = (bool(flag) for flag in rank.maximum(flags).tolist())
        if not lost:
            self.finite_steps = 0 if broken else self.finite_steps + 1
            if broken:
                self.value /= 2
            elif self.finite_steps % GROWTH_INTERVAL == 0:
                self.value *= 2
        return broken and not lost


def are_finite(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return whether all elements of `gradients` are finite: a bool on `device`, which is not waited for."""
    # On a CPU a sum takes a fortieth of a norm's time; it is not finite where an element is not.
    if device.type == "cpu" and all(gradient.sum().isfinite() for gradient in gradients):
        return torch.ones((), dtype=torch.bool)
    filled = [gradient for gradient in gradients if gradient.numel()]
    if not filled:
        return torch.ones((), dtype=torch.bool, device=device)
    # The maximum norm does not overflow, as a sum may.
    return get_total_norm(filled, torch.inf).isfinite()
