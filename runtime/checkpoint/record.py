"""What the JSON files of a checkpoint say: one of each rank, of its pieces, and one of the whole."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, prod
from pathlib import Path
from typing import Any, Literal, TypeVar

from autoptd.runtime.checkpoint.error import CheckpointError
from autoptd.runtime.checkpoint.files import RECORD, StepFolder, check_length, read_text
from autoptd.runtime.checkpoint.safetensors_stream import TypeName
from autoptd.runtime.program.manifest import Manifest
from autoptd.runtime.program.manifest_json import decode, encode, write_fields
from autoptd.runtime.program.mesh import Mesh
from autoptd.runtime.program.tagged_json import read_json

FORMAT = "autoptd checkpoint 2"
T = TypeVar("T")


@dataclass(frozen=True)
class StoredPiece:
    """A box of the tensor `name`, or with `state` of this state of its optimizer; `sha256` of its bytes."""

    name: str
    state: str
    dtype: TypeName
    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    sha256: str

    @property
    def key(self) -> str:
        """What the piece is called in its file."""
        return piece_key(self.name, self.state, self.starts)


@dataclass(frozen=True)
class StoredGroup:
    """A group of an optimizer: the parameters in it, and its hyperparameters (tagged)."""

    params: tuple[str, ...]
    options: Mapping[str, Any]


@dataclass(frozen=True)
class StoredOptimizer:
    """An optimizer but for its tensors; `values` (tagged) by the parameter's name, then the state's."""

    kind: str
    groups: tuple[StoredGroup, ...]
    values: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class StoredSchedulers:
    """States (tagged) of one rank's schedulers by their names, and the parameters of each group they schedule."""

    groups: tuple[tuple[str, ...], ...]
    states: Mapping[str, Any]


@dataclass(frozen=True)
class StoredScale:
    """The factor of a float16 loss, and how many steps went well in a row."""

    value: float
    finite_steps: int


@dataclass(frozen=True)
class RankRecord:
    """rank_00003.json: what rank 3 wrote. `size` and `header` (a SHA-256) are those of rank_00003.safetensors.

    One rank of each pipeline rank's says what its optimizer and `schedulers` hold beside tensors.
    """

    rank: int
    size: int
    header: str
    pieces: tuple[StoredPiece, ...]
    optimizer: StoredOptimizer | None = None
    schedulers: StoredSchedulers | None = None


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the model: `states` are the dtypes of its optimizer's, `ranks` those who wrote pieces of either."""

    shape: tuple[int, ...]
    kind: Literal["parameter", "buffer"]
    dtype: TypeName | None
    states: Mapping[str, TypeName]
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Record:
    """checkpoint.json: the whole checkpoint. `ranks` has the SHA-256 of each rank's JSON file.

    `seed` and `call` are what dropout depends on, `schedulers` those of each pipeline rank, and `data` (tagged) is the
    user's.
    """

    number: int
    seed: int
    call: int
    mesh: Mesh
    ranks: tuple[str, ...]
    tensors: Mapping[str, StoredTensor]
    aliases: Mapping[str, str]
    optimizer: StoredOptimizer | None
    schedulers: tuple[StoredSchedulers, ...]
    loss_scale: StoredScale | None
    data: Any


def piece_key(name: str, state: str, starts: Sequence[int]) -> str:
    """``wte.weight@0,0`` of the model's tensor, ``wte.weight:exp_avg@0,0`` of its optimizer's state."""
    return f"{name}{':' * bool(state)}{state}@{','.join(map(str, starts))}"


def rank_file(folder: Path, rank: int, suffix: str) -> Path:
    """A rank's file in a step's folder; `suffix` "json" or "safetensors"."""
    return folder / f"rank_{rank:05}.{suffix}"


def write_record(record: Record | RankRecord, path: Path) -> bytes:
    """The JSON text of a file."""
    text = write_fields({"format": FORMAT, **encode(record)}).encode()
    check_length(text, path)
    return text


def read_record(step: StepFolder) -> Record:
    """The checkpoint in a committed step's folder; CheckpointError where it is damaged."""
    path = step.path / RECORD
    record = _decode(Record, read_text(path, step.digest), path)
    if record.number != step.number:
        raise CheckpointError(f"{path} is of commit {record.number}, and COMMIT of {step.number}")
    scale = record.loss_scale
    if scale is not None and not (0 < scale.value < inf and 0 <= scale.finite_steps < 1 << 63):
        raise CheckpointError(f"{path} has the loss scale {scale.value} after {scale.finite_steps} steps")
    counted = 0 <= record.call < 1 << 63 and -(1 << 63) <= record.seed < 1 << 64
    if record.mesh.size != len(record.ranks) or not counted:
        raise CheckpointError(
            f"{path} has {len(record.ranks)} ranks on {record.mesh}, {record.call} calls and the seed {record.seed}: "
            "it is none of ours"
        )
    for name, tensor in record.tensors.items():
        sizes = (*tensor.shape, *tensor.ranks)
        if min(sizes, default=0) < 0 or max(tensor.ranks, default=0) >= len(record.ranks):
            raise CheckpointError(f"{path}: {name} has shape {tensor.shape} on ranks {tensor.ranks}")
    return record


