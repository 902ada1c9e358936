"""Compare the weights of ranks: all of them at bind, and in each step one that replicas have alike.

A few elements of each tensor are compared. Ranks that differ would train in silence: replicas, tensor ranks and the
owners of a tied parameter would keep parts of different models, and drift apart where one left out a step.
"""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from autoptd.runtime.comm.agreement import ABSENT, find_others, find_unlike, gather_given, with_complements
from autoptd.runtime.comm.connection import Connection
from autoptd.runtime.comm.groups import Group
from autoptd.runtime.comm.rank import Rank
from autoptd.runtime.program.hashing import hash_words, read_words
from autoptd.runtime.program.manifest import Manifest
from autoptd.runtime.weights.file_tensor import FileTensor, Weights
from autoptd.runtime.weights.slices import all_names

SAMPLED = 256  # elements of a tensor, evenly over it
_DRAWN = 0  # of one without values, which every rank draws from the program's seed


def compare_weights(manifest: Manifest, connection: Connection, tensors: Weights) -> None:
    """Raise RuntimeError on every rank, naming the first tensor, where ranks were given different whole `tensors`.

    Every rank must call it. Tensors in memory are compared, and those with values with those without; one in a file
    agrees with any. On a GPU this waits for earlier kernels.
    """
    world, device = connection.world, connection.rank.device
    names = [n for n, p in manifest.parameters.items() if p.kind != "constant" and manifest.homes(n)]
    if world.size == 1 or not names:
        return
    own = torch.stack([_fingerprint(manifest, tensors, name).to(device) for name in names])
    for place in find_unlike(world.all_reduce(with_complements(own), "max").tolist()):
        given = gather_given(world, own[place])
        others, like = find_others({rank: number for rank, number in given.items() if number != ABSENT})
        raise RuntimeError(
            f"ranks were given different weights: {names[place]} has other values on rank {others[0]} than on rank "
            f"{like}; ranks {others} of {world.size} differ. Each keeps its part of one model, so give all the same: "
            "call torch.manual_seed before building the model, load one checkpoint everywhere, or bind(weights=folder)"
        )


def _fingerprint(manifest: Manifest, tensors: Weights, name: str) -> Tensor:
    """Return a hash of some elements of the tensor stored as `name`, in the program's dtype: an int64 on its device."""
    whole = next((tensors[known] for known in all_names(manifest, name) if known in tensors), None)
    if whole is None or whole.is_meta:
        return torch.tensor(_DRAWN)
    if isinstance(whole, FileTensor):
        return torch.tensor(ABSENT)  # it is in a file, and is not read for this
    return hash_words(read_words(_sample(whole).to(manifest.parameters[name].dtype)))


def _sample(tensor: Tensor, shift: int = 0) -> Tensor:
    """Return some elements, evenly over the tensor, and further on by `shift`."""
    flat = tensor.detach().reshape(-1)
    count = min(len(flat), SAMPLED)
    # The last one too: a step that divides the rows would sample one column.
    places = torch.arange(count, device=flat.device) * (len(flat) - 1) // max(count - 1, 1)
    return flat[(places + shift) % max(len(flat), 1)]


class StepLog:
    """The steps that optimizers made of one parallel model on this rank, as a number, and the factors of its losses."""

    def __init__(self) -> None:
        self._value = 0
        self._scales: list[Tensor] = []

    def reset(self) -> None:
        """Count steps anew, where all ranks of a stage have got weights that fit together."""
        self._value = 0

    def add(self, names: Sequence[str], options: Mapping[str, Any]) -> None:
        """Add a step of the parameters `names` with these `options`.

        The hashes of steps are added up: optimizers, and their groups, may step in another order on each rank.
        """
        step = f"{sorted(names)} {[(key, _read_option(value)) for key, value in sorted(options.items())]}"
        digest = blake2b(step.encode(), digest_size=8).digest()
        self._value = (self._value + int.from_bytes(digest, "little")) % (1 << 63)

    def scale(self, factor: Tensor) -> None:
        """Note that the gradients of a call were multiplied by `factor` in its backward."""
        self._scales.append(factor.detach().clone())

    def take_scales(self, rank: Rank) -> Tensor:
        """Return a hash of losses' factors since the last call of this, as an int64 on the device of `rank`."""
        factors, self._scales = self._scales, []
        if not factors:
            return torch.zeros((), dtype=torch.int64, device=rank.device)
        return hash_words(read_words(torch.stack(factors).to(rank.device)))

    def tensor(self, rank: Rank) -> Tensor:
        """Return the number as an int64 on the device of `rank`."""
        # A tensor made of a number would be copied there, and on a GPU wait for all that was launched.
        return torch.full((), self._value, device=rank.device)


