"""Whether all ranks were given the same weights: compared at bind, by a few elements of each tensor.

Ranks that were not would train in silence: replicas, tensor ranks and the owners of a tied parameter would keep parts
of different models.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from autoptd.runtime.agreement import hash_words, read_words
from autoptd.runtime.communicator import Group
from autoptd.runtime.connection import Connection
from autoptd.runtime.manifest import Manifest
from autoptd.runtime.weights import Stored, all_names

SAMPLED = 256  # elements of a tensor, evenly over it
_UNREAD = torch.iinfo(torch.int64).min  # of a tensor that is in a file, and is not read for this
_DRAWN = 0  # of one without values, which every rank draws from the program's seed


def compare_weights(manifest: Manifest, connection: Connection, tensors: Stored) -> None:
    """Raise RuntimeError on every rank, naming the first tensor, where ranks were given different whole `tensors`.

    Every rank must call it. What is in memory is compared, and what has values with what has none; a tensor in a file
    agrees with any. On a GPU this waits for what was launched before.
    """
    world, device = connection.world, connection.rank.device
    names = [n for n, p in manifest.parameters.items() if p.kind != "constant" and manifest.homes(n)]
    if world.size == 1 or not names:
        return
    own = torch.stack([_fingerprint(manifest, tensors, name).to(device) for name in names])
    complement = torch.where(own == _UNREAD, own, ~own)
    # The maxima of h and of ~h are complements where all ranks have the same h.
    largest, smallest = world.all_reduce(torch.stack([own, complement]), "max")
    differing = ((largest != ~smallest) & (smallest != _UNREAD)).nonzero()
    if len(differing):
        index = int(differing[0])
        raise RuntimeError(_describe_difference(world, names[index], own[index]))


def _fingerprint(manifest: Manifest, tensors: Stored, name: str) -> Tensor:
    """A hash of some elements of the tensor stored as `name`, in the program's dtype: an int64 on its device."""
    known = next((known for known in all_names(manifest, name) if known in tensors), None)
    if known is None or tensors.is_meta(known):
        return torch.tensor(_DRAWN)
    whole = tensors.in_memory(known)
    if whole is None:
        return torch.tensor(_UNREAD)
    flat = whole.detach().reshape(-1)
    count = min(len(flat), SAMPLED)
    # The last one too: a step that divides the rows would sample one column.
    places = torch.arange(count, device=flat.device) * (len(flat) - 1) // max(count - 1, 1)
    return hash_words(read_words(flat[places].to(manifest.parameters[name].dtype)))


def _describe_difference(world: Group, name: str, own: Tensor) -> str:
    """Which ranks have other values of the tensor `name` than the rest. Every rank must call it."""
    table = [int(fingerprint) for fingerprint in world.all_gather(own.view(1))]
    read = {rank: fingerprint for rank, fingerprint in enumerate(table) if fingerprint != _UNREAD}
    common = Counter(read.values()).most_common(1)[0][0]
    others = [rank for rank, fingerprint in read.items() if fingerprint != common]
    like = next(rank for rank, fingerprint in read.items() if fingerprint == common)
    return (
        f"ranks were given different weights: {name} has other values on rank {others[0]} than on rank {like}; ranks "
        f"{others} of {world.size} differ from rank {like}. Each rank keeps its part of one model, so give all the "
        "same: call torch.manual_seed before the model is built, load one checkpoint on every rank, or "
        "bind(weights=folder)"
    )
