"""Dropout masks inside Triton kernels: the bits of runtime/randomness.py, drawn where they are needed."""

# Inside @triton.jit nothing but constants may be annotated.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl

from autoptd.runtime.randomness import BLOCK, OPERATOR_BITS, ROUNDS, WORD, count_dropped

BITS = tl.constexpr(OPERATOR_BITS)
TURNS = tl.constexpr(ROUNDS)


def mask_argument(key: Sequence[int], p: float) -> tuple[int, ...]:
    """Return the ``mask`` of `keep`: one argument of a kernel for a key of runtime/randomness.py and its p.

    Triton compiles a kernel anew for integers that are 1, divisible by 16 or longer than 32 bits. That folds the
    ones of a key's place away; the numbers that change from call to call are hidden from it as odd 64-bit ones.
    """
    seed, call, sample, operator, *place = key
    changing = (count_dropped(p), seed & WORD, seed >> 32 & WORD, operator, sample & WORD, call & WORD)
    return (*(1 << 62 | number << 1 | 1 for number in changing), *place)


def is_aligned(key: Sequence[int], width: int) -> bool:
    """Return whether, from the start of any row of `width` on, each 8 elements share one Philox counter."""
    batch, inner, run, whole, start = key[4:]
    unbroken = batch == 1 or inner % BLOCK == 0
    return unbroken and width % BLOCK == 0 and (run == whole or (run | whole | start) % BLOCK == 0)


@triton.jit
def keep(first, mask, BLOCK: tl.constexpr, ALIGNED: tl.constexpr):
    """Return which of the `BLOCK` elements from index `first` on are kept: a bool [BLOCK].

    `first` is a scalar, or [ROWS, 1] for a bool [ROWS, BLOCK]. It is computed with in its own integer type: int64
    where the tensor may have 2**31 elements. `ALIGNED`: `first` and `BLOCK` are multiples of 8, and `is_aligned`.
    """
    dropped = (mask[0] >> 1 & 0x1FFFF).to(tl.int32)
    if ALIGNED:  # one counter for 8 elements
        _, w0, w1, w2, w3 = _draw(first + tl.arange(0, BLOCK // 8) * 8, mask)
        low = _interleave(w0 & 0xFFFF, w1 & 0xFFFF, w2 & 0xFFFF, w3 & 0xFFFF)
        high = _interleave(w0 >> 16, w1 >> 16, w2 >> 16, w3 >> 16)
        kept = tl.join(low, high).to(tl.int32) >= dropped
        if len(kept.shape) == 4:
            return tl.reshape(kept, [BLOCK])
        else:
            return tl.reshape(kept, [kept.shape[0], BLOCK])
    else:
        place, w0, w1, w2, w3 = _draw(first + tl.arange(0, BLOCK), mask)
        word = tl.where(place < 4, tl.where(place < 2, w0, w1), tl.where(place < 6, w2, w3))
        return tl.where(place & 1 == 1, word >> 16, word & 0xFFFF).to(tl.int32) >= dropped


@triton.jit
def _interleave(n0, n1, n2, n3):
    """Return [.., 2, 2], whose row-major order is n0, n1, n2, n3."""
    return tl.join(tl.join(n0, n2), tl.join(n1, n3))


@triton.jit
def _draw(index, mask):
    """Return the place of each element in its counter's eight numbers, and the four words, as uint32."""
    _, seed_low, seed_high, operator, sample, call, batch, inner, run, whole, start = mask
    row = index // inner
    element = row // batch * inner + index % inner
    element = (element // run).to(tl.int64) * whole + start + element % run
    block = element >> 3
    seed = (seed_low >> 1 & 0xFFFFFFFF) | (seed_high >> 1 & 0xFFFFFFFF) << 32
    samples = ((sample >> 1 & 0xFFFFFFFF) + row % batch).to(tl.uint32)
    numbers = ((block >> 32 << BITS) | (operator >> 1 & 0xFFFFFFFF)).to(tl.uint32)
    calls = (call >> 1 & 0xFFFFFFFF).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, block.to(tl.uint32), numbers, samples, calls, n_rounds=TURNS)
    return (element & 7).to(tl.int32), w0, w1, w2, w3
