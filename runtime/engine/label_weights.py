"""The weight of a microbatch's loss in the step's: its part of all valid labels, or 1/m."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from autoptd.runtime.comm.rank import Rank
from autoptd.runtime.program.manifest import Input, Manifest


def count_valid(labels: Input, values: Tensor) -> Tensor:
    """Count the valid ones among the label `values` of each microbatch: float64 [number of microbatches]."""
    dim = labels.batch_dim
    assert dim is not None
    assert labels.ignore_index is not None
    valid = torch.ne(values, labels.ignore_index)
    valid.narrow(-1, 0, labels.skipped).fill_(False)
    return torch.stack([part.sum() for part in valid.split(labels.shape[dim], dim)]).to(torch.float64)


def find_divisors(manifest: Manifest, rank: Rank, batch: Mapping[str, Tensor]) -> Tensor:
    """Return divisors of the microbatches' losses and gradients that make the replicas' mean the step's: float64 [m].

    Where the loss is the mean over labels that can be counted, the step's is the mean over all valid labels of all
    replicas: a microbatch without one is divided by infinity and counts nothing, and where the whole step has none
    all are nan. Elsewhere microbatches count alike, and each is divided by m. With equal counts both are the same
    bits. A collective of the data group.
    """
    labels = manifest.weighing_labels
    if labels is None:
        count = manifest.num_microbatches
        return torch.full((count,), float(count), dtype=torch.float64, device=rank.device)
    counts = count_valid(labels, batch[labels.name])
    total = rank.group("data").all_reduce(counts.sum())
    return total / (counts * rank.group("data").size)