def _read_option(value: Any) -> Any:
    """Return the numbers of an option as floats; None for a tensor on a GPU, which would be waited for."""
    if isinstance(value, Tensor):
        return _read_option(value.tolist()) if value.is_cpu else None
    if isinstance(value, tuple | list):
        return [_read_option(each) for each in value]
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):  # no number, or one that is too large
        return None


class Copies:
    """The parameters whose slices replicas have alike, and tied ones, compared in turn, one in each step.

    Not those that the tensor ranks hold alike too: their gradients are not summed there, and kernels that add in any
    order give other last bits. Of a stage's ranks optimizers' steps are compared too, and of all ranks losses' factors.
    """

    def __init__(self, manifest: Manifest, rank: Rank, tensors: Mapping[str, Tensor], steps: StepLog) -> None:
        """This `rank` has its slices of parameters, `tensors`, and has made these `steps`."""
        self._rank, self._parameters, self._steps, self._turn = rank, tensors, steps, -1
        mesh = manifest.mesh
        owners = {n: manifest.owners(n) for n, p in manifest.parameters.items() if p.kind == "parameter"}
        columns: dict[tuple[tuple[int, ...], str], list[str]] = {}
        for name, ranks in owners.items():
            axis = manifest.parameters[name].placement.axis
            for at in ranks if mesh.data > 1 else ():
                columns.setdefault(((at,), axis), []).append(name)
            if len(ranks) > 1:
                columns.setdefault((ranks, axis), []).append(name)
        held = sorted(columns.items())
        self._columns = [(*column, place) for column in held for place in range(mesh.sizes[column[0][1]])]

    def fingerprint(self) -> Tensor:
        """Return a hash for each place, an int64 on the rank's device; ABSENT for places that this rank is not in.

        A place is a column of pipeline ranks that hold the same, at a place on its axis, with the parameter in turn;
        then, for the steps, each pipeline rank; and one for the factors.
        """
        self._turn += 1
        rank, at = self._rank, self._rank.coordinates
        absent = torch.full((), ABSENT, device=rank.device)
        hashes = [
            hash_words(read_words(_sample(self._parameters[self._pick(names)], self._turn)))
            if at.pipeline in stages and rank.group(axis).index == place
            else absent
            for (stages, axis), names, place in self._columns
        ]
        made = self._steps.tensor(rank)
        hashes += [made if pipeline == at.pipeline else absent for pipeline in range(rank.mesh.pipeline)]
        self._last = torch.stack([*hashes, self._steps.take_scales(rank)])
        return self._last

    def describe(self, world: Group, place: int) -> str:
        """Describe which ranks differ from the rest at `place` of the last fingerprint. Every rank must call it."""
        at = list(enumerate(map(self._rank.mesh.coordinates, range(self._rank.mesh.size))))
        if place < len(self._columns):
            (stages, axis), names, index = self._columns[place]
            found, mesh = f"{self._pick(names)} has other values on", self._rank.mesh
            alike = [rank for rank, c in at if c.pipeline in stages and mesh.group(axis, rank).index(rank) == index]
        elif (pipeline := place - len(self._columns)) < self._rank.mesh.pipeline:
            found = "the optimizers' steps (how many, or with which lr, weight_decay, ...) were different on"
            alike = [rank for rank, c in at if c.pipeline == pipeline]
        else:
            found = "the factors that losses were multiplied by before backward were different on"
            alike = [rank for rank, _ in at]
        given = gather_given(world, self._last[place])
        others, like = find_others({rank: given[rank] for rank in alike})
        return (
            f"{found} rank {others[0]} than on rank {like}; of ranks {alike}, which have one model together, {others} "
            "differ. Each step must be the same on all: call optimizer.step() on every rank or on none, with the same "
            "options, scale the loss alike (it is the whole batch's on every rank), leave gradients alone or change "
            "them alike, and write weights on every rank; then bind again, or load a checkpoint"
        )

    def _pick(self, names: Sequence[str]) -> str:
        return names[self._turn % len(names)]
