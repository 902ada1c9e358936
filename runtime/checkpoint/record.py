"""The JSON files of a checkpoint: one of each rank, which lists its pieces, and one of the whole."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import inf, prod
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from autoptd.runtime.checkpoint.error import CheckpointError
from autoptd.runtime.checkpoint.files import RECORD, StepFolder, check_length, rank_file, read_text
from autoptd.runtime.checkpoint.regions import Region
from autoptd.runtime.checkpoint.tensor_file import check_dtype
from autoptd.runtime.program.manifest import Manifest
from autoptd.runtime.program.manifest_json import decode, encode, write_fields
from autoptd.runtime.program.mesh import Mesh

FORMAT = "autoptd checkpoint 3"
LONGEST_KEY = 10_000
T = TypeVar("T")


@dataclass(frozen=True)
class StoredPiece:
    """A region of the tensor `name`, or of the `state` that an optimizer keeps of it, if so of another `shape`."""

    name: str
    state: str
    dtype: torch.dtype
    region: Region
    shape: tuple[int, ...] | None = None

    @property
    def key(self) -> str:
        """The name in the file: ``wte.weight@0,0``, or of an optimizer's state ``wte.weight:exp_avg@0,0``."""
        return f"{self.name}{':' * bool(self.state)}{self.state}@{','.join(map(str, self.region.offsets))}"


@dataclass(frozen=True)
class StoredFile:
    """A safetensors file, by its SHA-256, and the pieces in it."""

    sha256: str
    pieces: tuple[StoredPiece, ...]


@dataclass(frozen=True)
class StoredGroup:
    """A parameter group of an optimizer: the names of its parameters, and its hyperparameters (tagged)."""

    params: tuple[str, ...]
    options: Mapping[str, Any]


@dataclass(frozen=True)
class StoredOptimizer:
    """An optimizer without its tensors; `values` (tagged) by the parameter's name, then the state's."""

    kind: str
    groups: tuple[StoredGroup, ...]
    values: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class StoredSchedulers:
    """The states (tagged) of one rank's schedulers by name, and the parameters of each group that they schedule."""

    groups: tuple[tuple[str, ...], ...]
    states: Mapping[str, Any]


@dataclass(frozen=True)
class StoredScale:
    """The scale of a float16 loss, and the number of finite steps since it last changed."""

    value: float
    finite_steps: int


@dataclass(frozen=True)
class RankRecord:
    """The contents of rank_00003.json: the `files` of rank 3, rank_00003_000.safetensors and so on.

    One rank of each pipeline stage also stores the values of its `optimizer` and `schedulers` that are not tensors.
    """

    rank: int
    files: tuple[StoredFile, ...]
    optimizer: StoredOptimizer | None = None
    schedulers: StoredSchedulers | None = None


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the model: `states` has the dtypes of its optimizer states, `ranks` the ranks that wrote pieces.

    `shapes` has the shapes of those states that are not shaped as the tensor is.
    """

    shape: tuple[int, ...]
    kind: Literal["parameter", "buffer"]
    dtype: torch.dtype | None
    states: Mapping[str, torch.dtype]
    ranks: tuple[int, ...]
    shapes: Mapping[str, tuple[int, ...]] | None = None

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """The dtypes of the optimizer states, and under "" that of the tensor, if it has elements."""
        return {**({} if self.dtype is None else {"": self.dtype}), **self.states}

    def shape_of(self, state: str) -> tuple[int, ...]:
        """Return the shape of an optimizer state; of "" the tensor's."""
        return (self.shapes or {}).get(state, self.shape)


