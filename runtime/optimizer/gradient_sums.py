"""Sum one step's gradients over microbatches, stages, ranks and replicas, each as soon as it is complete."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autoptd.runtime.comm.connection import Connection
from autoptd.runtime.comm.groups import Group, Posted
from autoptd.runtime.comm.timings import Measured
from autoptd.runtime.kernels.linear import SUM
from autoptd.runtime.kernels.precision import HALF
from autoptd.runtime.optimizer.gradient_buckets import fill_buckets, sum_over
from autoptd.runtime.optimizer.zero1 import FlatShard
from autoptd.runtime.program.manifest import Manifest
from autoptd.runtime.program.schedule import Action, last_gradients

# Where products add in float32 what they multiply in half precision. Tests add "cpu".
product_devices = {"cuda"}
Leaves = Mapping[int, Mapping[str, Tensor]]


@dataclass(frozen=True)
class Completion:
    """The times when a rank's gradients are complete: `after` a stage's last backward, or `late`, after the schedule.

    Late are the parameters that other pipeline ranks own too, by the ranks.
    """

    after: Mapping[int, tuple[str, ...]]
    late: Mapping[tuple[int, ...], tuple[str, ...]]

    @classmethod
    def of(cls, manifest: Manifest, pipeline_rank: int, actions: Sequence[Action]) -> Completion:
        ends = last_gradients(actions)
        after: dict[int, tuple[str, ...]] = {}
        late: dict[tuple[int, ...], tuple[str, ...]] = {}
        for name in (name for name, p in manifest.parameters.items() if p.kind == "parameter"):
            owned = [s.index for s in manifest.stages[pipeline_rank :: manifest.mesh.pipeline]]
            stages = [index for index in owned if name in manifest.stages[index].parameters]
            if len(owners := manifest.owners(name)) > 1 and stages:
                late[owners] = (*late.get(owners, ()), name)
            elif stages:
                stage = max(stages, key=lambda stage: ends.get(stage, -1))
                after[stage] = (*after.get(stage, ()), name)
        return cls(after, dict(sorted(late.items())))

    @property
    def rows(self) -> tuple[tuple[str, ...], ...]:
        """The parameters in groups that are complete together."""
        return (*self.after.values(), *self.late.values())


class Memory(NamedTuple):
    """The memory of a step: numbers of the leaves that it read and of the sums that it wrote, counted anew."""

    leaves: int
    sums: int


class WideSum:
    """The float32 sum of a half-precision leaf's gradients over the microbatches; the leaf keeps none."""

    def __init__(self, leaf: Tensor) -> None:
        self.sum: Tensor | None = None
        leaf.register_post_accumulate_grad_hook(self._add)
        if leaf.device.type in product_devices:
            setattr(leaf, SUM, self)

    def add_product(self, left: Tensor, right: Tensor) -> None:
        """Add ``left @ right``, in float32."""
        if self.sum is None:
            self.sum = torch.mm(left, right, out_dtype=torch.float32)
        else:
            torch.addmm(self.sum, left, right, out_dtype=torch.float32, out=self.sum)

    def _add(self, leaf: Tensor) -> None:
        if leaf.grad is None:
            return  # a product has added it
        if self.sum is None:
            self.sum = leaf.grad.to(torch.float32)
        else:
            self.sum += leaf.grad
        leaf.grad = None


class LeafSums:
    """The sums over microbatches of the gradients of `leaves`, each by its leaf.

    Where they `last`, they are in the same memory in every step, for CUDA graphs to add to: zeroed at once when a step
    begins, and lent to the parameters as their gradients when it ends. `memory` counts the memories that there were.
    """

    def __init__(self, leaves: Iterable[Tensor], lasts: bool) -> None:
        self._leaves = tuple(leaves)
        self._lasts = lasts
        self._wide = {leaf: WideSum(leaf) for leaf in self._leaves if leaf.dtype in HALF}
        self._lasting: dict[Tensor, Tensor] = {}  # of the leaves that have had a gradient
        self.memory = 0

    def begin(self, lent: Iterable[Tensor]) -> None:
        """Begin a step; `lent` are the gradients that parameters have, which get memory of their own.

        Other tensors in the memory of a sum keep it, and the sum is put elsewhere.
        """
        for leaf in self._leaves:
            leaf.grad = None
        for wide in self._wide.values():
            wide.sum = None
        own = {x.untyped_storage().data_ptr() for x in self._lasting.values()}
        for gradient in lent if own else ():
            if gradient.untyped_storage().data_ptr() in own:
                gradient.set_(gradient.clone())  # type: ignore[call-overload]
        for leaf, found in self._lasting.items():
            # Two have it: the tensor, and the storage that is asked here.
            if torch._C._storage_Use_Count(found.untyped_storage()._cdata) > 2:
                self._lasting[leaf] = torch.empty_like(found)
                self.memory += 1
            self._put(leaf, self._lasting[leaf])
        if self._lasting:
            torch._foreach_zero_(list(self._lasting.values()))

    def take(self, leaf: Tensor) -> Tensor | None:
        """Hand over the sum of a `leaf`; None where no gradient has come."""
        found = self._wide[leaf].sum if leaf in self._wide else leaf.grad
        self._put(leaf, None)
        if found is None:
            return None
        if self._lasts and leaf not in self._lasting:
            self._lasting[leaf] = torch.empty_like(found)
            self.memory += 1
        # Of a leaf that is read conjugated autograd leaves a view which is so: that can be neither sent nor divided.
        return found.detach().resolve_conj().resolve_neg()

    def _put(self, leaf: Tensor, memory: Tensor | None) -> None:
        if leaf in self._wide:
            self._wide[leaf].sum = memory
        else:
            leaf.grad = memory


