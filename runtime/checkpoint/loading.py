"""Loading a checkpoint: each rank reads and checks its slices in fresh memory; if all ranks could, they take over."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autoptd.runtime.checkpoint.error import CheckpointError, agreed
from autoptd.runtime.checkpoint.files import RECORD, StepFolder, find_step, name_earlier, rank_file
from autoptd.runtime.checkpoint.optimizer_state import NamedOptimizer
from autoptd.runtime.checkpoint.record import Record, StoredGroup, StoredPiece, read_rank_record, read_record
from autoptd.runtime.checkpoint.regions import Piece, Region, list_pieces, list_whole
from autoptd.runtime.checkpoint.saving import Training
from autoptd.runtime.checkpoint.schedulers import choose_schedulers
from autoptd.runtime.checkpoint.tensor_file import open_tensors, read_region
from autoptd.runtime.comm.agreement import share_text
from autoptd.runtime.program.tagged_json import decode_value
from autoptd.runtime.weights.slices import check_proof, hash_parts, saved_names

Key = tuple[str, str]  # the name of a tensor, and of an optimizer state or ""


@dataclass(frozen=True)
class Loaded:
    """The part of a checkpoint for this rank, in fresh memory: slices, or the flat ranges of them that it steps."""

    record: Record
    tensors: Mapping[str, Tensor]
    states: Mapping[Tensor, Mapping[str, Any]]  # of the optimizer, by the stepped tensor
    options: Sequence[Mapping[str, Any]]  # of its groups
    schedulers: Mapping[str, Any]
    data: Any


def load_step(training: Training, folder: Path) -> Any:
    """Load the last committed checkpoint in `folder` and return its data. Every rank must call it.

    CheckpointError on every rank, with nothing changed on any, if one cannot.
    """
    rank, name = training.rank, ""
    with agreed(rank):
        if rank.number == 0:
            name = find_step(folder).path.relative_to(folder).as_posix()
    name = share_text(rank, name)
    undo: dict[str, Any] = {}
    try:
        with agreed(rank):
            step = find_step(folder / name)
            try:
                loaded = read_step(training, step)
            except CheckpointError as error:
                raise CheckpointError(f"{error}{name_earlier(step)}") from error
            try:
                check_proof(training.manifest, loaded.tensors, hash_parts(training.manifest, training.slices))
            except ValueError as error:
                raise CheckpointError(f"{folder}: {error}") from error
            for key, state in loaded.schedulers.items():
                undo[key] = copy.deepcopy(training.schedulers[key].state_dict())
                training.schedulers[key].load_state_dict(state)
    except Exception:
        for key, state in undo.items():
            training.schedulers[key].load_state_dict(state)
        raise
    _take_over(training, loaded)
    return loaded.data


def read_step(training: Training, step: StepFolder) -> Loaded:
    """Return this rank's part of a committed step, every byte of it verified. CheckpointError; changes nothing."""
    record = read_record(step)
    place = str(step.path / RECORD)
    _check_model(training, record, place)
    optimizer = training.optimizer
    groups = [] if optimizer is None else _match_groups(training, optimizer, record, place)
    trained = {name for group in groups for name in group.params if training.whole.get(name, True)}
    wanted = {
        (name, state): dtype
        for name in training.slices
        if name in record.tensors
        for state, dtype in record.tensors[name].dtypes.items()
        if not state or name in trained
    }
    found = _assemble(training, record, step.path, wanted)
    tensors = {name: tensor for (name, state), tensor in found.items() if not state}
    values = record.optimizer.values if record.optimizer else {}
    # A tensor without elements has no pieces: an optimizer makes its states anew.
    held = {name: values.get(name, {}) for name in trained if training.slices[name].numel()}
    states = {name: _decode(held.get(name, {}), f"{place}: {name}") for name in trained}
    for (name, state), tensor in found.items():
        if state:
            states[name][state] = tensor
    del found  # `join` frees states one by one
    joined = {} if optimizer is None else optimizer.join(states)
    options = [_decode(group.options, f"{place}: a group") for group in groups]
    schedulers, data = _match_schedulers(training, record, place), _decode(record.data, f"{place}: data")
    return Loaded(record, tensors, joined, options, schedulers, data)


