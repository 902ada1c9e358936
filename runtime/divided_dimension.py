"""What is done along a dimension that the tensor ranks divide, as if one rank's share of it were the whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autoptd.runtime.manifest import Manifest
from autoptd.runtime.rank import Rank

NORMS = (torch.linalg.vector_norm, torch._foreach_norm, torch.linalg.norm, torch.norm, Tensor.norm)
ITEMS = (Tensor.__getitem__, Tensor.__setitem__)
# Their second argument is the dimension that they take elements of.
ALONG = frozenset(
    ["index_fill_", "index_fill", "index_copy_", "index_add_", "index_select", "select", "narrow"]
)


def find_divided(manifest: Manifest, rank: Rank) -> dict[str | int, tuple[int, str]]:
    """The dimension of each parameter that tensor ranks divide, and what of it `rank` has."""
    size, index = rank.tensor.size, rank.tensor.index
    return {
        name: (p.placement.dim, ", ".join(f"{a}:{b}" for a, b in p.placement.runs(size, index)))
        for name, p in manifest.parameters.items()
        if p.placement.dim is not None and size > 1
    }


def names_elements(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], dim: int) -> bool:
    """Whether `func` takes elements of its first argument's dimension `dim` by their numbers, which a share shifts."""
    count = args[0].dim()
    if func in ITEMS:
        return _numbers(args[1], count, dim)
    if getattr(func, "__name__", "") in ALONG:
        along: int = args[1] if len(args) > 1 else kwargs["dim"]
        return bool(along % count == dim)
    return False


def _numbers(index: Any, count: int, dim: int) -> bool:
    """Whether an `index` into `count` dimensions says which elements of `dim`; a mask is as long as the share."""
    parts = list(index) if isinstance(index, tuple) else [index]
    widths = [_width(part) for part in parts]
    at = 0
    for part, width in zip(parts, widths, strict=True):
        width = count - sum(widths) if part is Ellipsis else width
        if at <= dim < at + width:
            whole = part is Ellipsis or (isinstance(part, slice) and part == slice(None))
            return not whole and not _is_mask(part)
        at += width
    return False


def _width(part: Any) -> int:
    """How many dimensions a part of an index is for."""
    if part is None or part is Ellipsis:
        return 0
    return part.dim() if _is_mask(part) else 1


def _is_mask(part: Any) -> bool:
    return isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8)


def is_norm_over(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], dim: int) -> bool:
    """Whether `func` takes norms of its first argument over the dimension `dim`, one for each place of the others."""
    if func not in NORMS or not isinstance(args[0], Tensor):
        return False
    given = args[2] if len(args) > 2 else kwargs.get("dim")
    dims = range(args[0].dim()) if given is None else [given] if isinstance(given, int) else given
    return dim in [each % args[0].dim() for each in dims]