def read_rank_record(folder: Path, rank: int, digest: str | None = None) -> RankRecord:
    """What `rank` wrote; CheckpointError where that is damaged."""
    path = rank_file(folder, rank, "json")
    found = _decode(RankRecord, read_text(path, digest), path)
    if found.rank != rank:
        raise CheckpointError(f"{path} is of rank {found.rank}, expected {rank}")
    for piece in found.pieces:
        lengths = (*piece.starts, *piece.lengths)
        if len(piece.starts) != len(piece.lengths) or min(lengths, default=0) < 0:
            raise CheckpointError(
                f"{path}: a piece of {piece.name} has no box: {piece.starts}, {piece.lengths}"
            )
        if not re.fullmatch("[0-9a-f]{64}", piece.sha256):
            raise CheckpointError(f"{path}: a piece of {piece.name} has the SHA-256 {piece.sha256[:100]!r}")
    return found


def join_records(manifest: Manifest, own: Record, ranks: Sequence[RankRecord]) -> Record:
    """The whole, from `own` and what all `ranks` wrote; CheckpointError where their parts are not the whole."""
    dtypes: dict[str, dict[str, TypeName]] = {}
    elements: Counter[tuple[str, str]] = Counter()
    writers: dict[str, set[int]] = {}
    for rank in ranks:
        for piece in rank.pieces:
            known = dtypes.setdefault(piece.name, {}).setdefault(piece.state, piece.dtype)
            if known != piece.dtype:
                raise CheckpointError(
                    f"{piece.key} is {piece.dtype} on rank {rank.rank} and {known} elsewhere"
                )
            elements[piece.name, piece.state] += prod(piece.lengths)
            writers.setdefault(piece.name, set()).add(rank.rank)
    tensors = {}
    for name, parameter in manifest.parameters.items():
        if parameter.kind == "constant" or not manifest.is_saved(name):
            continue
        states = dict(dtypes.get(name, {}))
        dtype = states.pop("", None)
        wrote = tuple(sorted(writers.get(name, ())))
        tensors[name] = StoredTensor(parameter.shape, parameter.kind, dtype, states, wrote)
        for state in ("", *states):
            if elements[name, state] != prod(parameter.shape):
                raise CheckpointError(
                    f"{name} has {prod(parameter.shape)} elements, and the ranks wrote {elements[name, state]} of its "
                    f"{state or 'values'}: ranks that hold the same have different states"
                )
    schedulers = tuple(rank.schedulers for rank in ranks if rank.schedulers is not None)
    optimizer = _join_optimizers([rank.optimizer for rank in ranks if rank.optimizer is not None])
    return replace(own, tensors=tensors, optimizer=optimizer, schedulers=schedulers)


def _join_optimizers(parts: Sequence[StoredOptimizer]) -> StoredOptimizer | None:
    if not parts:
        return None
    groups: list[StoredGroup] = []
    values: dict[str, Mapping[str, Any]] = {}
    homes: dict[str, int] = {}
    for part in parts:
        if part.kind != parts[0].kind:
            raise CheckpointError(f"ranks have different optimizers: {part.kind} and {parts[0].kind}")
        for group in part.groups:
            at = next((i for i, g in enumerate(groups) if g.options == group.options), len(groups))
            if at == len(groups):
                groups.append(replace(group, params=()))
            new = [name for name in group.params if homes.setdefault(name, at) == at]
            if len(new) < len(group.params):
                name = next(name for name in group.params if name not in new)
                raise CheckpointError(f"{name} has different hyperparameters on two ranks")
            params = dict.fromkeys((*groups[at].params, *new))
            groups[at] = replace(groups[at], params=tuple(params))
        for name, own in part.values.items():
            if values.setdefault(name, own) != own:
                raise CheckpointError(f"the optimizer's values of {name} differ: {own} and {values[name]}")
    return StoredOptimizer(parts[0].kind, tuple(groups), values)


def _decode(kind: type[T], text: bytes, path: Path) -> T:
    try:
        fields = read_json(text)
        found = fields.pop("format", None) if isinstance(fields, dict) else None
        if found != FORMAT:
            raise ValueError(f"its format is {str(found)[:100]!r}, expected {FORMAT!r}")
        decoded = decode(kind, fields, path.name)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: {str(error)[:500]}") from error
    assert isinstance(decoded, kind)
    return decoded