def _take_over(training: Training, loaded: Loaded) -> None:
    with torch.no_grad():
        for name in loaded.tensors.keys() - training.flats.keys():
            training.slices[name].copy_(loaded.tensors[name])
        for shard in training.shards:
            shard.restore(loaded.tensors).wait()
    if training.optimizer is not None:
        training.optimizer.put(loaded.states, loaded.options)
    scale, randomness = loaded.record.loss_scale, training.rank.randomness
    if training.loss_scale is not None and scale is not None:
        training.loss_scale.value, training.loss_scale.finite_steps = scale.value, scale.finite_steps
    randomness.seed, randomness.call = loaded.record.seed, loaded.record.call


def _check_model(training: Training, record: Record, place: str) -> None:
    manifest = training.manifest
    own = {name: manifest.parameters[name] for name in saved_names(manifest)}
    lacking = {"it": own.keys() - record.tensors.keys(), "the model": record.tensors.keys() - own.keys()}
    for what, names in lacking.items():
        if names:
            listed = f"{len(names)} tensors: {', '.join(sorted(names)[:5])}"
            raise CheckpointError(f"{place} is of another model: {what} lacks {listed}")
    if dict(record.aliases) != dict(manifest.aliases):
        raise CheckpointError(f"{place} is of another model: it ties {record.aliases}, not {manifest.aliases}")
    dtypes = training.dtypes
    for name, parameter in own.items():
        stored, here = record.tensors[name], dtypes.get(name)
        if (stored.kind, stored.shape) != (parameter.kind, parameter.shape):
            raise CheckpointError(
                f"{place} is of another model: {name} is a {stored.kind} of shape {list(stored.shape)}, expected a "
                f"{parameter.kind} of shape {list(parameter.shape)}"
            )
        if here is not None and stored.dtype is not None and stored.dtype is not here:
            raise CheckpointError(
                f"{place}: {name} is {stored.dtype}, and the model's {here}: loading converts nothing; compile the "
                f"model with that tensor in {stored.dtype}"
            )


def _match_groups(training: Training, own: NamedOptimizer, record: Record, place: str) -> list[StoredGroup]:
    """Return, for each group of the rank's `own` optimizer, its parameters and their options in the checkpoint."""
    stored, kind = record.optimizer, own.kind
    if stored is None or stored.kind != kind:
        found = "no optimizer" if stored is None else f"the optimizer {stored.kind}"
        way = "give an optimizer of the saved kind, or leave optimizer= out"
        raise CheckpointError(f"{place} has {found}, and {kind} is to be loaded: {way}")
    home = {name: i for i, group in enumerate(stored.groups) for name in group.params}
    matched = []
    for group in own.groups():
        at = {home.get(name) for name in group.params}
        if None in at or len(at) > 1:
            raise CheckpointError(
                f"{place}: the parameters {', '.join(group.params[:3])}, … are in one group of the optimizer, and were "
                "in several groups, or none, of the saved one: make the groups as they were"
            )
        # No parameter leads to the saved options of an empty group: it keeps its own.
        saved = [stored.groups[index].options for index in at if index is not None]
        matched.append(StoredGroup(group.params, saved[0] if saved else group.options))
    if left := set(home) & set(training.slices) - {name for group in matched for name in group.params}:
        raise CheckpointError(f"{place} has states of {sorted(left)[:5]}, which the optimizer does not hold")
    return matched


def _match_schedulers(training: Training, record: Record, place: str) -> dict[str, Any]:
    if not training.schedulers:
        return {}
    stored = choose_schedulers(training.groups, record.schedulers, place)
    states = {}
    for name, item in training.schedulers.items():
        entry, kind, at = stored.get(name), type(item).__name__, f"{place}: scheduler {name}"
        if not isinstance(entry, dict) or set(entry) != {"kind", "state"} or entry["kind"] != kind:
            found = {key: of.get("kind") if isinstance(of, dict) else of for key, of in stored.items()}
            raise CheckpointError(f"{at} is a {kind}; the checkpoint has {found or 'none'}")
        state = _decode(entry["state"], at)
        own = item.state_dict()
        if type(state) is not type(own) or (isinstance(own, dict) and set(state) != set(own)):
            raise CheckpointError(f"{at} has other keys in its saved state than this {kind} has")
        states[name] = state
    return states


