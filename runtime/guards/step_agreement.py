"""Compare batch, mode and weights over all ranks in each step, and find non-finite values, by small reductions.

After the step the maxima of hashes and of their complements are reduced, for each replica's batch, mode and weights.
"""

from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from autoptd.runtime.comm.agreement import ABSENT, find_others, find_unlike, gather_given, with_complements
from autoptd.runtime.comm.connection import Connection
from autoptd.runtime.comm.groups import Group
from autoptd.runtime.engine.batch import check_rows, describe_batch, find_unknown
from autoptd.runtime.guards.weight_agreement import Copies
from autoptd.runtime.optimizer.loss_scale import are_finite
from autoptd.runtime.program.hashing import hash_batch, hash_words, read_words
from autoptd.runtime.program.manifest import Manifest
from autoptd.runtime.program.mesh import Mesh

Batch = Mapping[str, Tensor]
Names = Sequence[str]


def compare_ranks(
    manifest: Manifest,
    connection: Connection,
    batch: Batch,
    loss: Tensor,
    gradients: Sequence[Tensor],
    copies: Copies,
    flags: Sequence[bool],
) -> list[bool]:
    """Return whether the loss or a gradient is not finite, and then of each of the `flags` whether some rank raises it.

    Every rank must call it, and gets the same; without `gradients` the loss counts. ValueError on every rank where the
    tensor and pipeline ranks of a replica have different batches, a batch on a GPU has rows that its table lacks,
    ranks are in different modes, or replicas have different values of one of `copies`. On a GPU it waits for the step.
    """
    rank, mesh = connection.rank, manifest.mesh
    broken = ~(torch.isfinite(loss) & are_finite(gradients, rank.device))
    wrong = has_unknown_rows(manifest, batch, rank.device)
    if mesh.size == 1:
        nonfinite, unknown = torch.stack([broken, wrong]).tolist()
        if unknown:
            check_rows(manifest, batch)
        return [nonfinite, *flags]
    batches = torch.full((mesh.data,), ABSENT, device=rank.device)
    if mesh.tensor * mesh.pipeline > 1:
        batches[rank.coordinates.data] = hash_batch(batch, rank.device)
    # A number that is made a tensor, or set as an element, is copied, and each copy waits for the GPU.
    mode, *raised = (
        torch.full((1,), int(number), device=rank.device)
        for number in (2 * rank.randomness.call + rank.randomness.training, *flags)
    )
    hashes = with_complements(torch.cat([batches, mode, copies.fingerprint()]))
    own = torch.cat([hashes, torch.stack([broken, wrong]), *raised])
    maxima = connection.world.all_reduce(own, "max").tolist()
    nonfinite, unknown, *found = map(bool, maxima[len(hashes) :])
    for place in find_unlike(maxima[: len(hashes)]):
        if place < mesh.data:
            raise ValueError(describe_difference(mesh, connection.world, batch, place))
        if place == mesh.data:
            raise ValueError(describe_modes(connection))
        raise ValueError(copies.describe(connection.world, place - mesh.data - 1))
    if unknown:
        check_rows(manifest, batch)
        raise ValueError("another replica's batch has row numbers outside its table: its ranks say which")
    return [nonfinite, *found]


def describe_modes(connection: Connection) -> str:
    """Describe which ranks are in another mode, or have made other steps, than the rest. Every rank must call it."""
    randomness = connection.rank.randomness
    own = torch.tensor([randomness.training, randomness.call], device=connection.rank.device)
    found = gather_given(connection.world, own)
    others, like = find_others(found)
    words = [
        f"is in {'training' if training else 'evaluation'} mode after {call} steps in training mode"
        for training, call in (found[others[0]], found[like])
    ]
    return (
        f"rank {others[0]} {words[0]}, where the others {words[1].replace('is', 'are', 1)}; ranks {others} differ, and "
        "would draw other dropout masks: call parallel.train() and parallel.eval() on every rank alike"
    )


def compare_shapes(manifests: Sequence[Manifest], connection: Connection, own: int) -> None:
    """Raise ValueError on every rank unless all have a batch of the compiled shape `own`. Every rank must call it.

    Before the step: of another shape a rank would wait for messages that nobody sends. Replicas count too, whose
    samples are numbered, and microbatches weighed, as of one shape. On a GPU this waits for earlier kernels.
    """
    number = torch.tensor(own, device=connection.rank.device)
    if not find_unlike(connection.world.all_reduce(with_complements(number), "max").tolist()):
        return
    given = gather_given(connection.world, number)
    others, like = find_others(given)
    raise ValueError(
        f"the batches of one step have different shapes: rank {others[0]} was given "
        f"{describe_batch(manifests[given[others[0]]])}, where most have {describe_batch(manifests[given[like]])}; "
        f"ranks {others} differ. All ranks, of all replicas, take one compiled shape a step: let its number choose it"
    )


