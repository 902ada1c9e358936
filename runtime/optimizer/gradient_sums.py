"""Sum one step's gradients over microbatches, stages, ranks and replicas, each as soon as it is complete."""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

from torch import Tensor

from autoptd.runtime.comm.connection import Connection
from autoptd.runtime.comm.groups import Group, Posted
from autoptd.runtime.comm.timings import Measured
from autoptd.runtime.optimizer.gradient_buckets import BucketWatch, sum_over
from autoptd.runtime.optimizer.gradient_memory import Bucket, Complete, GradientMemory, StageLeaves, lay_out
from autoptd.runtime.optimizer.zero1 import FlatShard
from autoptd.runtime.program.manifest import Manifest
from autoptd.runtime.program.schedule import Action, last_gradients


def list_complete(manifest: Manifest, pipeline_rank: int, actions: Sequence[Action]) -> Complete:
    """List a rank's parameters whose gradients are complete together, by a stage or by pipeline ranks.

    After the last backward of the stage; those that other pipeline ranks own too, by all of these, after the schedule.
    """
    ends = last_gradients(actions)
    owned = [stage.index for stage in manifest.stages[pipeline_rank :: manifest.mesh.pipeline]]
    found: dict[int | tuple[int, ...], tuple[str, ...]] = {}
    for name in (name for name, p in manifest.parameters.items() if p.kind == "parameter"):
        if stages := [index for index in owned if name in manifest.stages[index].parameters]:
            owners = manifest.owners(name)
            key = owners if len(owners) > 1 else max(stages, key=lambda stage: ends.get(stage, -1))
            found[key] = (*found.get(key, ()), name)
    return found


Key = str | int  # of what this rank steps: a parameter by its name, a part of a shard by the shard's position


class Row(NamedTuple):
    """Finished sums in a row of memory: of the parameters `names` of its `bucket`, or of a part of a shard."""

    row: Tensor
    bucket: Bucket
    names: Sequence[str]


def read_gradients(rows: Iterable[Row], keys: Iterable[Key]) -> list[Tensor | None]:
    """Return the gradients in `rows` of parameters, by name, and of shards, by their position; None where none came."""
    found: dict[Key, Tensor] = {}
    for row, bucket, names in rows:
        if bucket.shard is None:
            found.update(bucket.read(row, names).items())
        else:
            found[bucket.shard] = row
    return list(map(found.get, keys))


