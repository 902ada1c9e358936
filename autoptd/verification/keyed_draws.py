"""Let the plain model draw the random numbers that the ranks of its program draw."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from autoptd.passes.ir.nodes import arguments, name_arguments
from autoptd.passes.ir.program import Program
from autoptd.passes.normal_form.draws import draws, write_draw
from autoptd.runtime import kernels
from autoptd.runtime.randomness import DRAWS, Randomness, draw_uniform, mask_key


class KeyedDraws(TorchDispatchMode):
    """A mode in which the operators of a forward draw what those of the same numbers in `program` draw, of all ranks.

    What the program does not use is drawn as the model draws it.
    """

    def __init__(self, program: Program, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        nodes = (node for stage in program.stages for node in stage.graph.nodes)
        calls = (arguments(node) for node in nodes if node.target is kernels.uniform)
        self._calls = {given["operator"]: given for given in calls}
        self._tensor, self._seed = program.mesh.tensor, seed
        self._count = 0
        self._first: Sequence[int] = ()

    def start(self, *first: int) -> None:
        """Begin a forward of microbatches with these `first` samples."""
        self._count, self._first = 0, first

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not draws(func) or result.is_meta:  # where only the result's dtype is asked for
            return result
        number, self._count = self._count, self._count + 1
        if number not in self._calls:
            return result
        given, uniform = name_arguments(func, args, kwargs or {}), partial(self._draw, number, result.shape)
        return result.copy_(write_draw(func, given, result.dtype, uniform, lambda call, *given: call(*given)))

    def _draw(self, number: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Draw the numbers of the operator `number` for a whole tensor of all microbatches."""
        given = self._calls[number]
        sample, divided, viewed = (given.get(name) for name in ("sample", "divided", "shape"))
        own = list(shape if viewed is None else viewed)
        if viewed is not None and divided is not None:
            own[divided] *= self._tensor
        if viewed is None and sample is not None:
            own[sample] //= len(self._first)
        key = mask_key(DRAWS + number, own, sample=sample)
        cpu = torch.device("cpu")
        moments = [Randomness(self._seed, sample=first).locate(cpu) for first in self._first]
        parts = [draw_uniform(key, moment, own, dtype) for moment in moments]
        return (torch.cat(parts, sample) if sample is not None else parts[0]).reshape(shape)
