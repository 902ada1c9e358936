"""The weights of the pipeline cut: nanoseconds of operators and of boundary values on a cluster."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from math import ceil, prod

import torch
from torch import fx

from autoptd.passes.cost.cluster import ITEM_BYTES, Cluster
from autoptd.passes.cost.work import Work, backward_work, forward_work
from autoptd.passes.ir.program import Stage, tensor_bytes
from autoptd.runtime.program.mesh import Mesh

NANOSECONDS = 10**9
LEAST_BYTES = 2  # of an element in memory, whatever its products are computed in
DTYPES: Mapping[torch.dtype, str] = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}


@dataclass(frozen=True)
class Precision:
    """The `dtype` of a step, and its bytes for each byte of the program's own dtype (`scale`)."""

    dtype: str
    scale: float = 1.0

    @classmethod
    def of(cls, stages: Iterable[Stage], dtype: str | None = None) -> Precision:
        """Return the precision of `dtype`, by default that of most elements of the program's parameters.

        Raises ValueError for a dtype that is unknown, or too narrow for weights and activations.
        """
        counts: dict[torch.dtype, int] = {}
        for stage in stages:
            for parameter in stage.parameters.values():
                if parameter.dtype in DTYPES:
                    counts[parameter.dtype] = counts.get(parameter.dtype, 0) + prod(parameter.shape)
        own = DTYPES[max(counts, key=counts.__getitem__)] if counts else "fp32"
        wanted = own if dtype is None else dtype
        known = [name for name, size in ITEM_BYTES.items() if size >= LEAST_BYTES]
        if wanted not in known:
            narrow = wanted in [*ITEM_BYTES]  # a list: what the user gave may have no hash
            why = "its weights and activations would not be stored in it; " if narrow else ""
            raise ValueError(f"dtype={dtype!r}: {why}expected one of {', '.join(known)}")
        return cls(wanted, ITEM_BYTES[wanted] / ITEM_BYTES[own])


@dataclass(frozen=True)
class Durations:
    """Times of nodes and transfers on the ranks of `mesh`, in whole nanoseconds; equal works are timed once."""

    cluster: Cluster
    mesh: Mesh
    precision: Precision
    _known: dict[Work, float] = field(default_factory=dict, repr=False)

    def of_forward(self, node: fx.Node) -> int:
        """Return the time of a node's forward of one microbatch."""
        return self._of_work(forward_work(node))

    def of_backward(self, node: fx.Node, trained: Container[fx.Node] | None = None) -> int:
        """Return the time of a node's backward of one microbatch; `trained` as in `backward_work`."""
        return self._of_work(backward_work(node, trained))

    def of_transfer(self, value: torch.Tensor, *, divided: bool) -> int:
        """Return the time to send one tensor to the next stage, or its gradient back.

        Each tensor rank sends 1/t of an undivided tensor, which is all-gathered on arrival (SC21 §4.1).
        """
        size = tensor_bytes(value) * self.precision.scale
        share = size if divided else size / self.mesh.tensor
        here, there = self._neighbours
        seconds = self.cluster.send_seconds(share, here, there, senders=self.mesh.tensor)
        if not divided:
            seconds += self.cluster.all_gather_seconds(size, self._tensor_group)
        return ceil(seconds * NANOSECONDS)

    def _of_work(self, work: Work) -> int:
        return ceil(self.seconds(work) * NANOSECONDS)

    def seconds(self, work: Work) -> float:
        """Return the seconds of one direction of one node."""
        if not work:
            return 0.0
        if work not in self._known:
            dtype, scale = self.precision.dtype, self.precision.scale
            seconds = self.cluster.device.seconds(work, dtype, scale)
            seconds += self.cluster.exposed_seconds(work, self._tensor_group, dtype, scale)
            self._known[work] = seconds
        return self._known[work]

    @cached_property
    def _tensor_group(self) -> Sequence[int]:
        stages = range(self.mesh.pipeline)
        return self.cluster.slowest(
            group for stage in stages for group in self.mesh.groups("tensor", pipeline=stage)
        )

    @cached_property
    def _neighbours(self) -> tuple[int, int]:
        """Two neighbouring ranks of the pipeline."""
        places = product(range(self.mesh.data), range(self.mesh.pipeline), range(self.mesh.tensor))
        p, rank_of = self.mesh.pipeline, self.mesh.rank_of
        return self.cluster.farthest((rank_of(d, k, t), rank_of(d, (k + 1) % p, t)) for d, k, t in places)