class GradientSums:
    """A step's gradients on their way from the `leaves` of this rank's stages to the optimizer.

    Summed, in this order: over the microbatches, in float32 where the leaf is in half precision; over this rank's
    stages, ascending; over the tensor ranks where each has only a part of the sum; over the replicas, divided by their
    number; over the pipeline ranks that own a tied parameter, last, so that all have the same bits. The sum
    over the replicas runs while later backwards do. A sum that belongs to one of `shards` is kept only as far as this
    replica steps it.
    """

    def __init__(
        self,
        manifest: Manifest,
        connection: Connection,
        completion: Completion,
        shards: Sequence[FlatShard],
        measured: Measured,
        lasts: bool = False,
    ) -> None:
        self._manifest = manifest
        self._connection = connection
        self._completion = completion
        self._shards = shards
        self._leaves: Leaves = {}
        self._sums = LeafSums((), lasts)
        self._lasts = lasts
        self._read = 0
        self._measured = measured
        self._begin: Any = None
        self._posted: list[tuple[Posted[list[Tensor]], Group | None, Sequence[str | int]]] = []
        self._summed: dict[str | int, Tensor] = {}

    def follow(self, leaves: Leaves) -> None:
        """Take over the `leaves` of the stages, by stage and name, unless they are known."""
        if leaves is not self._leaves:
            self._leaves = leaves
            self._read += 1
            trained = (leaf for own in leaves.values() for leaf in own.values() if leaf.requires_grad)
            self._sums = LeafSums(trained, self._lasts)

    @property
    def memory(self) -> Memory | None:
        """The memory that graphs of the next step read and write; None where there are none."""
        return Memory(self._read, self._sums.memory) if self._lasts else None

    def start(self, lent: Iterable[Tensor]) -> None:
        """Begin a step with the leaves; see `LeafSums.begin`."""
        self._begin = None
        self._posted.clear()
        self._summed = {}
        self._sums.begin(lent)

    def end_stage(self, stage: int) -> None:
        """Post the sums that are complete after the last backward of `stage`."""
        self._post(self._collect(self._completion.after.get(stage, ())))

    def finish(self) -> None:
        """Post the sums that are left, and wait for all."""
        self._begin = self._begin or self._measured.stopwatch.mark()
        for owners, names in self._completion.late.items():
            self._post(self._collect(names), self._connection.tied[owners])
        replicas = self._connection.rank.group("data").size
        while self._posted:
            posted, group, keys = self._posted.pop(0)  # with the tensors sent: the bucket, or a copy of it
            sums = posted.wait()
            if replicas > 1:
                torch._foreach_div_(sums, replicas)
            if group is not None:
                sum_over(group, sums)
            self._summed.update(zip(keys, sums, strict=True))
        self._measured.add("data", self._begin)

    def gradients(self) -> list[Tensor]:
        """Return this rank's finished sums."""
        return list(self._summed.values())

    def clear(self) -> None:
        """Leave this step's gradients out."""
        self._summed = {}

    def take(self, keys: Sequence[str | int]) -> list[Tensor | None]:
        """Hand over the gradients of parameters, by name, and of shards, by their position."""
        summed, self._summed = self._summed, {}
        return list(map(summed.get, keys))

    def _collect(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return this rank's gradients of `names`, summed over its stages and over partial sums of tensor ranks."""
        found = {}
        stages = [own for _, own in sorted(self._leaves.items())]
        for name in names:
            leaves = [own[name] for own in stages if name in own]
            sums = [part for leaf in leaves if (part := self._sums.take(leaf)) is not None]
            if sums:
                found[name] = sums[0]
                for part in sums[1:]:
                    found[name] += part
            elif leaves and leaves[0].requires_grad and len(self._manifest.owners(name)) > 1:
                # Its other owners may have one and sum with this.
                dtype = torch.float32 if leaves[0].dtype in HALF else leaves[0].dtype
                found[name] = torch.zeros_like(leaves[0], dtype=dtype)
        self._sum_partial(found)
        return found

    def _sum_partial(self, gradients: Mapping[str, Tensor]) -> None:
        tensor = self._connection.rank.group("tensor")
        if tensor.size == 1:
            return
        partial = [
            rows
            for name, gradient in gradients.items()
            if (on_tensor := self._manifest.parameters[name].placement["tensor"]).partial_gradient
            for rows in on_tensor.split(gradient, tensor.size, divided=False)
        ]
        sums = list(partial)
        sum_over(tensor, sums)
        for rows, summed in zip(partial, sums, strict=True):
            if summed is not rows:
                rows.copy_(summed)

    def _post(self, gradients: dict[str, Tensor], owners: Group | None = None) -> None:
        """Begin the sums of `gradients` over the replicas, bucket by bucket; take each bucket's out of the mapping.

        Arrived sums are added up over their `owners`.
        """
        data = self._connection.rank.group("data")
        if gradients and self._begin is None:
            self._begin = self._measured.stopwatch.mark()
        for index, shard in enumerate(self._shards):
            if any(name in gradients for name in shard.names):
                flat = shard.flatten(gradients)
                for name in shard.names:
                    del gradients[name]  # a second copy of all would not fit
                self._posted.append((data.post_reduce_scatter(flat), owners, [index]))
                del flat  # gloo has a copy
        names = list(gradients)
        if data.size == 1:
            tensors = list(gradients.values())
            if owners is not None:
                sum_over(owners, tensors)
            self._summed.update(zip(names, tensors, strict=True))
            return
        for bucket in list(fill_buckets(list(gradients.values()))):
            own = {names[i]: gradients.pop(names[i]) for i in bucket}
            self._posted.append((data.post_all_reduce(list(own.values())), owners, list(own)))
