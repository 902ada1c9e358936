"""A ``torch.autograd.Function`` of the user's as one operator, which runs the class as it is written."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autoptd.runtime.comm.rank import Rank
from autoptd.runtime.program.class_path import find_class


def autograd_function(rank: Rank, path: str, *arguments: Any) -> Any:
    """Return what the `AutogradFunction` of a class returns, "package.module:Class"."""
    return AutogradFunction(path)(rank, *arguments)


@dataclass(frozen=True)
class AutogradFunction:
    """The operator of the class at the import path `path`; all of its calls in a graph have an equal target.

    A microbatch's loss has a weight in that of the step, such as 1/m, and a backward need not be linear in the gradient
    it gets: that of an auxiliary loss adds a constant, that of a clamp has bounds. So it gets the gradient that the
    microbatch's own loss has, and what it returns is weighed; but that of float16 is scaled, as by a GradScaler.
    """

    path: str

    @classmethod
    def of(cls, function: type) -> AutogradFunction:
        """Return the operator of a class, found or not."""
        return cls(f"{function.__module__}:{function.__qualname__}")

    @property
    def __name__(self) -> str:
        return self.path.rpartition(":")[2].rpartition(".")[2].lower()

    def __call__(self, rank: Rank, *arguments: Any) -> Any:
        weight = rank.randomness.weight if torch.is_grad_enabled() else None
        half = any(isinstance(x, Tensor) and x.dtype is torch.float16 for x in arguments)
        if weight is None or half:
            return self.apply(*arguments)
        results = self.apply(*(_weigh(x, weight) for x in arguments))
        inverse = torch.where(weight == 0, 1.0, 1 / weight)  # of a microbatch that does not count
        return _weigh(results, inverse) if isinstance(results, Tensor) else tuple(_weigh(x, inverse) for x in results)

    def apply(self, *arguments: Any) -> Any:
        """Return the tensor that the class's ``apply`` returns, or the tuple of several."""
        results = self.run(*arguments)
        if isinstance(results, Tensor):
            return results
        tensors = tuple(x for x in results if isinstance(x, Tensor))
        return tensors if len(tensors) > 1 else tensors[0]

    def run(self, *arguments: Any) -> Any:
        """Return all that the class's ``apply`` returns; on the meta device what its forward makes is there too."""
        function: Any = find_class(self.path, "autograd function")
        on_meta = any(isinstance(x, Tensor) and x.is_meta for x in arguments)
        with torch.device("meta") if on_meta else nullcontext():
            return function.apply(*arguments)


def _weigh(x: Any, weight: Tensor) -> Any:
    """Return a view of `x` whose gradient is multiplied by `weight`; what has no gradient as it is."""
    if not isinstance(x, Tensor) or not x.requires_grad:
        return x
    view = x.view_as(x)
    view.register_hook(lambda gradient: None if gradient is None else gradient * weight)
    return view
