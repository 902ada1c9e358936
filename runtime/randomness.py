"""Dropout masks as a pure function of what an element is, never of where it is computed.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11) in plain torch. One counter
gives four 32-bit words, one per element:

- key: the seed's low and high word;
- counter word 0: block = element // 4, its low 32 bits, where element is the row-major index within ONE
  sample's whole (undivided) tensor, the batch dimension left out;
- counter word 1: the operator's number, and the block's higher bits from bit 24 on;
- counter words 2 and 3: the global sample index, and the number of the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

WORD = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
OPERATOR_BITS = 24
ROUNDS = 10

# Counters worked on at once: on a CPU few enough to stay in its cache.
CPU_CHUNK = 1 << 14
DEVICE_CHUNK = 1 << 24


@dataclass
class Randomness:
    """Where the training stands: all that a dropout mask depends on beside its operator and element.

    `sample` is the global index of the current microbatch's first row: data_rank * b * m + microbatch * b.
    `call` counts the training steps and goes into checkpoints.
    """

    seed: int = 0
    call: int = 0
    sample: int = 0
    training: bool = True


def philox(counter: Sequence[Tensor], key: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four random words per counter: int64 tensors in [0, 2**32), broadcast against each other."""
    a, b, c, d = counter
    for turn in range(ROUNDS):
        keys = [(word + turn * step) & WORD for word, step in zip(key, KEY_STEPS, strict=True)]
        # A 64-bit product may wrap to a negative int64, but its bits are right. The low halves (b, d) keep
        # what stands above bit 31: it is masked away before they are multiplied.
        low, high = a * MULTIPLIERS[0], c * MULTIPLIERS[1]
        a, b, c, d = _mix(high, b, keys[0]), high, _mix(low, d, keys[1]), low
    return a, b & WORD, c, d & WORD


def _mix(product: Tensor, word: Tensor, key: int) -> Tensor:
    mixed = (product >> 32) ^ word
    return mixed.bitwise_xor_(key).bitwise_and_(WORD)


def keep_mask(
    randomness: Randomness,
    p: float,
    operator: int,
    shape: Sequence[int],
    device: torch.device,
    *,
    sample: int | None = 0,
    divided: int | None = None,
    size: int = 1,
    index: int = 0,
) -> Tensor:
    """Which elements a dropout with probability `p` keeps: a bool tensor of this rank's `shape`.

    An element is kept when its word is at least p * 2**32. `sample` is the batch dimension (None: all samples
    share the mask of sample 0); `divided` the dimension of which `shape` holds part `index` of `size` equal,
    contiguous parts.
    """
    if not 0 <= operator < 1 << OPERATOR_BITS:
        raise ValueError(f"operator number {operator} is outside 0 to {(1 << OPERATOR_BITS) - 1}")
    if 0 in shape:
        return torch.empty(tuple(shape), dtype=torch.bool, device=device)
    batch = None if sample is None else sample % len(shape)
    dims = [dim for dim in range(len(shape)) if dim != batch]
    local = [shape[dim] for dim in dims]
    # This rank's elements of one sample are runs of equal length, one for each index before the divided dim.
    before = 0 if divided is None or size == 1 else dims.index(divided % len(shape))
    run = prod(local[before:])
    whole = run if divided is None else run * size
    starts = range(index * run if whole > run else 0, prod(local[:before]) * whole, whole)
    if batch is None:
        samples = torch.zeros(1, dtype=torch.int64, device=device)
    else:
        samples = torch.arange(randomness.sample, randomness.sample + shape[batch], device=device)
    kept = _keep_runs(randomness, round(p * (1 << 32)), operator, samples, starts, run)
    kept = kept.reshape(len(samples), *local)
    return kept[0] if batch is None else kept.movedim(0, batch)


def _keep_runs(
    randomness: Randomness, threshold: int, operator: int, samples: Tensor, starts: range, run: int
) -> Tensor:
    """Masks of the `run` elements from each of `starts` on, for every sample: bool [samples, starts, run]."""
    device = samples.device
    first = torch.tensor(starts, device=device)[:, None]
    aligned = all(start % 4 == 0 for start in (starts[0], starts.step if len(starts) > 1 else 0))
    # A run that starts inside a block reaches into one more.
    blocks_per_run = (run + 3) // 4 if aligned else (run + 2) // 4 + 1
    blocks = (first // 4 + torch.arange(blocks_per_run, device=device)).view(1, -1)
    kept = torch.empty((len(samples), blocks.shape[1], 4), dtype=torch.bool, device=device)
    chunk = CPU_CHUNK if device.type == "cpu" else DEVICE_CHUNK
    columns = min(blocks.shape[1], chunk)
    rows = max(1, chunk // columns)
    key = (randomness.seed & WORD, randomness.seed >> 32 & WORD)
    call = torch.full((1, 1), randomness.call & WORD, device=device)
    for row in range(0, len(samples), rows):
        sample = samples[row : row + rows, None] & WORD
        for column in range(0, blocks.shape[1], columns):
            block = blocks[:, column : column + columns]
            counter = (block & WORD, (block >> 32 << OPERATOR_BITS) | operator, sample, call)
            for number, word in enumerate(philox(counter, key)):
                torch.ge(word, threshold, out=kept[row : row + rows, column : column + columns, number])
    kept = kept.view(len(samples), len(starts), blocks_per_run * 4)
    if aligned:
        return kept[..., :run]
    place = first % 4 + torch.arange(run, device=device)
    return kept.gather(2, place.expand(len(samples), -1, -1))
