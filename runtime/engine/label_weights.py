"""The weight of a microbatch's loss in the step's, and of a call's in that of several calls: its part of the labels."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from autoptd.runtime.comm.rank import Rank
from autoptd.runtime.program.manifest import Input, Manifest

ITEMS = "num_items_in_batch"  # the number of labels that a trainer divides the loss by, over several calls


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
    all are nan. Elsewhere each is divided by m, the same bits for equal counts. A collective of the data group.
    """
    labels = manifest.weighing_labels
    if labels is None:
        count = manifest.num_microbatches
        return torch.full((count,), float(count), dtype=torch.float64, device=rank.device)
    counts = count_valid(labels, batch[labels.name])
    return rank.group("data").all_reduce(counts.sum()) / (counts * rank.group("data").size)


def read_items(manifest: Manifest, items: Any, device: torch.device) -> Tensor:
    """Return `items` as a number, before the step that it is of; ValueError where it cannot be used."""
    if manifest.weighing_labels is None:
        raise ValueError(
            f"{ITEMS} is given, but the loss is not known to be the mean over the labels of an input of the program "
            f"({', '.join(i.name for i in manifest.inputs)}): leave it out, or let torch's cross_entropy be the loss"
        )
    if isinstance(items, int | float):  # filled in: a copy of it would wait for the GPU
        return torch.full((), items, dtype=torch.float64, device=device)
    number = torch.as_tensor(items, dtype=torch.float64, device=device)
    if number.numel() != 1:
        raise ValueError(f"{ITEMS} is {items}, expected one number, the count of all labels of the step")
    return number.reshape(())


def weigh_items(manifest: Manifest, rank: Rank, batch: Mapping[str, Tensor], items: Tensor) -> Tensor:
    """Return the factor of this call's loss, a mean over its labels, where `items` of all calls are one step.

    `items` is a replica's number, or the same number of all replicas where the caller multiplies the loss by how many
    there are, to undo the mean that DDP takes: this is the labels of all replicas in this call over the sum of the
    replicas' `items`, and right for both. Every rank must call it.
    """
    labels = manifest.weighing_labels
    assert labels is not None
    summed = rank.group("data").all_reduce(torch.stack([count_valid(labels, batch[labels.name]).sum(), items]))
    return summed[0] / summed[1]
