"""The memory of a rank's gradients: flat buckets, the same in every step, from which the parameters' are lent."""

import time
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from itertools import count as counter

import torch
from torch import Tensor

from autoptd.runtime.comm.groups import Group
from autoptd.runtime.kernels.linear import SUM
from autoptd.runtime.kernels.operands import HALF, widen
from autoptd.runtime.optimizer.gradient_buckets import fill_buckets

# Where products add in float32 what they multiply in half precision. Tests add "cpu".
product_devices = {"cuda"}
PAUSES = (0.001, 0.01, 0.1)  # seconds in which threads of a collective let go of the memory that it summed
ALIGNED = 4  # elements between the beginnings of gradients: at least 16 bytes, for wide loads and stores
Completion = int | tuple[int, ...]  # of gradients: by a stage, or by the pipeline ranks that own a parameter
Complete = Mapping[Completion, Sequence[str]]  # names of parameters whose gradients are complete together


@dataclass(eq=False)
class StageLeaves:
    """The leaves that the stages of one input shape compute with, by stage and name; no others have their `number`.

    The first step with them shows which parameters `arrived` with a gradient.
    """

    by_stage: Mapping[int, dict[str, Tensor]] = field(default_factory=dict)
    number: int = field(default_factory=counter(1).__next__)
    arrived: set[str] | None = None

    def of(self, name: str) -> list[Tensor]:
        """Return the trained leaves of a parameter, by stage, ascending."""
        own = [own[name] for _, own in sorted(self.by_stage.items()) if name in own]
        return [leaf for leaf in own if leaf.requires_grad]