def _assemble(training: Training, record: Record, folder: Path, wanted: Mapping[Key, torch.dtype]) -> dict[Key, Tensor]:
    """Return this rank's parts of the `wanted` tensors: zeros for padding, every other element from a piece."""
    names, flats = {name for name, _ in wanted}, training.flats
    pieces: dict[Key, list[Piece]] = {}
    fresh: dict[Key, Tensor] = {}
    for (name, state), dtype in wanted.items():
        whole, flat = record.tensors[name].shape_of(state), flats.get(name)
        shape: Sequence[int] = training.slices[name].shape if flat is None else (flat.end - flat.first,)
        pieces[name, state] = list_pieces(training.manifest, training.rank, name, flat)
        if state and (name in training.whole or whole != record.tensors[name].shape):
            shape, pieces[name, state] = whole, list_whole(name, whole)
        fresh[name, state] = torch.zeros(shape, dtype=dtype)
    covered: dict[Key, list[Region]] = {key: [] for key in wanted}
    for rank in sorted({rank for name in names for rank in record.tensors[name].ranks}):
        for number, file in enumerate(read_rank_record(folder, rank, record.ranks[rank]).files):
            copies = []
            for stored in file.pieces:
                if (key := (stored.name, stored.state)) not in wanted:
                    continue
                _check_piece(stored, record, rank_file(folder, rank))
                for piece in pieces[key]:
                    if (region := piece.region.intersect(stored.region)) is not None:
                        covered[key].append(region)
                        target = piece.crop(region).view(fresh[key], flats.get(stored.name))
                        copies.append((stored, region.relative_to(stored.region), target))
            if copies:
                with open_tensors(rank_file(folder, rank, number), file.sha256) as reader:
                    for stored, region, target in copies:
                        like = stored.dtype, stored.region.sizes
                        target.copy_(read_region(reader, stored.key, like, region))
    for key, regions in covered.items():
        _check_cover(key, pieces[key], regions, folder)
    return fresh


def _check_piece(piece: StoredPiece, record: Record, path: Path) -> None:
    """Raise CheckpointError unless the piece lies inside its tensor and has its dtype."""
    tensor, ends = record.tensors[piece.name], [part.stop for part in piece.region.slices]
    dtype, shape = tensor.dtypes.get(piece.state), tensor.shape_of(piece.state)
    inside = len(ends) == len(shape) and all(map(int.__le__, ends, shape))
    if not inside or piece.dtype != dtype:
        raise CheckpointError(
            f"{path}: {piece.key} is {piece.dtype} and ends at {ends}, and its tensor is {dtype} of shape {list(shape)}"
        )


def _check_cover(key: Key, pieces: Sequence[Piece], regions: Sequence[Region], folder: Path) -> None:
    """Raise CheckpointError unless every element of the `pieces` is in exactly one of the `regions`."""
    for piece in pieces:
        seen = torch.zeros(piece.region.sizes, dtype=torch.bool)
        for region in regions:
            if (own := region.intersect(piece.region)) is not None:
                view = seen[own.relative_to(piece.region).slices]
                if view.any():
                    raise CheckpointError(
                        f"{folder}: two pieces of {':'.join(key)} overlap at {own.offsets}: the checkpoint is damaged"
                    )
                view.fill_(True)
        if not seen.all():
            missing = f"elements of {':'.join(key)} from {piece.region.offsets} on are missing"
            raise CheckpointError(f"{folder}: {missing}: the checkpoint is damaged")


def _decode(value: Any, place: str) -> Any:
    try:
        return decode_value(value, place)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{place}: {str(error)[:500]}") from error
