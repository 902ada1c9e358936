"""Run code written for fewer bits in float64: casts and new tensors are promoted too."""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from autoptd.passes.ir.nodes import place_of
from autoptd.runtime import aten
from autoptd.runtime.kernels.operands import HALF

COMPLEX = (torch.complex64, torch.complex32)
LOW = (torch.float32, *HALF, *COMPLEX)
LITERALS = (aten.lift_fresh.default, aten.lift_fresh_copy.default)


def promote(dtype: torch.dtype) -> torch.dtype:
    """Return float64 for a floating dtype of fewer bits, complex128 for a complex one, else `dtype`."""
    if dtype in COMPLEX:
        return torch.complex128
    return torch.float64 if dtype in LOW else dtype


class Promotion(TorchDispatchMode):
    """A mode in which this thread's operators that ask for a float of fewer bits get float64.

    That holds for casts, for reductions with a dtype, and for new tensors, backward included; the caller promotes
    parameters and inputs. `count` is the number of casts promoted so far. A literal that a model makes in the dtype of
    its activations becomes float64 here; with `literals` it is still rounded to that dtype.
    """

    def __init__(self, literals: torch.dtype | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0
        self._literals = literals

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        position, makes = place_of(func, "dtype"), _makes(func)
        if position is None:
            result = func(*args, **options)
            if func not in LITERALS:
                return result
            if result.dtype is torch.float64 and self._literals is not None:
                result = result.to(self._literals)
            return result.to(promote(result.dtype))
        given = args[position] if position < len(args) else options.get("dtype")
        if given in LOW:
            self.count += not makes
        elif given is not None or not makes:
            return func(*args, **options)
        else:
            # On the meta device: the least float64 is not a value of the dtype that is promoted.
            shown = func(*args, **{**options, "device": "meta"})
            if not isinstance(shown, Tensor) or shown.dtype not in LOW:
                return func(*args, **options)
            given = shown.dtype
        if position < len(args):
            args = (*args[:position], promote(given), *args[position + 1 :])
        else:
            options["dtype"] = promote(given)
        return func(*args, **options)


@cache
def _makes(func: OpOverload) -> bool:
    """Return whether an operator makes a tensor of no other one."""
    return not any("Tensor" in str(argument.type) for argument in func._schema.arguments)
