"""Operators that draw random numbers, as arithmetic on uniform ones between 0 and 1."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from autoptd.passes.ir.nodes import aten_name
from autoptd.runtime import aten
from autoptd.runtime.kernels.operands import HALF

Apply = Callable[..., Any]  # calls an operator, or writes the call, with these arguments
Given = Mapping[str, Any]


def _stretch(apply: Apply, x: Any, scale: Any, shift: Any) -> Any:
    """Return x * scale + shift; numbers that change nothing are left out."""
    x = x if isinstance(scale, (int, float)) and scale == 1 else apply(aten.mul.Tensor, x, scale)
    return x if isinstance(shift, (int, float)) and shift == 0 else apply(aten.add.Tensor, x, shift)


def _uniform(apply: Apply, u: Any, given: Given) -> Any:
    low, high = given.get("from", 0), given.get("to", 1)
    return _stretch(apply, u, high - low, low)


def _normal(apply: Apply, u: Any, given: Given) -> Any:
    """The inverse of the distribution function; u is never at its ends, where this is infinite."""
    standard = _stretch(apply, apply(aten.erfinv.default, _stretch(apply, u, 2.0, -1.0)), math.sqrt(2), 0)
    return _stretch(apply, standard, given.get("std", 1), given.get("mean", 0))


def _bernoulli(apply: Apply, u: Any, given: Given) -> Any:
    p = given.get("p", given["self"])
    return apply(aten.lt.Scalar if isinstance(p, (int, float)) else aten.lt.Tensor, u, p)


def _integers(apply: Apply, u: Any, given: Given) -> Any:
    low = given.get("low", 0)
    return _stretch(apply, apply(aten.floor.default, _stretch(apply, u, given["high"] - low, 0)), 1, low)


_DISTRIBUTIONS: Mapping[str, Callable[[Apply, Any, Given], Any]] = {
    **dict.fromkeys(("uniform", "rand", "rand_like"), _uniform),
    **dict.fromkeys(("normal", "randn", "randn_like"), _normal),
    **dict.fromkeys(("randint", "randint_like"), _integers),
    "exponential": lambda apply, u, given: _stretch(apply, apply(aten.log.default, u), -1 / given["lambd"], 0),
    "bernoulli": _bernoulli,
}


def draws(target: Any) -> bool:
    """Return whether an operator of torch draws numbers of a distribution that `write_draw` knows."""
    return str(target) != "aten.randint_like.Tensor" and aten_name(target).removesuffix("_") in _DISTRIBUTIONS


def write_draw(draw: Any, given: Given, dtype: torch.dtype, uniform: Callable[[torch.dtype], Any], apply: Apply) -> Any:
    """Write what the operator `draw` draws for a result of `dtype`; a cast to that may be left to do.

    `given` are its arguments by name, and `uniform` draws the numbers, in a dtype fit for what is made of them.
    """
    rule = _DISTRIBUTIONS[aten_name(draw).removesuffix("_")]
    if rule is _integers:
        dtype = torch.float64
    elif not dtype.is_floating_point or (dtype in HALF and rule is not _uniform):
        dtype = torch.float32
    return rule(apply, uniform(dtype), given)
