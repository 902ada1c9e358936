"""Hashes of tensors' bits and places, for ranks to compare: one changed element always changes the hash."""

from collections.abc import Mapping

import torch
from torch import Tensor

# Odd, of random bits: the constants of splitmix64.
_STEP, _FIRST, _SECOND = (x - (1 << 64) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
BLOCK = 1 << 20  # elements hashed at once


def hash_batch(batch: Mapping[str, Tensor], device: torch.device) -> Tensor:
    """Return a hash of all tensors of `batch`, with their order: an int64 on `device`."""
    total = torch.zeros((), dtype=torch.int64, device=device)
    for tensor in batch.values():
        total = total * _FIRST + hash_words(read_words(tensor))
    return total


def read_words(tensor: Tensor) -> Tensor:
    """Return the bits of each element as an int64, flat."""
    flat = tensor.detach().contiguous().view(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    if flat.is_floating_point():
        flat = flat.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.itemsize])
    return flat.to(torch.int64)


def hash_words(words: Tensor) -> Tensor:
    """Return the sum of every element mixed with its position, modulo 2**64: an int64."""
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for begin in range(0, words.numel(), BLOCK):
        block = words[begin : begin + BLOCK]
        places = torch.arange(begin + 1, begin + block.numel() + 1, device=words.device)
        # Every operation is one to one in 64 bits, so an element of another value has another summand.
        mixed = places.mul_(_STEP).add_(block)
        mixed ^= (mixed >> 30) & 0x3FFFFFFFF
        mixed *= _FIRST
        mixed ^= (mixed >> 27) & 0x1FFFFFFFFF
        mixed *= _SECOND
        total += (mixed ^ ((mixed >> 31) & 0x1FFFFFFFF)).sum()
    return total
