"""Values of a dimension of classes that is divided over the tensor ranks, beside its `logsumexp` and loss.

Each rank has the classes from index * ceil(V / t) on, of `vocabulary` = V in all: what is past V is padding.
"""

import torch
from torch import Tensor
from torch.nn import functional

from autoptd.runtime.comm.rank import Rank
from autoptd.runtime.kernels.partial_sums import sum_over_ranks
from autoptd.runtime.kernels.vocabulary import localize, own_columns, reduce_losses


def pick(rank: Rank, x: Tensor, index: Tensor, vocabulary: int, dim: int = -1) -> Tensor:
    """Compute torch's ``gather`` of a divided dimension, equal on all tensor ranks; illegal numbers are its error."""
    local, elsewhere = localize(rank, x.shape[dim], index, vocabulary)
    return sum_over_ranks(rank, x.gather(dim, local).masked_fill(elsewhere, 0))


def maximum(rank: Rank, x: Tensor, dim: int, vocabulary: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """Compute torch's ``max`` over a divided dimension and its first index, equal on all tensor ranks."""
    start, own = own_columns(rank, x.shape[dim], vocabulary)
    largest, local = clear_padding(rank, x.detach(), dim, vocabulary, -torch.inf).max(dim, keepdim=True)
    everywhere = rank.all_reduce(largest.clone(), "max")
    here = ((largest == everywhere) | largest.isnan()) & (own > 0)
    index = -rank.all_reduce((-local - start).masked_fill(~here, -vocabulary), "max")
    values = pick(rank, x, index, vocabulary, dim)
    return (values, index) if keepdim else (values.squeeze(dim), index.squeeze(dim))


def one_hot(rank: Rank, index: Tensor, vocabulary: int) -> Tensor:
    """Compute this rank's classes of torch's ``one_hot``; illegal numbers are its error."""
    width = -(-vocabulary // rank.group("tensor").size)
    local, elsewhere = localize(rank, width, index, vocabulary)
    return functional.one_hot(local + width * elsewhere, width + 1)[..., :width]


def nll_loss(
    rank: Rank,
    scores: Tensor,
    target: Tensor,
    vocabulary: int,
    ignore_index: int = -100,
    reduction: str = "mean",
    weight: Tensor | None = None,
) -> Tensor:
    """Compute torch's ``nll_loss`` of divided `scores` [N, ceil(V / t)] and `target` [N]."""
    kept = target != ignore_index
    label = target.masked_fill(~kept, 0)
    losses = -pick(rank, scores, label[:, None], vocabulary).squeeze(1)
    counts = None if weight is None else weight[label]
    return reduce_losses(losses if counts is None else losses * counts, kept, reduction, counts)


def clear_padding(rank: Rank, x: Tensor, dim: int, vocabulary: int, value: float = 0) -> Tensor:
    """Fill the padding of a divided dimension with `value`; whatever its gradient would be, it is zero."""
    _, own = own_columns(rank, x.shape[dim], vocabulary)
    if own == x.shape[dim]:
        return x
    padding = torch.arange(x.shape[dim], device=x.device) >= own
    return x.movedim(dim, -1).masked_fill(padding, value).movedim(-1, dim)
