"""Export of the whole model to a folder of safetensors files that transformers' ``from_pretrained`` reads.

One file, or several with an index. The ranks gather one tensor after the other, and rank 0 writes each before the next
is gathered, so that no rank ever holds the whole model. A file has the same bytes as one of the safetensors library:
eight bytes with the length of a JSON header, the header, and the tensors without gaps, wide dtypes first.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from autoptd.runtime.comm.rank import Rank
from autoptd.runtime.program.manifest import Manifest
from autoptd.runtime.program.placement import Parameter
from autoptd.runtime.weights.file_tensor import DTYPES
from autoptd.runtime.weights.slices import gather_tensor, saved_names

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
PARTIAL = ".partial"  # the suffix of an unfinished file
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def write_pretrained(
    manifest: Manifest, rank: Rank, slices: Mapping[str, Tensor], folder: str | Path, shard_size: int | str
) -> None:
    """Write the model, which all ranks' `slices` make up, into `folder`; every rank must call it.

    Raises ValueError for an invalid size, or a dtype that safetensors does not know, and OSError on every rank if rank
    0 could not write: the folder is then as it was, unless the error came while the files were renamed.
    """
    shards = plan_shards(manifest, read_size(shard_size))
    tensors = (gather_tensor(manifest, rank, slices, name) for names in shards.values() for name in names)
    error: OSError | None = None
    if rank.number == 0:
        try:
            _write_files(manifest, shards, tensors, Path(folder))
        except OSError as found:
            error = found
    for _ in tensors:  # the ranks gather them together, after an error too
        pass
    if rank.maximum(torch.tensor([int(error is not None)], device=rank.device)).item():
        raise error or OSError("rank 0 could not write the model; its error message has the reason")


def _write_files(
    manifest: Manifest, shards: Mapping[str, Sequence[str]], tensors: Iterator[Tensor | None], folder: Path
) -> None:
    """Write files under temporary names, then give all their names, the index last, in place of an earlier model."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        for name, kept in shards.items():
            with open(folder / (name + PARTIAL), "wb") as file:
                file.write(make_header([manifest.parameters[own] for own in kept]))
                for tensor in islice(tensors, len(kept)):
                    assert tensor is not None
                    file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
                file.flush()
                os.fsync(file.fileno())
        # First, so that no reader takes old and new files for one model.
        (folder / INDEX).unlink(missing_ok=True)
        for path in folder.iterdir():
            if path.name == WHOLE or SHARD.fullmatch(path.name):
                path.unlink()
        for name in shards:
            os.replace(folder / (name + PARTIAL), folder / name)
        if len(shards) > 1:
            text = json.dumps(make_index(manifest, shards), indent=2, sort_keys=True) + "\n"
            (folder / (INDEX + PARTIAL)).write_text(text, encoding="utf-8")
            os.replace(folder / (INDEX + PARTIAL), folder / INDEX)
    finally:
        for name in (*shards, INDEX):  # those that an error left
            (folder / (name + PARTIAL)).unlink(missing_ok=True)


def plan_shards(manifest: Manifest, limit: int) -> dict[str, list[str]]:
    """Return the saved names by file, in the order of writing; a file has at most `limit` bytes, or one tensor."""
    shards: list[list[str]] = [[]]
    size = 0
    for name in saved_names(manifest):
        needed = manifest.parameters[name].bytes
        if manifest.parameters[name].dtype not in _NAMES:
            raise ValueError(f"{name} is {manifest.parameters[name].dtype}, which safetensors does not know")
        if shards[-1] and size + needed > limit:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += needed
    files = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    return {
        file: sorted(shard, key=lambda name: (-manifest.parameters[name].dtype.itemsize, name))
        for file, shard in zip(files if len(shards) > 1 else [WHOLE], shards, strict=True)
    }


def make_header(parameters: Sequence[Parameter]) -> bytes:
    """Return the beginning of a safetensors file with these tensors."""
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for p in parameters:
        offsets = [begin, begin + p.bytes]
        table[p.name] = {"dtype": _NAMES[p.dtype], "shape": list(p.shape), "data_offsets": offsets}
        begin += p.bytes
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of eight
    return len(text).to_bytes(8, "little") + text


def make_index(manifest: Manifest, shards: Mapping[str, Sequence[str]]) -> dict[str, object]:
    """Return the index, which names the file of each tensor."""
    kept = [manifest.parameters[name] for names in shards.values() for name in names]
    counts = (torch.Size(p.shape).numel() for p in kept if p.kind == "parameter")
    return {
        "metadata": {"total_parameters": sum(counts), "total_size": sum(p.bytes for p in kept)},
        "weight_map": {name: file for file, names in shards.items() for name in names},
    }


def read_size(size: int | str) -> int:
    """Return the bytes of a size such as 5 * 10**9, "5GB" or "512MiB"; ValueError for anything else."""
    found: object = size
    if isinstance(size, str):
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT])(I?)B", size.strip().upper())
        thousand = 1024 if match and match[3] else 1000
        found = int(float(match[1]) * thousand ** ("KMGT".index(match[2]) + 1)) if match else 0
    if isinstance(found, bool) or not isinstance(found, int) or found < 1:
        raise ValueError(f'max_shard_size={size!r}: expected the bytes of a file, as 10**9, "5GB", "512MiB"')
    return found
