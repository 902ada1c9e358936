"""Tensors in a safetensors file, or in a folder of them as transformers writes it, read by rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from autoptd.runtime.weights.pretrained import INDEX, SHARD, WHOLE
from autoptd.runtime.weights.slices import Stored

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DTYPES |= {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "BOOL": torch.bool}
BLOCK = 1 << 22  # elements of a file that are in memory at once when columns are read


class SafetensorsFolder(Stored):
    """The tensors at `path`, a file or folder; a tensor, or some of its rows, is read when it is used.

    Of a folder, the file ``model.safetensors`` is used, else the files of its index, else all. `rename` returns the
    model's name for a name in the files. Raises ValueError if there is no file, a file of the index is missing or
    cannot be read, or two tensors have the same name.
    """

    def __init__(self, path: str | Path, rename: Callable[[str], str] | None = None) -> None:
        path = Path(path)
        self._places: dict[str, tuple[Path, str]] = {}  # the file, and the name in it
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        index = _read_index(path)
        for file in _list_files(path, index):
            for name, (shape, dtype) in _read_shapes(file).items():
                if index is not None and index.get(name) != file.name:
                    continue  # as in transformers, the index decides
                own = name if rename is None else rename(name)
                if own in self._places:
                    raise ValueError(
                        f"{self._places[own][0]} and {file} both have the tensor {own}: give one model's file or "
                        "folder, and a rename= that keeps names apart"
                    )
                self._places[own], self._shapes[own], self._dtypes[own] = (file, name), shape, dtype
        found = {name for _, name in self._places.values()}
        if lost := [name for name in index or {} if name not in found]:
            raise ValueError(
                f"{path / INDEX} says that {len(lost)} tensors are in files that do not have them ({lost[0]} in "
                f"{(index or {})[lost[0]]}): the folder is damaged, or half of another model's; write it again"
            )

    def __getitem__(self, name: str) -> Tensor:
        file, known = self._places[name]
        with safe_open(file, framework="pt") as reader:
            return cast(Tensor, reader.get_tensor(known))

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        return self._dtypes[name]

    def is_meta(self, name: str) -> bool:
        return False

    def copy_rows(self, name: str, dim: int, first: int, end: int, into: Tensor) -> None:
        """Copy the rows; those of an inner dimension one block of the file after the other.

        Pages of a file stay in memory while it is open, so each block opens it again.
        """
        if dim == 0:
            into.copy_(self._read(name, (slice(first, end),)))
            return
        count, *inner = self._shapes[name]
        columns = (*[slice(None)] * (dim - 1), slice(first, end))
        size = max(1, BLOCK // max(1, torch.Size(inner).numel()))
        for start in range(0, count, size):
            rows = slice(start, min(start + size, count))
            into[rows].copy_(self._read(name, (rows, *columns)))

    def _read(self, name: str, rows: tuple[slice, ...]) -> Tensor:
        file, known = self._places[name]
        with safe_open(file, framework="pt") as reader:
            return cast(Tensor, reader.get_slice(known)[rows])


def _read_index(folder: Path) -> dict[str, str] | None:
    """Return the file of each tensor; None without an index, or if one file has the whole model."""
    path = folder / INDEX
    if (folder / WHOLE).exists() or not path.exists():
        return None
    try:
        table: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        outside = [file for file in table.values() if Path(file).name != file]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is no index of safetensors files ({type(error).__name__}: {error}): expected "
            '{"weight_map": {tensor: file}}'
        ) from error
    if outside:
        raise ValueError(f"{path} names the file {outside[0]!r}: expected a file of the same folder")
    return table


def _list_files(path: Path, index: dict[str, str] | None) -> list[Path]:
    if index is not None:
        files = [path / file for file in sorted(set(index.values()))]
        if missing := [file.name for file in files if not file.exists()]:
            raise ValueError(
                f"{path} lacks {len(missing)} of the {len(files)} files of its {INDEX}: {', '.join(missing[:5])}; "
                "fetch them, or write the folder again"
            )
        return files
    whole = path / WHOLE
    files = [path] if path.is_file() else [whole] if whole.exists() else sorted(path.glob("*.safetensors"))
    if not files:
        pickled = path.is_dir() and any(path.glob("*.bin"))
        way = "; *.bin files are pickles: load them with from_pretrained, then save_pretrained" * pickled
        raise ValueError(
            f"{path} has no safetensors; expected a file, or a folder with *.safetensors (a name on a hub: download "
            f"it first){way}"
        )
    if path.is_dir() and any(SHARD.fullmatch(file.name) for file in files):
        raise ValueError(
            f"{path} has {files[0].name} and no {INDEX}: it is a part of a model, or was not written to its end; "
            "fetch the index, or write the folder again"
        )
    return files


def _read_shapes(file: Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return the shape and dtype of each tensor; uint8 for a dtype that torch may lack."""
    try:
        with safe_open(file, framework="pt") as reader:
            shaped: Any = reader.get_slice
            return {
                name: (tuple(shaped(name).get_shape()), DTYPES.get(shaped(name).get_dtype(), torch.uint8))
                for name in reader.keys()  # noqa: SIM118
            }
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} cannot be read as safetensors: {error}; fetch or write it again") from error