class GradientSums:
    """A step's gradients on their way from the leaves of this rank's stages to the optimizer.

    Summed, in this order: over the microbatches, in float32 where the leaf is in half precision; over this rank's
    stages, ascending; over the tensor ranks where each has only a part of the sum; over the replicas, divided by their
    number; over the pipeline ranks that own a tied parameter, last, so that all have the same bits. The sum over the
    replicas runs while the stage's last backward and later ones do; of experts, to whom all replicas have sent rows, it
    is over those that hold them. A sum that belongs to one of `shards` is kept only as far as this replica steps it.
    All shapes' leaves add to the same memory; the next step has `leaves`.
    """

    def __init__(self, manifest: Manifest, connection: Connection, rows: Complete, shards: Sequence[FlatShard]) -> None:
        """Make them for parameters in `rows`, as `list_complete` says."""
        self._connection = connection
        self._complete = rows
        self._shards = [shard.names for shard in shards]
        self._tensor, self._data = map(connection.rank.group, ("tensor", "data"))
        held = {name: p.placement["tensor"] for name, p in manifest.parameters.items()}
        alone = self._tensor.size == 1
        self._partial = {name: on for name, on in held.items() if on.partial_gradient and not alone}
        self._replicas = {n: connection.rank.group(p.placement.replicas) for n, p in manifest.parameters.items()}
        self.release()

    def release(self) -> None:
        """Let go of all memory; leaves must be attached anew."""
        self.leaves = StageLeaves()
        self._memory = GradientMemory({}, self.leaves)
        self._trained: frozenset[str] | None = None
        self._forget()

    def _forget(self) -> None:
        self._begin: Any = None
        self._posted: list[tuple[Posted[list[Tensor]], Bucket, list[str], Group | None]] = []
        self._sent: set[Bucket] = set()
        self._finished: list[Row] = []

    def attach(self, leaves: StageLeaves, trained: frozenset[str] | None) -> None:
        """Attach new `leaves` of the stages, of which those of `trained` parameters have sums, to these."""
        if trained != self._trained:
            self._trained = trained
            self._memory = lay_out(leaves, self._complete, self._shards, self._partial, self._replicas)
        self._memory.attach(leaves)

    @property
    def memory(self) -> tuple[int, int]:
        """The memory that graphs of a step use: the number of its leaves, and how often their sums have moved."""
        return self.leaves.number, self._memory.moves

    def start(self, lent: Iterable[Tensor], measured: Measured) -> None:
        """Begin a training step, which is `measured`; see `GradientMemory.begin`."""
        self._measured = measured
        self._forget()
        self._memory.begin(lent)
        known = self.leaves.arrived
        self._arrived = set() if known is None else known
        self._versions = {} if known is not None else {b: self._read_versions(b) for b in self._memory}

    def watch(self, stage: int) -> BucketWatch | None:
        """Return what posts sums of `stage` during its last backward; None where no replica waits for them."""
        early = [bucket for bucket in self._memory.buckets.get(stage, ()) if not self._partial.keys() & bucket.views]
        if self._data.size == 1 or not early:
            return None
        names = [bucket.views for bucket in early]
        return BucketWatch(self.leaves.by_stage[stage], names, lambda number: self._post(early[number]))

    def end_stage(self, stage: int) -> None:
        """Post the sums that are complete after the last backward of `stage`, and have not been posted."""
        for bucket in self._memory.buckets.get(stage, ()):
            self._post(bucket)

    def finish(self) -> None:
        """Post the sums that are left, and wait for all."""
        self._begin = self._begin or self._measured.mark()
        for owners, group in sorted(self._connection.tied.items()):
            for bucket in self._memory.buckets.get(owners, ()):
                self._post(bucket, group)
        while self._posted:
            posted, bucket, names, others = self._posted.pop(0)
            sums = posted.wait()
            if self._data.size > 1:
                sums[0].div_(self._data.size)
            if others is not None:
                sum_over(others, sums)
            whole = bucket.shard is None or bucket.replicas.size == 1  # and not a replica's part of it
            if whole and sums[0].data_ptr() != bucket.flat.data_ptr():
                bucket.flat.copy_(sums[0])
            self._finished.append(Row(bucket.lend() if whole else sums[0], bucket, names))
        self.leaves.arrived = self._arrived
        self._measured.add("data", self._begin)

    def gradients(self) -> list[Tensor]:
        """Return this rank's finished sums, in rows."""
        return [row for row, _, _ in self._finished]

    def take(self) -> list[Row]:
        """Hand over the finished sums."""
        finished, self._finished = self._finished, []
        return finished

    def _read_versions(self, bucket: Bucket) -> dict[str, list[int]]:
        return {name: [x._version for x in sums] for name, sums in self._memory.sums(bucket).items()}

    def _post(self, bucket: Bucket, owners: Group | None = None) -> None:
        """Begin the sum of `bucket` over the replicas, unless it has begun; `owners` add up theirs when it has come."""
        if bucket in self._sent:
            return
        self._sent.add(bucket)
        if self._versions:
            before, now = self._versions[bucket], self._read_versions(bucket)
            self._arrived |= {name for name in now if now[name] != before[name]}
        # Of a tied parameter the other owners may have a gradient, and sum with this.
        names = [name for name in bucket.views if owners is not None or name in self._arrived]
        if not names:
            return
        if bucket.shard is not None and (missing := [name for name in bucket.views if name not in names]):
            raise ValueError(
                f"{', '.join(missing[:5])} took no part in the loss and has no gradient, which a sharded optimizer "
                "cannot leave out: make the optimizer without it, or freeze it before the optimizer is sharded"
            )
        self._begin = self._begin or self._measured.mark()
        for name in bucket.views.keys() & self._memory.further.keys():
            for further in self._memory.further[name]:
                bucket.views[name].add_(further)
        partial = [name for name in names if name in self._partial]
        rows = (self._partial[n].split(bucket.views[n], self._tensor.size, divided=False) for n in partial)
        sum_over(self._tensor, list(chain.from_iterable(rows)))
        if bucket.shard is None:
            posted = bucket.replicas.post_all_reduce([bucket.flat])
        else:
            posted = bucket.replicas.post_reduce_scatter(bucket.flat)
        self._posted.append((posted, bucket, names, owners))
