"""Fill buckets of gradients and sum each over a group of ranks, and share the loss; `gradient_sums` says when."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, reduce
from typing import TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from autoptd.runtime.comm.groups import Group
from autoptd.runtime.comm.rank import Rank

BUCKET_BYTES = 25 * 2**20
K = TypeVar("K")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def sum_over(group: Group, tensors: Sequence[Tensor]) -> None:
    """Sum `tensors` over `group` in place, in buckets of one dtype and about 25 MB, in their order."""
    if group.size == 1:
        return
    for bucket in fill_buckets(dict(enumerate(tensors))):
        for i, summed in zip(bucket, group.post_all_reduce([tensors[i] for i in bucket]).wait(), strict=True):
            tensors[i].copy_(summed)  # nothing, where it lies there


def share_loss(rank: Rank, losses: Sequence[Tensor], divisors: Tensor) -> Tensor:
    """Give every rank the step's loss: all replicas' microbatch `losses`, which only the last pipeline rank has.

    `divisors` [m] are those of `find_divisors`: a loss divided by infinity counts nothing, even a nan. Returns
    float64 [2]: the loss, the same bits everywhere, and the index in DTYPES of the losses' own dtype.
    """
    pair = torch.zeros(2, dtype=torch.float64, device=rank.device)
    if losses:
        # As a plain loop adds them up: each divided first, in ascending order.
        shares = torch.stack(list(losses)) / divisors.to(losses[0].dtype)
        total = reduce(torch.add, shares.masked_fill(divisors.isinf(), 0))
        pair[0] = rank.group("data").all_reduce(total.to(torch.float64)) / rank.group("data").size
        pair[1:].fill_(DTYPES.index(total.dtype))  # set as an element it would wait for the GPU
    return rank.group("pipeline").broadcast(pair, rank.group("pipeline").size - 1)


def fill_buckets(tensors: Mapping[K, Tensor], kinds: Mapping[K, object] | None = None) -> Iterator[list[K]]:
    """Yield keys of `tensors` in runs of up to BUCKET_BYTES and of one kind: of one of `kinds`, or of one dtype."""
    kinds = kinds or {key: tensor.dtype for key, tensor in tensors.items()}
    for kind in dict.fromkeys(map(kinds.__getitem__, tensors)):
        bucket: list[K] = []
        filled = 0
        for key in (key for key in tensors if kinds[key] == kind):
            if bucket and filled + tensors[key].nbytes > BUCKET_BYTES:
                yield bucket
                bucket, filled = [], 0
            bucket.append(key)
            filled += tensors[key].nbytes
        yield bucket


@dataclass(frozen=True)
class BucketWatch:
    """A watch over `buckets` of names of a stage's `leaves` in its last backward; `post` sends one, by its number."""

    leaves: Mapping[str, Tensor]
    buckets: Sequence[Iterable[str]]
    post: Callable[[int], None]

    @contextmanager
    def report(self, complete: Callable[[int], None]) -> Iterator[None]:
        """Call `complete` with the number of each bucket, ascending, when the backward inside has completed it."""
        waiting = [set(names) for names in self.buckets]
        numbers = iter(range(len(waiting)))

        def pass_leaf(own: set[str], name: str, *_: object) -> None:
            own.discard(name)
            while waiting and not waiting[0]:
                waiting.pop(0)
                complete(next(numbers))

        # A node that is reached without a gradient has been added to by a product.
        hooks = ((name, partial(pass_leaf, own, name)) for own in waiting for name in tuple(own))
        handles = [get_gradient_edge(self.leaves[name]).node.register_hook(hook) for name, hook in hooks]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        for number in numbers:  # with leaves that the loss does not reach
            complete(number)
