"""Initial weights of a model that has none: each element is a pure function of seed, parameter name and index.

One Philox counter per element (runtime/randomness.py), its row-major index in the whole, undivided tensor:

- key: the seed's low and high word;
- counter word 0: the low 32 bits of the index; word 1: its higher bits from bit 24 on, and below them 24 bits of the
  SHA-256 of the parameter's name; word 2: 32 more of these;
- counter word 3: 2**32 - 1, less one for each attempt of a truncated distribution that fell outside. For dropout this
  word is the number of the call, which counts from 0.

The bits become numbers by float64 operations that IEEE 754 rounds exactly (+ - * / sqrt), and by no library function,
whose last bit depends on device and position in a vector. So weights have the same bits on every mesh and device.
"""

import math
from dataclasses import replace
from hashlib import sha256
from itertools import count

import torch
from torch import Tensor

from autoptd.runtime.comm.rank import Rank
from autoptd.runtime.program.placement import Draw, Parameter
from autoptd.runtime.randomness import CPU_CHUNK, OPERATOR_BITS, WORD, philox

DEVICE_CHUNK = 1 << 22
UNIT = 2.0**-53

# log((1 + s) / (1 - s)) = 2 s (1 + s**2 / 3 + ...), for s**2 < 0.03; cos(x) = 1 - x**2 / 2 + ..., for x <= pi / 2.
_LOG = [1 / (2 * k + 1) for k in range(11)]
_COS = [(-1) ** k / math.factorial(2 * k) for k in range(12)]


def draw_slice(parameter: Parameter, rank: Rank, seed: int) -> Tensor:
    """Draw this rank's slice of what `parameter.initial` describes, a chunk at a time; rows of padding are zero."""
    made = torch.empty(parameter.local_shape(rank.mesh.sizes), dtype=parameter.dtype, device=rank.device)
    flat, rows = made.view(-1), _find_rows(parameter, rank)
    chunk = CPU_CHUNK if rank.device.type == "cpu" else DEVICE_CHUNK
    for start in range(0, flat.numel(), chunk):
        places = torch.arange(start, min(start + chunk, flat.numel()), device=rank.device)
        elements, padding = _find_elements(parameter, rows, places)
        flat[start : start + chunk] = draw_elements(parameter, seed, elements).masked_fill_(padding, 0)
    return made


def draw_elements(parameter: Parameter, seed: int, elements: Tensor) -> Tensor:
    """Return the initial values, in float64, of the `elements` with these indices in the whole tensor."""
    values = torch.zeros(elements.shape, dtype=torch.float64, device=elements.device)
    for draw in parameter.initial:
        inside: Tensor | slice = slice(None)
        if draw.run:
            first, end = draw.run
            inside = ((elements >= first) & (elements < end)).nonzero()[:, 0]
        values[inside] = _draw(draw, seed, parameter.name, elements[inside])
    return values


def _find_rows(parameter: Parameter, rank: Rank) -> Tensor | None:
    """Return the global row of each of this rank's rows of the divided dimension, -1 for padding; None for all rows."""
    on_axis, group = rank.holds(parameter.placement)
    if on_axis.dim is None:
        return None
    numbers = torch.arange(1, parameter.shape[on_axis.dim] + 1, device=rank.device)
    return replace(on_axis, dim=0).take(numbers, group.size, group.index) - 1


def _find_elements(parameter: Parameter, rows: Tensor | None, places: Tensor) -> tuple[Tensor, Tensor]:
    """Return the elements of the whole tensor at `places` of the slice, and a mask of those that are padding."""
    dim = parameter.placement[parameter.placement.axis].dim
    if dim is None or rows is None:
        return places, torch.zeros_like(places, dtype=torch.bool)
    inner = math.prod(parameter.shape[dim + 1 :])
    row = rows[places // inner % len(rows)]
    before = places // (inner * len(rows))
    return (before * parameter.shape[dim] + row) * inner + places % inner, row < 0


def _draw(draw: Draw, seed: int, name: str, elements: Tensor) -> Tensor:
    if draw.kind == "constant":
        return torch.full(elements.shape, draw.value, dtype=torch.float64, device=elements.device)
    first, second = _random_bits(seed, name, elements, 0)
    if draw.kind == "uniform":
        return (first.double() * UNIT).mul_(draw.high - draw.low).add_(draw.low)
    values = _shape_normal(first, second).mul_(draw.std).add_(draw.mean)
    for attempt in count(1) if draw.kind == "truncated_normal" else ():
        outside = ((values < draw.low) | (values > draw.high)).nonzero()[:, 0]
        if not len(outside):
            break
        again = _random_bits(seed, name, elements[outside], attempt)
        values[outside] = _shape_normal(*again).mul_(draw.std).add_(draw.mean)
    return values


def _random_bits(seed: int, name: str, elements: Tensor, attempt: int) -> tuple[Tensor, Tensor]:
    digest = sha256(name.encode()).digest()
    low, high = int.from_bytes(digest[:3], "big"), int.from_bytes(digest[3:7], "big")
    words = [torch.full((1,), word, device=elements.device) for word in (high, WORD - attempt)]
    counter = (elements & WORD, (elements >> 32 << OPERATOR_BITS) | low, *words)
    a, b, c, d = philox(counter, (seed & WORD, seed >> 32 & WORD))
    return (a << 21) | (b >> 11), (c << 21) | (d >> 11)


def _shape_normal(first: Tensor, second: Tensor) -> Tensor:
    """Return standard normal numbers from two integers of 53 random bits (Box and Muller, 1958)."""
    radius = _logarithm((first + 1).double() * UNIT).mul_(-2).clamp_(min=0).sqrt_()
    turn = (second.double() * UNIT).sub_(0.5).abs_()  # a cosine of 2 pi turns, up to its sign
    cosine = _evaluate(_COS, (torch.minimum(turn, 0.5 - turn) * math.tau).square_())
    return radius.mul_(torch.where(turn > 0.25, cosine, -cosine))


def _logarithm(x: Tensor) -> Tensor:
    mantissa, exponent = torch.frexp(x)
    low = mantissa < math.sqrt(0.5)
    mantissa = torch.where(low, mantissa * 2, mantissa)
    s = (mantissa - 1) / (mantissa + 1)
    return _evaluate(_LOG, s * s).mul_(s).mul_(2).add_((exponent - low.int()).double().mul_(math.log(2)))


def _evaluate(coefficients: list[float], x: Tensor) -> Tensor:
    """Evaluate a polynomial of `x`, whose `coefficients` begin with the lowest power, by Horner's rule."""
    result = torch.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        result.mul_(x).add_(coefficient)
    return result
