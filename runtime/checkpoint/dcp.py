"""Reading the model's tensors from a folder of ``torch.distributed.checkpoint``, whose index is a pickle."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from autoptd.runtime.checkpoint.error import CheckpointError
from autoptd.runtime.comm.rank import Rank
from autoptd.runtime.program.manifest import Manifest
from autoptd.runtime.user_warnings import warn_caller
from autoptd.runtime.weights.slices import saved_names

_INDEX = ".metadata"
_PREFIXES = ("", "model.", "module.", "state_dict.", "model.module.")


def is_foreign(folder: Path) -> bool:
    """Return whether ``torch.distributed.checkpoint`` wrote `folder`."""
    return (folder / _INDEX).exists()


def check_consent(folder: Path, model_only: bool, trust_pickle: bool) -> None:
    """Raise CheckpointError unless the pickle in `folder` may be read, and only the model is to be loaded."""
    if not trust_pickle:
        raise CheckpointError(
            f"{folder / _INDEX} is a pickle of torch.distributed.checkpoint: reading it runs any code in it; call "
            "load_checkpoint(..., trust_pickle=True) if you trust its author"
        )
    if not model_only:
        raise CheckpointError(
            f"{folder} is a checkpoint of torch.distributed.checkpoint, from which only the model is read: leave "
            "optimizer= and scheduler= out"
        )


def read_foreign(
    manifest: Manifest, rank: Rank, stepped: Mapping[str, torch.dtype], folder: Path
) -> dict[str, Tensor]:
    """Read this rank's slices of the model's tensors into fresh memory, one whole tensor at a time.

    `stepped` has the dtype in which each of this rank's slices is stepped. CheckpointError if names, shapes or dtypes
    are not the model's.
    """
    warn_caller(f"reading the pickle {folder / _INDEX}, as trust_pickle=True allows")
    try:
        stored = FileSystemReader(folder).read_metadata().state_dict_metadata
        prefix = _find_prefix(manifest, stored, folder)
        fresh = {}
        for name, own in stepped.items():
            if not manifest.is_saved(name):
                continue
            parameter, entry = manifest.parameters[name], stored[prefix + name]
            if not isinstance(entry, TensorStorageMetadata):
                raise CheckpointError(f"{folder}: {prefix}{name} is not a tensor")
            dtype = entry.properties.dtype
            # Half-precision weights are stepped in float32, and may come as either.
            if tuple(entry.size) != parameter.shape or dtype not in (own, parameter.dtype):
                raise CheckpointError(
                    f"{folder}: {prefix}{name} is {dtype}{list(entry.size)}, expected {parameter.dtype}"
                    f"{list(parameter.shape)}"
                )
            whole = torch.empty(parameter.shape, dtype=dtype)
            load({prefix + name: whole}, storage_reader=FileSystemReader(folder), no_dist=True)
            tensor = rank.group("tensor")
            fresh[name] = parameter.placement["tensor"].take(whole, tensor.size, tensor.index)
    except CheckpointException as error:  # a BaseException
        raise CheckpointError(f"{folder}: torch.distributed.checkpoint: {error}") from error
    return fresh


def _find_prefix(manifest: Manifest, stored: Mapping[str, object], folder: Path) -> str:
    names = saved_names(manifest)
    missing = {prefix: [n for n in names if prefix + n not in stored] for prefix in _PREFIXES}
    prefix = min(_PREFIXES, key=lambda p: len(missing[p]))
    if missing[prefix]:
        raise CheckpointError(
            f"{folder} is of another model: it lacks {len(missing[prefix])} tensors: {', '.join(missing[prefix][:5])}"
        )
    known = {prefix + name for name in (*names, *manifest.aliases)}
    if unknown := sorted(name for name in stored if name.startswith(prefix) and name not in known):
        raise CheckpointError(
            f"{folder} is of another model: it has {len(unknown)} tensors that the model lacks: "
            f"{', '.join(unknown[:5])}"
        )
    return prefix
