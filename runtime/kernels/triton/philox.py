"""Dropout masks inside Triton kernels: the bits of runtime/randomness.py, drawn where they are needed."""

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from autoptd.runtime.kernels.keyed_draws import keep_factor
from autoptd.runtime.randomness import BLOCK, OPERATOR_BITS, ROUNDS, count_dropped

BITS = tl.constexpr(OPERATOR_BITS)
TURNS = tl.constexpr(ROUNDS)


def dropout_arguments(key: Sequence[int], moment: Tensor | None, p: float, x: Tensor) -> dict[str, Any]:
    """Return the arguments `dropout` and `ALIGNED` of a kernel that calls `drop` on rows of `x`, with probability `p`.

    `dropout` is one tuple for key and moment of runtime/randomness.py, None where nothing is dropped. Triton compiles a
    kernel anew for integers that are 1, divisible by 16 or longer than 32 bits. That folds the ones of a key's place
    away; the numbers in which operators differ are hidden from it as odd 64-bit ones. Rows are `ALIGNED` where each 8
    elements, from the start of any row on, share one Philox counter.
    """
    if moment is None:
        return {"dropout": None, "ALIGNED": False}
    operator, *place = key
    _, batch, inner, run, whole, start = place
    differing = (1 << 62 | number << 1 | 1 for number in (count_dropped(p), operator))
    return {
        "dropout": (keep_factor(p), moment, *differing, *place),
        "ALIGNED": (batch == 1 or inner % BLOCK == 0)
        and (x.shape[-1] if x.dim() else 1) % BLOCK == 0
        and (run == whole or (run | whole | start) % BLOCK == 0),
    }


@triton.jit
def drop(value, first, dropout, BLOCK: tl.constexpr, ALIGNED: tl.constexpr):
    """Return `value` [ROWS, BLOCK], the elements from the indices `first` [ROWS, 1] on, after its dropout.

    See `dropout_arguments`; where rows are `ALIGNED`, `first` and `BLOCK` are multiples of 8.
    """
    if dropout is None:
        return value
    else:  # multiplied, not chosen: NaNs stay, as in torch
        return value * tl.where(_keep(first, dropout, BLOCK, ALIGNED), dropout[0], 0.0)


@triton.jit
def _keep(first, dropout, BLOCK: tl.constexpr, ALIGNED: tl.constexpr):
    """Return which elements are kept. Computes in the integer type of `first`, int64 where 2**31 elements may be."""
    dropped = (dropout[2] >> 1 & 0x1FFFF).to(tl.int32)
    if ALIGNED:  # one counter for 8 elements
        _, w0, w1, w2, w3 = _draw(first + tl.arange(0, BLOCK // 8) * 8, dropout)
        low = _interleave(w0 & 0xFFFF, w1 & 0xFFFF, w2 & 0xFFFF, w3 & 0xFFFF)
        high = _interleave(w0 >> 16, w1 >> 16, w2 >> 16, w3 >> 16)
        return tl.reshape(tl.join(low, high), [low.shape[0], BLOCK]).to(tl.int32) >= dropped
    else:
        place, w0, w1, w2, w3 = _draw(first + tl.arange(0, BLOCK), dropout)
        word = tl.where(place < 4, tl.where(place < 2, w0, w1), tl.where(place < 6, w2, w3))
        return tl.where(place & 1 == 1, word >> 16, word & 0xFFFF).to(tl.int32) >= dropped


@triton.jit
def _interleave(n0, n1, n2, n3):
    """Return [.., 2, 2], whose row-major order is n0, n1, n2, n3."""
    return tl.join(tl.join(n0, n2), tl.join(n1, n3))


@triton.jit
def _draw(index, dropout):
    """Return the place of each element in its counter's eight numbers, and the four words, as uint32."""
    _, moment, _, operator, sampled, batch, inner, run, whole, start = dropout
    row = index // inner
    element = row // batch * inner + index % inner
    element = (element // run).to(tl.int64) * whole + start + element % run
    block = element >> 3
    samples = (tl.load(moment + 2) * sampled + row % batch).to(tl.uint32)
    numbers = ((block >> 32 << BITS) | (operator >> 1 & 0xFFFFFFFF)).to(tl.uint32)
    calls = tl.load(moment + 1).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(tl.load(moment), block.to(tl.uint32), numbers, samples, calls, n_rounds=TURNS)
    return (element & 7).to(tl.int32), w0, w1, w2, w3
