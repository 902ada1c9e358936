"""The memory of a rank's gradients: flat buckets, the same in every step, from which the parameters' are lent."""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from autoptd.runtime.kernels.linear import SUM
from autoptd.runtime.kernels.precision import HALF, widen
from autoptd.runtime.optimizer.gradient_buckets import fill_buckets

# Where products add in float32 what they multiply in half precision. Tests add "cpu".
product_devices = {"cuda"}


@dataclass(eq=False)
class StageLeaves:
    """The leaves that the stages of one input shape compute with, by stage and name; `number` counts those made anew.

    The first step with them shows which parameters `arrived` with a gradient, and, by stage and mode, after which
    leaf of its last backward each bucket is complete, the `triggers`.
    """

    by_stage: Mapping[int, Mapping[str, Tensor]] = field(default_factory=dict)
    number: int = 0
    arrived: set[str] | None = None
    triggers: dict[Hashable, dict[str, list[int]]] = field(default_factory=dict)

    def of(self, name: str) -> list[Tensor]:
        """Return the trained leaves of a parameter, by stage, ascending."""
        own = [own[name] for _, own in sorted(self.by_stage.items()) if name in own]
        return [leaf for leaf in own if leaf.requires_grad]


class Bucket:
    """Sums of gradients that travel together, in a row of memory, `flat`; `views` are those of each parameter.

    Of parameters that an optimizer steps in a shard, `shard` is its position, and the row is laid out as that is.
    """

    def __init__(self, leaves: Mapping[str, Tensor], shard: int | None, parts: int) -> None:
        """Make memory for sums of the gradients of `leaves`, padded so that `parts` divides it."""
        self.shard = shard
        first, sizes = next(iter(leaves.values())), [leaf.numel() for leaf in leaves.values()]
        count = sum(sizes)
        self.flat = torch.zeros(count + -count % parts, dtype=widen(first.dtype), device=first.device)
        rows = zip(leaves.items(), self.flat[:count].split(sizes), strict=True)
        # As `data` each counts the writes into it alone.
        self.views = {name: row.view(leaf.shape).data for (name, leaf), row in rows}
        del rows
        self._uses = self._count_uses()

    def renew(self) -> bool:
        """Take other memory where other tensors are kept in this one; return whether there are."""
        if self._count_uses() <= self._uses:
            return False
        self.flat.set_(torch.empty_like(self.flat))
        for view in self.views.values():
            place = view.storage_offset(), view.shape, view.stride()
            view.set_(self.flat.untyped_storage(), *place)  # type: ignore[call-overload]
        return True

    def _count_uses(self) -> int:
        uses: int = torch._C._storage_Use_Count(self.flat.untyped_storage()._cdata)
        return uses


class GradientMemory:
    """The sums of gradients of a rank's trained parameters over the microbatches, of half precision in float32.

    `buckets` are by what completes them, a stage or the owners of tied parameters. The sums of a parameter are those of
    its uses in stages, ascending, of which the first is in a bucket. `moves` counts how often one was put elsewhere.
    """

    def __init__(self, buckets: Mapping[Hashable, Sequence[Bucket]], leaves: StageLeaves) -> None:
        self.buckets = buckets
        self.moves = 0
        self.sums = {
            name: [view, *(torch.zeros_like(view) for _ in leaves.of(name)[1:])]
            for bucket in self
            for name, view in bucket.views.items()
        }

    def __iter__(self) -> Iterator[Bucket]:
        return (bucket for own in self.buckets.values() for bucket in own)

    def attach(self, leaves: StageLeaves) -> None:
        """Let autograd and products add the gradients of `leaves` to their sums."""
        for name, sums in self.sums.items():
            for leaf, own in zip(leaves.of(name), sums, strict=True):
                if leaf.dtype not in HALF:
                    leaf.grad = own
                    continue
                leaf.register_post_accumulate_grad_hook(partial(_add, own))
                if leaf.device.type in product_devices:
                    setattr(leaf, SUM, own)

    def begin(self, lent: Iterable[Tensor]) -> None:
        """Begin a step; `lent` are the gradients that parameters have, which get memory of their own.

        Other tensors in the memory of a bucket keep it, and the bucket takes another.
        """
        own = {bucket.flat.data_ptr() for bucket in self}
        for gradient in lent:
            if gradient.untyped_storage().data_ptr() in own:
                gradient.set_(gradient.clone())  # type: ignore[call-overload]
        self.moves += sum(bucket.renew() for bucket in self)
        further = (sum for sums in self.sums.values() if len(sums) > 1 for sum in sums[1:])
        if written := [*(bucket.flat for bucket in self), *further]:
            torch._foreach_zero_(written)


def lay_out(
    leaves: StageLeaves,
    rows: Mapping[Hashable, Sequence[str]],
    shards: Sequence[Sequence[str]],
    late: Container[str],
    parts: int,
) -> GradientMemory:
    """Lay out memory for the gradients of `leaves`; the names in each of `rows` are complete together.

    A backward completes them from the last to the first; those in `late` come after it. The bucket of each of the
    `shards` can be divided into `parts`.
    """
    places = {name: index for index, names in enumerate(shards) for name in names}

    def divide(row: Sequence[str]) -> Iterator[Bucket]:
        found = {name: own[0] for name in reversed(row) if (own := leaves.of(name))}
        groups: list[tuple[int | None, Sequence[str]]] = [
            (index, shards[index])
            for index in dict.fromkeys(places[name] for name in found if name in places)
        ]
        whole = [name for name in found if name not in places]
        for names in ([n for n in whole if n not in late], [n for n in whole if n in late]):
            wide = [torch.empty(found[n].shape, dtype=widen(found[n].dtype), device="meta") for n in names]
            groups += ((None, [names[i] for i in bucket]) for bucket in fill_buckets(wide))
        for shard, names in sorted(groups, key=lambda group: any(name in late for name in group[1])):
            yield Bucket({name: found[name] for name in names}, shard, 1 if shard is None else parts)

    return GradientMemory({key: list(divide(row)) for key, row in rows.items()}, leaves)


def _add(own: Tensor, leaf: Tensor) -> None:
    """Add the gradient of `leaf`, which has come, to its `own` sum."""
    assert leaf.grad is not None
    own += leaf.grad
    leaf.grad = None
