"""What is done along a dimension that the tensor ranks divide, as if one rank's share of it were the whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from autoptd.runtime.comm.rank import Rank
from autoptd.runtime.program.manifest import Manifest

NORMS = (torch.linalg.vector_norm, torch._foreach_norm, torch.linalg.norm, torch.norm, Tensor.norm)
ITEMS = (Tensor.__getitem__, Tensor.__setitem__)
# Their second argument is the dimension that they take elements of.
ALONG = frozenset(
    [
        *("index_fill_", "index_copy_", "index_add_", "index_reduce_", "scatter_", "scatter_add_"),
        *("index_fill", "index_select", "select", "narrow", "gather"),
    ]
)


@dataclass(frozen=True)
class Held:
    """What this rank has of a parameter: a share of this `shape`, along `dim` the `places` of the whole."""

    dim: int
    shape: torch.Size
    places: str


def find_divided(manifest: Manifest, rank: Rank) -> dict[str | int, Held]:
    """What `rank` has of each parameter that the tensor ranks divide."""
    size = rank.tensor.size
    found: dict[str | int, Held] = {}
    for name, p in manifest.parameters.items():
        if p.placement.dim is not None and size > 1:
            shape = torch.Size(p.placement.local_shape(p.shape, size))
            places = ", ".join(f"{a}:{b}" for a, b in p.placement.runs(size, rank.tensor.index))
            found[name] = Held(p.placement.dim, shape, places)
    return found


def names_elements(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], dim: int) -> bool:
    """Whether `func` takes elements of its first argument's dimension `dim` by their numbers, which a share shifts."""
    shape, name = args[0].shape, getattr(func, "__name__", "")
    if func in ITEMS:
        return _numbers(args[1], shape, dim)
    if name == "index_put_":
        return _numbers(tuple(args[1]), shape, dim)
    if name in ALONG:
        along: int = args[1] if len(args) > 1 else kwargs["dim"]
        return bool(along % len(shape) == dim)
    return False


def writes(func: Any) -> bool:
    """Whether `func`, which takes elements by number, writes them."""
    return func is not Tensor.__getitem__ and func.__name__.endswith("_")


def _numbers(index: Any, shape: torch.Size, dim: int) -> bool:
    """Whether an `index` says which elements of `dim`; a mask is as long as the share."""
    parts = list(index) if isinstance(index, tuple) else [index]
    widths = [_width(part) for part in parts]
    at = 0
    for part, width in zip(parts, widths, strict=True):
        width = len(shape) - sum(widths) if part is Ellipsis else width
        if at <= dim < at + width:
            whole = isinstance(part, slice) and part.indices(shape[dim]) == (0, shape[dim], 1)
            return part is not Ellipsis and not whole and not _is_mask(part)
        at += width
    return False


def _width(part: Any) -> int:
    """How many dimensions a part of an index is for."""
    if part is None or part is Ellipsis or isinstance(part, bool):
        return 0
    return torch.as_tensor(part).dim() if _is_mask(part) else 1


def _is_mask(part: Any) -> bool:
    """Whether a part of an index has a truth for each element."""
    return isinstance(part, Tensor | np.ndarray | list) and torch.as_tensor(part).dtype == torch.bool


def is_norm_over(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], dim: int) -> bool:
    """Whether `func` takes norms of its first argument over the dimension `dim`, one for each place of the others."""
    if func not in NORMS or not isinstance(args[0], Tensor):
        return False
    given = args[2] if len(args) > 2 else kwargs.get("dim")
    dims = range(args[0].dim()) if given is None else [given] if isinstance(given, int) else given
    return dim in [each % args[0].dim() for each in dims]