@dataclass(frozen=True)
class Record:
    """The contents of checkpoint.json, for the whole checkpoint. `ranks` has the SHA-256 of each rank's JSON file.

    `seed` and `call` determine dropout, `schedulers` are each pipeline rank's, and `data` (tagged) is the user's.
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


def write_record(record: Record | RankRecord, path: Path) -> bytes:
    """Return `record` as the JSON text of the file `path`."""
    text = write_fields({"format": FORMAT, **encode(record)}).encode()
    check_length(text, path)
    return text


def read_record(step: StepFolder) -> Record:
    """Return the record in a committed step's folder; CheckpointError if it is damaged."""
    path = step.path / RECORD
    record = _decode(Record, read_text(path, step.digest), path)
    if record.number != step.number:
        raise CheckpointError(
            f"{path} belongs to commit {record.number}, and COMMIT to {step.number}: files of two checkpoints are mixed"
        )
    scale = record.loss_scale
    scaled = scale is None or (0 < scale.value < inf and 0 <= scale.finite_steps < 1 << 63)
    counted = 0 <= record.call < 1 << 63 and -(1 << 63) <= record.seed < 1 << 64
    if not (scaled and counted and record.mesh.size == len(record.ranks)):
        found = f"{len(record.ranks)} ranks on {record.mesh}, {record.call} calls, the seed {record.seed} and {scale}"
        raise CheckpointError(f"{path} has {found}: autoptd did not write it")
    for name, tensor in record.tensors.items():
        sizes = *chain(tensor.shape, *(tensor.shapes or {}).values()), *tensor.ranks
        if min(sizes, default=0) < 0 or max(tensor.ranks, default=0) >= len(record.ranks):
            raise CheckpointError(f"{path}: {name} has shape {tensor.shape} on ranks {tensor.ranks}")
        for dtype in tensor.dtypes.values():
            check_dtype(dtype, f"{path}: {name}")
    return record


def read_rank_record(folder: Path, rank: int, digest: str | None = None) -> RankRecord:
    """Return the record of `rank`; CheckpointError if it is damaged."""
    path = rank_file(folder, rank)
    found = _decode(RankRecord, read_text(path, digest), path)
    if found.rank != rank:
        raise CheckpointError(f"{path} belongs to rank {found.rank}, expected {rank}")
    for piece in (piece for file in found.files for piece in file.pieces):
        offsets, sizes = piece.region.offsets, piece.region.sizes
        if len(offsets) != len(sizes) or min((*offsets, *sizes), default=0) < 0:
            raise CheckpointError(f"{path}: {piece.name} has a piece at {offsets} of {sizes}, which is no region")
    return found


def join_records(manifest: Manifest, own: Record, ranks: Sequence[RankRecord]) -> Record:
    """Complete `own` by the records of all `ranks`; CheckpointError unless their pieces are the whole model."""
    dtypes: dict[str, dict[str, torch.dtype]] = {}
    elements: Counter[tuple[str, str]] = Counter()
    writers: dict[str, set[int]] = {}
    shapes: dict[str, dict[str, tuple[int, ...]]] = {}
    for rank in ranks:
        for piece in (piece for file in rank.files for piece in file.pieces):
            known = dtypes.setdefault(piece.name, {}).setdefault(piece.state, piece.dtype)
            if known != piece.dtype:
                raise CheckpointError(f"{piece.key} is {piece.dtype} on rank {rank.rank}, {known} elsewhere")
            if piece.shape is not None:
                shapes.setdefault(piece.name, {})[piece.state] = piece.shape
            elements[piece.name, piece.state] += piece.region.elements
            writers.setdefault(piece.name, set()).add(rank.rank)
    tensors = {}
    for name, parameter in manifest.parameters.items():
        if parameter.kind == "constant" or not manifest.is_saved(name):
            continue
        states = dict(dtypes.get(name, {}))
        dtype = states.pop("", None)
        wrote = tuple(sorted(writers.get(name, ())))
        tensors[name] = StoredTensor(parameter.shape, parameter.kind, dtype, states, wrote, shapes.get(name))
        for state in ("", *states):
            if elements[name, state] != (expected := prod(tensors[name].shape_of(state))):
                raise CheckpointError(
                    f"{name} has {expected} elements, and the ranks wrote {elements[name, state]} of its "
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
        fields = json.loads(text.decode(), object_pairs_hook=_make_table, parse_constant=_refuse_constant)
        found = fields.pop("format", None) if isinstance(fields, dict) else None
        if found != FORMAT:
            raise ValueError(f"its format is {str(found)[:100]!r}, expected {FORMAT!r}")
        decoded: T = decode(kind, fields, path.name)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: {str(error)[:500]}") from error
    return decoded


def _make_table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("an object has one key twice")
    if any(len(key) > LONGEST_KEY for key in table):
        raise ValueError(f"a key is longer than {LONGEST_KEY} characters")
    return table


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
