"""Masks and random numbers as a pure function of an element's place in the whole tensor, never of the device.

Philox4x32-7 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11) in plain torch, on a CPU in
numpy. Seven rounds are the fewest that pass their tests; drawing costs more than all else in a dropout. One
counter gives four 32-bit words, whose halves, low one first, are the 16-bit numbers of eight elements:

- key: the seed's low and high word;
- counter word 0: block = element // 8, its low 32 bits, where element is the row-major index within ONE
  sample's whole (undivided) tensor, the batch dimension left out;
- counter word 1: the operator's number (from `DRAWS` on if it draws numbers), from bit 24 on the block's higher bits;
- counter words 2 and 3: the global sample index, and the number of the call.

A number of 32 bits is that of two elements, low half first: those of a tensor [.., 2].

What changes from step to step is read from a tensor on the device, the `moment`: a CUDA graph keeps every other number.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import log2, prod
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Words = TypeVar("Words", Tensor, NDArray[np.int64])
Key = Sequence[int]  # of a mask, as `mask_key` makes it
Dim = int | None  # None: there is none
Shape = Sequence[int] | None  # None: the tensor's own

WORD = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
OPERATOR_BITS = 24
DRAWS = 1 << 23  # the first number of operators that draw numbers, not masks
ROUNDS = 7
BLOCK = 8  # elements of a counter
LEVELS = 1 << 16  # numbers an element may draw

# Counters worked on at once: on a CPU so many that calling numpy, in the cold caches of a step, is a small part, and so
# few that the words of a round stay in a core's own cache.
CPU_CHUNK = 1 << 14
DEVICE_CHUNK = 1 << 24


@dataclass
class Randomness:
    """The state of the training that a dropout mask depends on, beside its operator and element.

    `sample` is the global index of the current microbatch's first row: data_rank * b * m + microbatch * b.
    `call` counts the training steps and goes into checkpoints. `moment` holds seed, call and sample on the device while
    a microbatch is in flight, and behind them the bits of its loss's weight; None: masks are of the numbers here.
    """

    seed: int = 0
    call: int = 0
    sample: int = 0
    training: bool = True
    moment: Tensor | None = None

    def locate(self, device: torch.device) -> Tensor:
        """Return the moment of a mask on `device`: int64 [seed, call, first sample]."""
        if self.moment is not None:
            return self.moment[:3]
        return torch.tensor([as_signed(self.seed), self.call, self.sample], device=device)

    @property
    def weight(self) -> Tensor | None:
        """The weight of the microbatch's loss in that of the step: float64 []; None where none is in flight."""
        return None if self.moment is None else self.moment[3].view(torch.float64)


def as_signed(seed: int) -> int:
    """Return the int64 with the bits of a `seed` of 64 bits."""
    return seed if seed < 1 << 63 else seed - (1 << 64)


def philox(counter: Sequence[Words], key: tuple[Any, Any]) -> tuple[Words, Words, Words, Words]:
    """Draw four random words per counter: 64-bit integers in [0, 2**32), broadcast against each other and the key's."""
    a, b, c, d = counter
    for turn in range(ROUNDS):
        keys = [(word + turn * step) & WORD for word, step in zip(key, KEY_STEPS, strict=True)]
        # A 64-bit product may wrap to a negative int64, but its bits are right. The low halves (b, d) keep
        # what stands above bit 31: it is masked away before they are multiplied.
        low, high = a * MULTIPLIERS[0], c * MULTIPLIERS[1]
        a, b, c, d = _mix(high, b, keys[0]), high, _mix(low, d, keys[1]), low
    return a, b & WORD, c, d & WORD


def _mix(product: Words, word: Words, key: Any) -> Words:
    mixed = (product >> 32) ^ word
    mixed ^= key
    mixed &= WORD
    return mixed


def mask_key(
    operator: int, shape: Sequence[int], sample: Dim = 0, divided: Dim = None, size: int = 1, index: int = 0
) -> list[int]:
    """Return the key of a mask of this rank's `shape`, as operators take it; see `draw_mask`.

    [operator, sampled, batch, inner, run, whole, start]: element i of the row-major tensor belongs to sample
    ``first * sampled + i // inner % batch``, for the first sample of the moment, is there the element
    ``e = i // (inner * batch) * inner + i % inner`` of this rank, and ``e // run * whole + start + e % run`` of
    the undivided tensor. Where that changes nothing it is written with ones: inner is 1 for a batch of one,
    run and whole are 1 where nothing is divided.

    `sample` is the batch dimension (None, and of a scalar: all share the mask of sample 0, and `sampled` is 0);
    `divided` the dimension of which `shape` holds part `index` of `size` equal, contiguous parts.
    """
    for name, dim in (("sample", sample), ("divided", divided)):
        if dim is not None and shape and not -len(shape) <= dim < len(shape):
            raise ValueError(f"{name} is {dim}, expected a dimension of {list(shape)}")
    batch_dim = sample % len(shape) if sample is not None and shape else None
    batch = 1 if batch_dim is None else shape[batch_dim]
    inner = 1 if batch == 1 or batch_dim is None else prod(shape[batch_dim + 1 :])
    run, whole, start = 1, 1, 0
    if divided is not None and size > 1:
        divided %= len(shape)
        if divided == batch_dim:
            raise ValueError(f"dimension {divided} of {list(shape)} is the batch; it cannot be divided")
        run = prod(n for dim, n in enumerate(shape) if dim >= divided and dim != batch_dim)
        whole, start = run * size, run * index
    return [operator, int(batch_dim is not None), batch, inner, run, whole, start]


