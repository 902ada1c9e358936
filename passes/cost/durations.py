"""The precision of a step, and the times of its works and transfers on the ranks of a cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, permutations
from math import ceil, prod

import torch

from autoptd.passes.cost.cluster import ITEM_BYTES, Cluster, Link
from autoptd.passes.cost.work import Work
from autoptd.passes.ir.program import Stage
from autoptd.runtime.program.mesh import Mesh

NANOSECONDS = 10**9
LEAST_BYTES = 2  # of an element in memory, whatever its products are computed in
DTYPES = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class Precision:
    """The `dtype` of a step, and its bytes for each byte of the program's own dtype (`scale`)."""

    dtype: str
    scale: float = 1.0

    @classmethod
    def of(cls, stages: Iterable[Stage], dtype: str | None = None) -> Precision:
        """Return the precision of `dtype`, by default the dtype of most elements of the program's parameters.

        Raises ValueError for a dtype that is unknown, or too narrow for weights and activations.
        """
        counts: Counter[str] = Counter()
        for parameter in (p for stage in stages for p in stage.parameters.values() if p.dtype in DTYPES):
            counts[DTYPES[parameter.dtype]] += prod(parameter.shape)
        own = max(counts, key=counts.__getitem__, default="fp32")
        wanted = own if dtype is None else dtype
        known = [name for name, size in ITEM_BYTES.items() if size >= LEAST_BYTES]
        if wanted not in known:
            raise ValueError(f"dtype={dtype!r}: expected one of {', '.join(known)}, to store weights in")
        return cls(wanted, ITEM_BYTES[wanted] / ITEM_BYTES[own])


@dataclass(frozen=True)
class Seconds:
    """Seconds of one direction: computing, and waiting for the collectives of the tensor group and of experts."""

    compute: float = 0.0
    tensor: float = 0.0

    @property
    def total(self) -> float:
        return self.compute + self.tensor

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(self.compute + other.compute, self.tensor + other.tensor)


@dataclass(frozen=True)
class Durations:
    """Times of works and transfers on the ranks of `mesh`, or of its `pipeline_rank`; equal works are timed once.

    Without `overlap` nothing is computed during all-reduces.
    """

    cluster: Cluster
    mesh: Mesh
    precision: Precision
    overlap: bool = True
    pipeline_rank: int | None = None
    _known: dict[Work, Seconds] = field(default_factory=dict, repr=False)

    def of_transfer(self, value: torch.Tensor, *, divided: bool) -> int:
        """Return the nanoseconds to send one tensor to the next stage, or its gradient back.

        Each tensor rank sends 1/t of an undivided tensor, which is all-gathered on arrival (SC21 §4.1).
        """
        size = value.nbytes * self.precision.scale
        seconds = self._next.send_seconds(size if divided else size / self.mesh.tensor)
        if not divided:
            seconds += self.cluster.all_gather_seconds(size, self.tensor_group)
        return ceil(seconds * NANOSECONDS)

    def seconds(self, work: Work) -> Seconds:
        """Return the seconds of one direction of one node: computing, and collectives that no overlapped work hides.

        A device of one multiprocessor, a core, sums and copies itself, so it overlaps nothing.
        """
        if work not in self._known:
            device, dtype, scale = self.cluster.device, self.precision.dtype, self.precision.scale
            exposed = self.cluster.all_reduce_seconds(work.reduced * scale, self.tensor_group)
            exposed += self.cluster.all_gather_seconds(work.gathered * scale, self.tensor_group)
            exposed += self._exchange_seconds(work.dispatched * scale)
            if work.overlapped is not None and self.overlap and device.multiprocessors > 1:
                exposed = max(0.0, exposed - device.seconds(work.overlapped, dtype, scale))
            self._known[work] = Seconds(device.seconds(work, dtype, scale), exposed)
        return self._known[work]

    @cached_property
    def tensor_group(self) -> Sequence[int]:
        """The slowest tensor group."""
        at = {} if self.pipeline_rank is None else {"pipeline": self.pipeline_rank}
        return self.cluster.slowest(self.mesh.groups("tensor", **at))

    def _exchange_seconds(self, count: float) -> float:
        """Return the seconds of an all-to-all of `count` bytes of each device among ranks that share experts."""
        if not count:
            return 0.0
        groups, cluster = self.mesh.groups("exchange"), self.cluster
        group = cluster.slowest(groups)
        near, number = min(cluster.nodes(group).values()), len(group)
        across = cluster.slowest_link(chain.from_iterable(permutations(ranks, 2) for ranks in groups))
        inside = cluster.node.send_seconds(count * (near - 1) / number)
        return across.send_seconds(count * (number - near) / number) + inside

    @cached_property
    def _next(self) -> Link:
        """The slowest link from a pipeline rank to the next."""
        rings = self.mesh.groups("pipeline")
        pairs = zip(*(zip(ring, (*ring[1:], ring[0]), strict=True) for ring in rings), strict=True)
        return min(map(self.cluster.slowest_link, pairs), key=lambda link: link.message_rate)