class Bucket:
    """Sums of gradients that travel together, in a row of memory, `flat`; `views` are those of each parameter.

    The ranks of `replicas` hold the same parameters, and add up theirs.

    Of parameters that an optimizer steps in a shard, `shard` is its position, and the row is laid out as that is.
    """

    def __init__(self, leaves: Mapping[str, Tensor], shard: int | None, replicas: Group) -> None:
        """Make memory for sums of the gradients of `leaves`, padded so that the replicas can divide a shard's."""
        self.shard, self.replicas = shard, replicas
        parts = 1 if shard is None else replicas.size
        first, step = next(iter(leaves.values())), ALIGNED if shard is None else 1
        self._shapes = {name: leaf.shape for name, leaf in leaves.items()}
        self._sizes = [-(-leaf.numel() // step) * step for leaf in leaves.values()]
        count = sum(self._sizes)
        self.flat = torch.zeros(count + -count % parts, dtype=widen(first.dtype), device=first.device)
        self.views = self._view(self.flat)
        self._uses, self._was_kept = self._count_uses(), False

    def _view(self, row: Tensor) -> dict[str, Tensor]:
        """Return the parameters' parts of a `row`. As ``data`` each counts the writes into it alone."""
        parts = zip(self._shapes.items(), row[: sum(self._sizes)].split(self._sizes), strict=True)
        return {name: part[: shape.numel()].view(shape).data for (name, shape), part in parts}

    def lend(self) -> Tensor:
        """Return the row for the parameters' gradients: a copy, if any was kept before."""
        return self.flat.clone() if self._was_kept else self.flat.data

    def read(self, row: Tensor, names: Iterable[str]) -> dict[str, Tensor]:
        """Return the gradients of `names` in a `row` that was lent."""
        views = self.views if row.data_ptr() == self.flat.data_ptr() else self._view(row)
        return {name: views[name].data for name in names}

    def is_kept(self) -> bool:
        """Return whether other tensors are in this memory, which was lent itself."""
        return not self._was_kept and self._count_uses() > self._uses

    def move(self) -> None:
        """Leave this memory to the tensors in it, and lend copies from now on."""
        self._was_kept = True
        memory = torch.empty_like(self.flat).untyped_storage()
        for x in (self.flat, *self.views.values()):
            x.set_(memory, x.storage_offset(), x.shape, x.stride())

    def _count_uses(self) -> int:
        uses: int = torch._C._storage_Use_Count(self.flat.untyped_storage()._cdata)
        return uses


class GradientMemory:
    """The sums of gradients of a rank's trained parameters over the microbatches, of half precision in float32.

    `buckets` are by what completes them, a stage or the owners of tied parameters. A parameter that several stages use
    has `further` sums for the later ones. `moves` counts how often a sum was put elsewhere.
    """

    def __init__(self, buckets: Mapping[Completion, Sequence[Bucket]], leaves: StageLeaves) -> None:
        self.buckets = buckets
        self.moves = 0
        views = chain.from_iterable(bucket.views.items() for bucket in self)
        self.further = {n: [torch.zeros_like(x) for _ in later] for n, x in views if (later := leaves.of(n)[1:])}

    def __iter__(self) -> Iterator[Bucket]:
        return (bucket for own in self.buckets.values() for bucket in own)

    def attach(self, leaves: StageLeaves) -> None:
        """Let autograd and products add the gradients of `leaves` to their sums."""
        for name, sums in chain.from_iterable(self.sums(bucket).items() for bucket in self):
            for leaf, own in zip(leaves.of(name), sums, strict=True):
                if leaf.dtype not in HALF:
                    leaf.grad = own
                    continue
                leaf.register_post_accumulate_grad_hook(partial(_add, own))
                if leaf.device.type in product_devices:
                    setattr(leaf, SUM, own)

    def sums(self, bucket: Bucket) -> dict[str, list[Tensor]]:
        """Return the sums of each parameter in `bucket`, by stage, ascending."""
        return {name: [view, *self.further.get(name, ())] for name, view in bucket.views.items()}

    def begin(self, lent: Iterable[Tensor]) -> None:
        """Begin a step; move `lent` gradients out of the buckets, and buckets out of memory that other tensors keep."""
        own = {bucket.flat.data_ptr() for bucket in self}
        for gradient in lent:
            if gradient.untyped_storage().data_ptr() in own:
                gradient.set_(gradient.clone())  # type: ignore[call-overload]
        kept = [bucket for bucket in self if bucket.is_kept()]
        for seconds in PAUSES if kept else ():
            time.sleep(seconds)
            kept = [bucket for bucket in kept if bucket.is_kept()]
        for bucket in kept:
            bucket.move()
        self.moves += len(kept)
        if written := [*(bucket.flat for bucket in self), *chain.from_iterable(self.further.values())]:
            torch._foreach_zero_(written)


def lay_out(
    leaves: StageLeaves,
    rows: Complete,
    shards: Sequence[Sequence[str]],
    late: Container[str],
    replicas: Mapping[str, Group],
) -> GradientMemory:
    """Lay out memory for the gradients of `leaves`, whose parameters are in `rows`.

    A backward completes them from the last to the first; those in `late` come after it. A bucket's parameters have the
    same `replicas`, which can divide the bucket of each of the `shards`.
    """
    places = {name: index for index, names in enumerate(shards) for name in names}

    def divide(row: Sequence[str]) -> Iterator[Bucket]:
        found = {name: own[0] for name in reversed(row) if (own := leaves.of(name))}
        groups = [shards[i] for i in dict.fromkeys(places[name] for name in found if name in places)]
        whole = [name for name in found if name not in places]
        wide = {n: torch.empty_like(found[n], dtype=widen(found[n].dtype), device="meta") for n in whole}
        groups += fill_buckets(wide, {n: (n in late, replicas[n], x.dtype) for n, x in wide.items()})
        for group in sorted(groups, key=lambda group: any(name in late for name in group)):
            shard = places.get(group[0])
            yield Bucket({name: found[name] for name in group}, shard, replicas[group[0]])

    return GradientMemory({key: list(divide(row)) for key, row in rows.items()}, leaves)


def _add(own: Tensor, leaf: Tensor) -> None:
    """Add the gradient of `leaf` to its `own` sum; None has come where products have added all of it themselves."""
    if leaf.grad is not None:
        own += leaf.grad
        leaf.grad = None
