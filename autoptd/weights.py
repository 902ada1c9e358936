"""Where a program's weights come from: a module, a state_dict, or safetensors on disk read one tensor at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors import safe_open
from torch import Tensor, nn

from autoptd.runtime.manifest import Manifest
from autoptd.runtime.weights import has_values

INDEX = "model.safetensors.index.json"
WAYS_OUT = (
    "Give weights= to bind, or initializer= to compile: a function that initialises the model in place, "
    "as you would call it on one with real weights"
)


def read_weights(
    weights: nn.Module | Mapping[str, Tensor] | str | Path | None, buffers: Mapping[str, Tensor]
) -> Mapping[str, Tensor]:
    """Whole tensors by the user's names; `buffers` fill in what `weights` lacks.

    A path is a safetensors file, or a folder of them (with or without Hugging Face's index). Raises ValueError for
    None or an empty folder, TypeError for other types.
    """
    if weights is None:
        raise ValueError(
            "this program has no model to take weights from; pass weights= (module, state_dict or folder)"
        )
    if isinstance(weights, nn.Module):
        own: Mapping[str, Tensor] = {
            **dict(weights.named_parameters(remove_duplicate=False)),
            **dict(weights.named_buffers(remove_duplicate=False)),
        }
    elif isinstance(weights, (str, Path)):
        own = SafetensorsFolder(Path(weights))
    elif isinstance(weights, Mapping):
        own = weights
    else:
        raise TypeError(
            f"weights is a {type(weights).__name__}; expected a module, a state_dict, or a path of safetensors"
        )
    return Overlay(own, buffers)


def check_values(manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless every tensor has values, or the manifest says how it begins."""
    empty = [
        name
        for name, p in manifest.parameters.items()
        if p.kind != "constant"
        and not p.initial
        and manifest.homes(name)
        and not has_values(manifest, tensors, name)
    ]
    if not empty:
        return
    kinds = {manifest.parameters[name].kind for name in empty}
    why = manifest.uninitialized if "parameter" in kinds else "buffers get their values from the user alone"
    raise ValueError(
        f"{len(empty)} tensors are on the meta device and have no values ({', '.join(empty[:5])}), nor is it known "
        f"how they begin: {why}. {WAYS_OUT}"
    )


class Overlay(Mapping[str, Tensor]):
    """`first`, and `second` for what it lacks or has on the meta device only."""

    def __init__(self, first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> None:
        self._first = first
        self._second = second

    def __getitem__(self, name: str) -> Tensor:
        if name in self._first and not (name in self._second and self._first[name].is_meta):
            return self._first[name]
        return self._second[name]

    def __iter__(self) -> Iterator[str]:
        return iter({**dict.fromkeys(self._first), **dict.fromkeys(self._second)})

    def __len__(self) -> int:
        return len({*self._first, *self._second})


class SafetensorsFolder(Mapping[str, Tensor]):
    """The tensors of a safetensors file or folder, each read when it is asked for."""

    def __init__(self, path: Path) -> None:
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        if not files or not files[0].exists():
            raise ValueError(f"{path} has no safetensors; expected a file, or a folder with *.safetensors")
        index = path / INDEX
        if index.exists():
            table = json.loads(index.read_text())["weight_map"]
            self._files = {name: path / file for name, file in table.items()}
            return
        self._files = {}
        for file in files:
            with safe_open(file, framework="pt") as reader:
                self._files.update(dict.fromkeys(reader.keys(), file))

    def __getitem__(self, name: str) -> Tensor:
        with safe_open(self._files[name], framework="pt") as reader:
            tensor: Tensor = reader.get_tensor(name)
            return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)
