"""Safetensors files of a checkpoint: written whole, and read only if their SHA-256 is the recorded one."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import file_digest
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from autoptd.runtime.checkpoint.error import CheckpointError
from autoptd.runtime.checkpoint.files import create_file, open_file
from autoptd.runtime.checkpoint.regions import Region
from autoptd.runtime.weights.file_tensor import DTYPES


def check_dtype(dtype: torch.dtype, place: str) -> None:
    """Raise CheckpointError, beginning with `place`, unless a checkpoint can hold `dtype`."""
    if dtype not in DTYPES.values():
        known = ", ".join(map(str, DTYPES.values()))
        raise CheckpointError(f"{place} is {dtype}, which a checkpoint cannot hold: expected one of {known}")


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write `tensors` to the new file `path` and return its SHA-256; the file is whole, on disk, or does not exist.

    Tensors elsewhere than on the CPU, with gaps, or in the memory of others are copied.
    """
    whole = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
    end = 0
    for key, tensor in sorted(whole.items(), key=lambda item: item[1].data_ptr()):
        if tensor.data_ptr() < end:
            whole[key] = tensor.clone()
        end = max(end, tensor.data_ptr() + tensor.nbytes)
    with create_file(path) as unfinished:
        try:
            save_file(whole, unfinished)
        except SafetensorError as error:
            raise CheckpointError(f"{path} cannot be written: {error}") from error
        return _hash_file(unfinished)


@contextmanager
def open_tensors(path: Path, digest: str) -> Iterator[Any]:
    """Open `path` as ``safe_open`` does; CheckpointError if its SHA-256 is not `digest`, or what it says is wrong."""
    found = _hash_file(path)
    if found != digest:
        raise CheckpointError(f"{path} has the SHA-256 {found}, expected {digest[:64]}: the file is damaged")
    try:
        with safe_open(path, framework="pt") as reader:
            yield reader
    except SafetensorError as error:
        raise CheckpointError(f"{path} is no safetensors file of this checkpoint: {error}") from error


def read_region(reader: Any, key: str, like: tuple[torch.dtype, Sequence[int]], region: Region) -> Tensor:
    """Return a `region` of the tensor `key`; CheckpointError unless its dtype and shape are those of `like`."""
    stored = reader.get_slice(key)
    tensor: Tensor = stored[region.slices]
    if (found := (tensor.dtype, tuple(stored.get_shape()))) != like:
        raise CheckpointError(f"{key} is {found[0]}{list(found[1])}, expected {like[0]}{list(like[1])}")
    return tensor


def _hash_file(path: Path) -> str:
    with open_file(path) as file:
        return file_digest(file, "sha256").hexdigest()