def draw_mask(key: Key, moment: Tensor, p: float, shape: Sequence[int]) -> Tensor:
    """Draw the mask of `key` at a `moment`, bool of `shape`: an element is kept if its number is at least p * 2**16."""
    return _draw_whole(key, moment, count_dropped(p), shape)


def draw_uniform(key: Key, moment: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Draw the numbers of `key` at a `moment`: (n + 1/2) / 2**bits for the first bits of a word.

    These are as many as a `dtype` has behind its leading one, at most 32: each number is exact, and neither 0 nor 1.
    """
    pairs = [*key[:3], *(2 * number for number in key[3:])]  # the key of a tensor [*shape, 2]
    words = _draw_whole(pairs, moment, None, (*shape, 2)).contiguous().view(torch.int32).squeeze(-1)
    bits = min(32, -round(log2(torch.finfo(dtype).eps)))
    return (2 * ((words.long() & WORD) >> (32 - bits)) + 1).to(dtype) * 0.5 ** (bits + 1)


def _draw_whole(key: Key, moment: Tensor, dropped: int | None, shape: Sequence[int]) -> Tensor:
    """Return which elements are kept, or their numbers where None are `dropped`; see `_draw`."""
    device = moment.device
    if 0 in shape:
        return torch.empty(tuple(shape), dtype=torch.int16 if dropped is None else torch.bool, device=device)
    operator, sampled, batch, inner, run, whole, start = key
    seed, call, first = moment.tolist() if moment.is_cpu else moment.unbind()
    elements = prod(shape) // batch
    inner = elements if batch == 1 else inner
    run, whole = (elements, elements) if run == whole else (run, whole)
    starts = range(start, start + elements // run * whole, whole)
    samples = torch.arange(batch, device=device) + first * sampled
    draw = partial(_draw, (seed & WORD, seed >> 32 & WORD), call & WORD, operator, dropped)
    kept = _keep_runs(draw, samples, starts, run)
    return kept.reshape(batch, elements // inner, inner).transpose(0, 1).reshape(tuple(shape))


def count_dropped(p: float) -> int:
    """Return how many of the 2**16 numbers drop their element: the smallest ones."""
    return round(p * LEVELS)


def _keep_runs(draw: Callable[[Tensor, Tensor], Tensor], samples: Tensor, starts: range, run: int) -> Tensor:
    """Draw masks of the `run` elements from each of `starts` on, for every sample: bool [samples, starts, run]."""
    device = samples.device
    first = torch.arange(starts.start, starts.stop, starts.step, device=device)[:, None]
    aligned = all(start % BLOCK == 0 for start in (starts[0], starts.step if len(starts) > 1 else 0))
    # A run that starts inside a block reaches into one more.
    blocks_per_run = (run + BLOCK - 1) // BLOCK if aligned else (run + BLOCK - 2) // BLOCK + 1
    blocks = (first // BLOCK + torch.arange(blocks_per_run, device=device)).view(1, -1)
    kept = draw(blocks, samples).view(len(samples), len(starts), blocks_per_run * BLOCK)
    if aligned:
        return kept[..., :run]
    return kept.gather(2, (first % BLOCK + torch.arange(run, device=device)).expand(len(samples), -1, -1))


def _draw(
    key: tuple[Any, Any], call: Any, operator: int, dropped: int | None, blocks: Tensor, samples: Tensor
) -> Tensor:
    """Return which elements are kept, bool [samples, blocks, 8], for the numbers of the `blocks` [1, blocks].

    Where None are `dropped`, return the numbers themselves, as int16.

    On a CPU in numpy, which multiplies integers in less than half torch's time, and on one thread: beside OpenMP's,
    which spin between operators, further ones made a step slower by a third.
    """
    dtype = torch.int16 if dropped is None else torch.bool
    kept = torch.empty((len(samples), blocks.shape[1], BLOCK), dtype=dtype, device=samples.device)
    chunk = CPU_CHUNK if kept.is_cpu else DEVICE_CHUNK
    columns = min(blocks.shape[1], chunk)
    rows = max(1, chunk // columns)
    words = blocks & WORD, (blocks >> 32 << OPERATOR_BITS) | operator
    calls = torch.as_tensor(call).view(1, 1)
    for sample, some in zip((samples[:, None] & WORD).split(rows), kept.split(rows), strict=True):
        for *block, into in zip(*(each.split(columns, 1) for each in (*words, some)), strict=True):
            counter: Any = *block, sample, calls
            if kept.is_cpu:
                drawn = np.empty((*into.shape[:-1], 4), "<u4")
                for number, word in enumerate(philox([word.numpy() for word in counter], key)):
                    drawn[..., number] = word
                if dropped is None:
                    into.numpy()[...] = drawn.view("<i2")
                else:
                    np.greater_equal(drawn.view("<u2"), dropped, out=into.numpy())
                continue
            for place, word in enumerate(philox(counter, key)):
                for at, half in enumerate((word & (LEVELS - 1), word >> 16), 2 * place):
                    into[..., at] = half if dropped is None else half >= dropped
    return kept
