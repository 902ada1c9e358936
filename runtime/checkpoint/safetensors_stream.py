"""A rank's pieces of tensors in one safetensors file: written in a stream, read one at a time, each by its hash.

The format is 8 bytes with the length of a JSON header, the header (of each tensor: dtype, shape, first and last byte),
and the bytes. It is read here, not by the library, so that a hostile header is refused by this file's own rules, and
no tensor is made before its hash is right.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import torch
from torch import Tensor

from autoptd.runtime.checkpoint.error import CheckpointError
from autoptd.runtime.checkpoint.files import open_file, write_file
from autoptd.runtime.program.tagged_json import read_json, show

TypeName = Literal[
    "F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL", "C64", "F8_E4M3", "F8_E5M2"
]
DTYPES: dict[TypeName, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_HEADER_LIMIT = 16 << 20
_BLOCK = 1 << 20  # bytes read at once


class Written(NamedTuple):
    """A file as it was written: its bytes, and the SHA-256 of its header and of each tensor's bytes."""

    size: int
    header: str
    digests: dict[str, str]


class Entry(NamedTuple):
    """What the header says of a tensor; `begin` counts from the end of the header."""

    dtype: TypeName
    shape: tuple[int, ...]
    begin: int
    end: int


def name_dtype(dtype: torch.dtype, name: str) -> TypeName:
    """What safetensors calls `dtype`; CheckpointError where it cannot hold it."""
    if dtype not in _NAMES:
        raise CheckpointError(
            f"{name} is {dtype}, which a checkpoint cannot hold: it has {', '.join(map(str, _NAMES))}"
        )
    return _NAMES[dtype]


def write_pieces(path: Path, tensors: Mapping[str, Tensor]) -> Written:
    """Write `tensors` to `path`, all or nothing; each is brought to the CPU when its turn comes."""
    keys = sorted(tensors, key=lambda key: -tensors[key].dtype.itemsize)  # so that each begins aligned
    fields = {}
    end = 0
    for key in keys:
        tensor = tensors[key]
        begin, end = end, end + tensor.nbytes
        dtype = name_dtype(tensor.dtype, key)
        fields[key] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(fields).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _HEADER_LIMIT:
        raise CheckpointError(f"{path}: the header of {len(keys)} pieces is {len(text)} bytes")
    header = len(text).to_bytes(8, "little") + text
    digests: dict[str, str] = {}

    def blocks() -> Iterator[Any]:
        yield header
        for key in keys:
            data = tensors[key].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
            digests[key] = hashlib.sha256(data).hexdigest()
            yield data

    write_file(path, blocks())
    return Written(len(header) + end, hashlib.sha256(header).hexdigest(), digests)


class PieceFile:
    """A file of pieces open for reading; CheckpointError unless its size and header are the expected ones."""

    def __init__(self, path: Path, size: int, header: str) -> None:
        self.path = path
        self._file: BinaryIO = open_file(path, size)
        try:
            self.entries, self._begin = _read_header(self._file, path, size, header)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> PieceFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def read(self, key: str, digest: str) -> Tensor:
        """The tensor `key`, on the CPU; CheckpointError unless the SHA-256 of its bytes is `digest`."""
        entry = self.entries[key]
        data = torch.empty(entry.end - entry.begin, dtype=torch.uint8)
        found = hashlib.sha256()
        self._file.seek(self._begin + entry.begin)
        view = data.numpy().data
        for first in range(0, len(view), _BLOCK):
            block = view[first : first + _BLOCK]
            if self._file.readinto(block) != len(block):  # type: ignore[attr-defined]
                raise CheckpointError(f"{self.path} ends inside {key}: it was cut off")
            found.update(block)
        if found.hexdigest() != digest:
            raise CheckpointError(
                f"{self.path}: {key} has the SHA-256 {found.hexdigest()}, expected {digest}: the file is damaged"
            )
        return data.view(DTYPES[entry.dtype]).reshape(entry.shape)


def check_header(text: bytes, data: int, place: str) -> dict[str, Entry]:
    """The tensors of a header before `data` bytes; CheckpointError unless they cover these, one after the other."""
    try:
        fields = read_json(text)
    except ValueError as error:
        raise CheckpointError(f"{place}: the header is no JSON: {str(error)[:200]}") from error
    if not isinstance(fields, dict):
        raise CheckpointError(f"{place}: the header is {show(fields)}, expected an object")
    fields.pop("__metadata__", None)
    entries = {key: _check_entry(field, f"{place}: {key[:200]}") for key, field in fields.items()}
    end = 0
    for key, entry in sorted(entries.items(), key=lambda item: item[1].begin):
        if entry.begin != end:
            raise CheckpointError(f"{place}: {key[:200]} begins at byte {entry.begin}, expected {end}")
        end = entry.end
    if end != data:
        raise CheckpointError(f"{place}: the tensors end at byte {end} of {data}")
    return entries


def _read_header(file: BinaryIO, path: Path, size: int, digest: str) -> tuple[dict[str, Entry], int]:
    first = file.read(8)
    length = int.from_bytes(first, "little")
    if len(first) < 8 or length > min(size - 8, _HEADER_LIMIT):
        raise CheckpointError(f"{path}: a header of {length} bytes in a file of {size}: the file is damaged")
    text = file.read(length)
    found = hashlib.sha256(first + text).hexdigest()
    if found != digest:
        raise CheckpointError(
            f"{path}: the header has the SHA-256 {found}, expected {digest}: the file is damaged"
        )
    return check_header(text, size - 8 - length, str(path)), 8 + length


def _check_entry(field: Any, place: str) -> Entry:
    if not isinstance(field, dict) or set(field) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{place} is {show(field)}, expected dtype, shape and data_offsets")
    dtype, shape, offsets = field["dtype"], field["shape"], field["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(f"{place} has the dtype {show(dtype)}, expected one of {', '.join(DTYPES)}")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2 or len(shape) > 64:
        raise CheckpointError(f"{place} has shape {show(shape)} and offsets {show(offsets)}")
    begin, end = offsets
    if end - begin != prod(shape) * DTYPES[dtype].itemsize:
        raise CheckpointError(f"{place}: {dtype}{show(shape)} does not take bytes {begin} to {end}")
    return Entry(dtype, tuple(shape), begin, end)


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) is int and 0 <= v < 1 << 62 for v in values)
