"""Dynamic loss scaling: a loss in float16 is scaled up, so that small gradients do not become zero on the way back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from autoptd.runtime.agreement import are_finite
from autoptd.runtime.rank import Rank

INITIAL, LEAST = 2.0**15, 2.0**-14  # float16 ends below 2**16
GROWTH_INTERVAL = 2000  # steps


class LossScale:
    """The factor of the next step's loss, a power of two, the same on every rank.

    Halved where a step's gradients are not finite, and the step run again, so that it neither is left out nor counts
    with the rest of an accumulation alone; doubled after GROWTH_INTERVAL that were at once.
    """

    def __init__(self) -> None:
        self.value = INITIAL
        self.finite_steps = 0

    def unscale(self, rank: Rank, gradients: Sequence[Tensor]) -> bool:
        """Divide `gradients` by the factor, in place; whether those of all ranks are finite. A collective of all.

        Raises RuntimeError where no factor makes them so.
        """
        flag = (~are_finite(gradients, rank.device)).to(torch.float32).view(1)
        for gradient in gradients:
            gradient.mul_(1 / self.value)
        for group in (rank.tensor, rank.pipeline, rank.data):
            flag = group.all_reduce(flag, "max")
        finite = flag.item() == 0
        self._update(finite)
        return finite

    def _update(self, finite: bool) -> None:
        self.finite_steps = self.finite_steps + 1 if finite else 0
        if not finite:
            self.value /= 2
        elif self.finite_steps % GROWTH_INTERVAL == 0:
            self.value *= 2
        if self.value < LEAST:
            raise RuntimeError(
                f"the gradients are not finite even with a loss scaled by {2 * self.value:g}: it is not the range of "
                "float16 that is too small; look for the operator in bfloat16 or float32"
            )
