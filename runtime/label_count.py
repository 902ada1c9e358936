"""``num_items_in_batch``: the number of labels that a trainer divides the loss by, over several calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from autoptd.runtime.manifest import Manifest
from autoptd.runtime.rank import Rank
from autoptd.runtime.weighting import count_valid

NAME = "num_items_in_batch"


def weigh_items(manifest: Manifest, rank: Rank, batch: Mapping[str, Tensor], items: Any) -> Tensor:
    """What to multiply this call's loss by, a mean over its labels, where `items` of all calls are one step.

    `items` is a replica's number, or the same number of all replicas where the caller multiplies the loss by how many
    there are, to undo the mean that DDP takes: this is the labels of all replicas in this call over the sum of the
    replicas' `items`, and right for both. Every rank must call it. ValueError where the labels are not known.
    """
    labels = manifest.weighing_labels
    if labels is None:
        raise ValueError(
            f"{NAME} is given, but of no input of the program ({', '.join(i.name for i in manifest.inputs)}) is it "
            "known that the loss is the mean over its labels: leave it out, or let torch's cross_entropy be the loss"
        )
    own = torch.as_tensor(items, dtype=torch.float64, device=rank.device).reshape(())
    both = torch.stack([count_valid(labels, batch[labels.name]).sum(), own])
    summed = rank.data.all_reduce(both)
    return summed[0] / summed[1]
