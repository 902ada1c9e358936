"""``num_items_in_batch``: the number of labels that a trainer divides the loss by, over several calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from autoptd.runtime.comm.rank import Rank
from autoptd.runtime.engine.label_weights import count_valid
from autoptd.runtime.program.manifest import Manifest

NAME = "num_items_in_batch"


def read_items(manifest: Manifest, items: Any, device: torch.device) -> Tensor:
    """Return `items` as a number, before the step that it is of; ValueError where it cannot be used."""
    if manifest.weighing_labels is None:
        raise ValueError(
            f"{NAME} is given, but the loss is not known to be the mean over the labels of an input of the program "
            f"({', '.join(i.name for i in manifest.inputs)}): leave it out, or let torch's cross_entropy be the loss"
        )
    if isinstance(items, int | float):  # filled in: a copy of it would wait for the GPU
        return torch.full((), items, dtype=torch.float64, device=device)
    number = torch.as_tensor(items, dtype=torch.float64, device=device)
    if number.numel() != 1:
        raise ValueError(f"{NAME} is {items}, expected one number, the count of all labels of the step")
    return number.reshape(())


def weigh_items(manifest: Manifest, rank: Rank, batch: Mapping[str, Tensor], items: Tensor) -> Tensor:
    """Return the factor of this call's loss, a mean over its labels, where `items` of all calls are one step.

    `items` is a replica's number, or the same number of all replicas where the caller multiplies the loss by how many
    there are, to undo the mean that DDP takes: this is the labels of all replicas in this call over the sum of the
    replicas' `items`, and right for both. Every rank must call it.
    """
    labels = manifest.weighing_labels
    assert labels is not None
    summed = rank.group("data").all_reduce(
        torch.stack([count_valid(labels, batch[labels.name]).sum(), items])
    )
    return summed[0] / summed[1]