def compare_shards(manifest: Manifest, connection: Connection, rows: Iterable[Names], buckets: Iterable[Names]) -> None:
    """Raise ValueError unless the ranks that add up a parameter's gradients step it in the same one of their `buckets`.

    Replicas, and the owners of a tied parameter, add up the gradients of a bucket in a row, bucket by bucket for what
    is whole together, one of the `rows`: these must call it alike. A rank without parameters has no optimizer to shard.
    """
    mesh, at, rank = manifest.mesh, connection.rank.coordinates, connection.rank
    own = {name: (0, 0, 0) for row in rows for name in row}  # a hash, the bucket's place, how many it has
    for row in rows:
        for place, bucket in enumerate(bucket for bucket in buckets if bucket[0] in row):
            digest = blake2b(f"{place} {list(bucket)}".encode(), digest_size=7).digest()
            own |= dict.fromkeys(bucket, (int.from_bytes(digest), place, len(bucket)))
    table = [own.get(name, (ABSENT, 0, 0)) for name in manifest.parameters]
    groups = [(mesh.group("data", rank.number), rank.group("data"))]
    for owners, group in sorted(connection.tied.items()):
        groups.append((tuple(mesh.rank_of(at.data, pipeline, at.tensor) for pipeline in owners), group))
    for members, group in groups:
        _compare_buckets(manifest, group, members, torch.tensor(table, device=rank.device))


def _compare_buckets(manifest: Manifest, group: Group, members: Sequence[int], table: Tensor) -> None:
    """Raise ValueError unless ranks `members` of `group` have equal rows of `table` [parameters, 3] for shared ones."""
    maxima = group.all_reduce(with_complements(table[:, 0]), "max").tolist()
    unlike = find_unlike(maxima)
    if not unlike:
        return
    index = min(unlike, key=lambda i: maxima[2 * i + 1] != ~0)  # one that is in a bucket on some ranks only
    gathered = gather_given(group, table[index])
    name = list(manifest.parameters)[index]
    given = {members[place]: row for place, row in gathered.items() if row[0] != ABSENT}
    others, like = find_others(given)
    words = [
        f"in bucket {place}, of {count} parameters" if count else "whole"
        for _, place, count in (given[others[0]], given[like])
    ]
    raise ValueError(
        f"the parameter {name} would be stepped {words[0]}, on rank {others[0]}, and {words[1]}, on rank "
        f"{like}; ranks {others} differ from the rest of {list(given)}, which have it together. Before shard_optimizer "
        "freeze the same parameters on every rank, and make the same groups of the same names in the same order"
    )


def has_unknown_rows(manifest: Manifest, batch: Batch, device: torch.device) -> Tensor:
    """Return whether the batch has row numbers outside their table; on a CPU that was refused before the step."""
    found = torch.zeros((), dtype=torch.bool, device=device)
    for expected in manifest.inputs:
        values = batch[expected.name]
        if expected.rows is not None and not values.is_cpu:
            found = found | find_unknown(expected, values).any()
    return found


def describe_difference(mesh: Mesh, world: Group, batch: Batch, replica: int) -> str:
    """Describe which ranks of `replica` were given another batch, and the first element that differs.

    Every rank of the mesh must call it.
    """
    ranks = [rank for rank in range(mesh.size) if mesh.coordinates(rank).data == replica]
    table = gather_given(world, torch.stack([hash_words(read_words(tensor)) for tensor in batch.values()]))
    index = next(i for i in range(len(batch)) if len({table[rank][i] for rank in ranks}) > 1)
    name = list(batch)[index]
    others, like = find_others({rank: table[rank][index] for rank in ranks})
    words = read_words(batch[name])
    differing = (words != world.broadcast(words.clone(), others[0])).nonzero().flatten()
    first = differing[0] if len(differing) else torch.zeros((), dtype=torch.int64, device=words.device)
    place = gather_given(world, first)[like]
    values = batch[name].detach().contiguous().view(-1)
    each = len(words) // max(len(values), 1)  # a complex number is two words
    value = values[place // each]
    bits = value.abs() if value.is_complex() else value
    given = [float(x) for x in world.all_gather(bits.to(torch.float64).view(1))]
    indices = [int(i) for i in torch.unravel_index(torch.tensor(place // each), batch[name].shape)]
    at = mesh.coordinates(others[0])
    return (
        f"argument {name} differs inside replica {replica}: on rank {others[0]} (tensor {at.tensor}, pipeline "
        f"{at.pipeline}) element {indices} is {given[others[0]]:g}, on rank {like} it is {given[like]:g}; "
        f"ranks {others} differ from the rest of {ranks}. All tensor and pipeline ranks of a replica take the same "
        "batch, so let the data coordinate alone, program.rank(r).coordinates.data, choose it"
    )
