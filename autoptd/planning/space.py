"""The search space of the planner: every way to train a model on a number of devices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autoptd.passes.cost.cluster import Cluster
from autoptd.planning.estimator import Candidate

RECOMPUTE = ("none", "selective", "full")
MOST_CHUNKS = 8  # more save little bubble and send as much again


@dataclass(frozen=True)
class Space:
    """The limits of the search space; None is free."""

    world_size: int
    global_batch: int
    cluster: Cluster
    max_tensor: int | None = None
    microbatch_size: int | None = None
    num_model_chunks: int | None = None
    schedule: str | None = None
    recompute: str | None = None

    def meshes(self) -> Iterator[tuple[int, int, int]]:
        """Yield all (t, p, d) whose replicas divide the batch; tensor groups span nodes only with `max_tensor`."""
        for t in _divisors(self.world_size):
            if t <= self.max_tensor if self.max_tensor else self._in_node(t):
                for p in _divisors(self.world_size // t):
                    d = self.world_size // t // p
                    if self.global_batch % d == 0:
                        yield t, p, d

    def _in_node(self, t: int) -> bool:
        size = self.cluster.devices_per_node
        return t <= size and (size % t == 0 or self.world_size <= size)

    def candidates(self, layers: int, units: int) -> Iterator[Candidate]:
        """Yield all ways to train a model of so many `layers` that can be cut into so many stages (`units`)."""
        free = RECOMPUTE if layers else RECOMPUTE[:2]  # "full" is of repeated layers
        recomputes = [self.recompute] if self.recompute else free
        for t, p, d in self.meshes():
            share = self.global_batch // d
            sizes = [2**k for k in range(share.bit_length())]
            for b in [self.microbatch_size] if self.microbatch_size else sizes:
                if share % b == 0:
                    for v, schedule in self._chunks(p, share // b, layers, units):
                        for recompute in recomputes:
                            yield Candidate(t, p, d, b, share // b, v, recompute, schedule)

    def _chunks(self, p: int, m: int, layers: int, units: int) -> Iterator[tuple[int, str]]:
        """Yield model chunks with their schedule, only chunks of equal numbers of layers, which do not wait."""
        for v in [self.num_model_chunks] if self.num_model_chunks else range(1, MOST_CHUNKS + 1):
            schedule = self.schedule or ("1f1b" if v == 1 else "interleaved_1f1b")
            even = v == 1 or (p > 1 and layers % (p * v) == 0) or v == self.num_model_chunks
            grouped = schedule != "interleaved_1f1b" or m % p == 0
            if p * v <= (layers or units) and grouped and even and not (schedule == "1f1b" and v > 1):
                yield v, schedule


def _divisors(number: int) -> list[int]:
    return [k for k in range(1, number + 1) if number % k == 0]
