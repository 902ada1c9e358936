"""Export of the whole model to a folder of safetensors files that transformers' ``from_pretrained`` reads.

One file, or several with an index. The ranks gather one tensor after the other, and rank 0 writes each before the next
is gathered, so that no rank ever holds the whole model. A file has the same bytes as one of the safetensors library:
eight bytes with the length of a JSON header, the header, and the tensors without gaps, wide dtypes first.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from autoptd.runtime.comm.rank import Rank
from autoptd.runtime.program.manifest import Manifest
from autoptd.runtime.program.placement import Parameter
from autoptd.runtime.weights.slices import gather_tensor, saved_names

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
PARTIAL = ".partial"  # the suffix of an unfinished file
UNITS = {
    f"{prefix}{binary}B": base**power
    for binary, base in (("", 10**3), ("I", 2**10))
    for power, prefix in enumerate("KMGT", 1)
}
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


@dataclass
class Writer:
    """The files that rank 0 writes under temporary names, and the first error; other ranks write none."""

    folder: Path
    rank: Rank
    files: list[str] = field(default_factory=list)
    error: OSError | None = None

    def write(self, name: str, header: bytes, tensors: Iterator[Tensor | None]) -> None:
        """Write one file; take all tensors, which the ranks gather together, after an error too."""
        try:
            if self.rank.number == 0:
                self.folder.mkdir(parents=True, exist_ok=True)
                self.files.append(name)
                with open(self.folder / (name + PARTIAL), "wb") as file:
                    file.write(header)
                    for tensor in tensors:
                        assert tensor is not None
                        file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
                    file.flush()
                    os.fsync(file.fileno())
        except OSError as error:
            self.error = error
        for _ in tensors:
            pass
        self._agree()

    def commit(self, index: Mapping[str, object] | None) -> None:
        """Give all files their names, the index last, in place of the files of an earlier model."""
        try:
            if self.files:
                # First, so that no reader takes old and new files for one model.
                (self.folder / INDEX).unlink(missing_ok=True)
                for file in self.folder.iterdir():
                    if file.name == WHOLE or SHARD.fullmatch(file.name):
                        file.unlink()
                for name in self.files:
                    os.replace(self.folder / (name + PARTIAL), self.folder / name)
                if index is not None:
                    text = json.dumps(index, indent=2, sort_keys=True) + "\n"
                    (self.folder / (INDEX + PARTIAL)).write_text(text, encoding="utf-8")
                    os.replace(self.folder / (INDEX + PARTIAL), self.folder / INDEX)
        except OSError as error:
            self.error = error
        self._agree()

    def _agree(self) -> None:
        """Raise OSError on all ranks, and leave no unfinished file, if rank 0 could not write."""
        failed = torch.tensor([int(self.error is not None)], device=self.rank.device)
        if not self.rank.maximum(failed).item():
            return
        for name in (*self.files, INDEX) if self.files else ():
            (self.folder / (name + PARTIAL)).unlink(missing_ok=True)
        raise self.error or OSError("rank 0 could not write the model; its error message has the reason")


def write_pretrained(
    manifest: Manifest,
    rank: Rank,
    slices: Mapping[str, Tensor],
    folder: str | Path,
    max_shard_size: int | str,
) -> None:
    """Write the model, which all ranks' `slices` make up, into `folder`; every rank must call it.

    Raises ValueError for an invalid size, or a dtype that safetensors does not know, and OSError on every rank if rank
    0 could not write: the folder is then as it was, unless the error came while the files were renamed.
    """
    shards = plan_shards(manifest, read_size(max_shard_size))
    writer = Writer(Path(folder), rank)
    for file, names in shards.items():
        tensors = (gather_tensor(manifest, rank, slices, name) for name in names)
        writer.write(file, make_header([manifest.parameters[name] for name in names]), tensors)
    writer.commit(make_index(manifest, shards) if len(shards) > 1 else None)


def plan_shards(manifest: Manifest, limit: int) -> dict[str, list[str]]:
    """Return the saved names by file, in the order of writing; a file has at most `limit` bytes, or one tensor."""
    shards: list[list[str]] = [[]]
    size = 0
    for name in saved_names(manifest):
        needed = manifest.parameters[name].bytes
        if manifest.parameters[name].dtype not in DTYPES:
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
        table[p.name] = {"dtype": DTYPES[p.dtype], "shape": list(p.shape), "data_offsets": offsets}
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
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]I?B)", size.strip().upper())
        found = int(float(match[1]) * UNITS[match[2]]) if match else 0
    if isinstance(found, bool) or not isinstance(found, int) or found < 1:
        raise ValueError(
            f'max_shard_size={size!r}: expected the bytes of a file, as a number or as "5GB" or "512MiB"'
        )
    return found
