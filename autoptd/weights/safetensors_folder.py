"""Tensors in a safetensors file, or in a folder of them as transformers writes it, read by rows."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from autoptd.runtime.checkpoint.pretrained import INDEX, WHOLE
from autoptd.runtime.weights.file_tensor import DTYPES, FileTensor


class SafetensorsFolder(Mapping[str, Tensor]):
    """The tensors at `path`, a file or folder; a tensor, or some of its rows, is read when it is used.

    Of a folder, the file ``model.safetensors`` is used, else the files of its index, else all. `rename` returns the
    model's name for a name in the files. ValueError for no file, an unreadable one, or two tensors of one name.
    """

    def __init__(self, path: str | Path, rename: Callable[[str], str] | None = None) -> None:
        path = Path(path)
        self.stored: dict[str, FileTensor] = {}
        index = _read_index(path)
        for file in _list_files(path, index):
            for tensor in _read_tensors(file):
                if index is not None and index.get(tensor.name) != file.name:
                    continue  # as in transformers, the index decides
                own = tensor.name if rename is None else rename(tensor.name)
                if own in self.stored:
                    raise ValueError(
                        f"{self.stored[own].path} and {file} both have the tensor {own}: give one model's file or "
                        "folder, and a rename= that keeps names apart"
                    )
                self.stored[own] = tensor

    def __getitem__(self, name: str) -> Tensor:
        return self.stored[name].read()

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)

    def __contains__(self, name: object) -> bool:
        return name in self.stored


def _read_index(folder: Path) -> dict[str, str] | None:
    """Return the file of each tensor; None without an index, or if one file has the whole model."""
    path = folder / INDEX
    if (folder / WHOLE).exists() or not path.exists():
        return None
    try:
        table: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is no index of safetensors files ({type(error).__name__}: {error}): expected "
            '{"weight_map": {tensor: file}}'
        ) from error
    return table


def _list_files(path: Path, index: dict[str, str] | None) -> list[Path]:
    if index is not None:
        return [path / file for file in sorted(set(index.values()))]
    whole = path / WHOLE
    files = [path] if path.is_file() else [whole] if whole.exists() else sorted(path.glob("*.safetensors"))
    if not files:
        pickled = path.is_dir() and any(path.glob("*.bin"))
        way = "; *.bin files are pickles: load them with from_pretrained, then save_pretrained" * pickled
        expected = "a file, or a folder with *.safetensors (a name on a hub: download it first)"
        raise ValueError(f"{path} has no safetensors; expected {expected}{way}")
    return files


def _read_tensors(file: Path) -> list[FileTensor]:
    """Return the tensors of a file; one of a dtype that torch may lack as uint8."""
    try:
        with safe_open(file, framework="pt") as reader:
            rows: dict[str, Any] = {name: reader.get_slice(name) for name in reader.keys()}  # noqa: SIM118
            kinds = {name: DTYPES.get(x.get_dtype(), torch.uint8) for name, x in rows.items()}
            return [FileTensor(file, name, tuple(x.get_shape()), kinds[name]) for name, x in rows.items()]
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} cannot be read as safetensors: {error}; fetch or write it again") from error
