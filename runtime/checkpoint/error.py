"""Agreement of all ranks on whether one failed, and on a text that one of them has."""

from __future__ import annotations

import torch
from torch import Tensor

from autoptd.runtime.comm.groups import Reduction
from autoptd.runtime.comm.rank import Rank

SHOWN = 2000  # characters of another rank's message


class CheckpointError(ValueError):
    """An error in saving or loading a checkpoint; raised on every rank, with the reason of the first failing rank."""


def own_number(rank: Rank) -> int:
    """Return this rank's global number."""
    return rank.mesh.rank_of(**rank.coordinates)


def agree(rank: Rank, error: Exception | None) -> None:
    """Raise CheckpointError on every rank unless `error` is None on all. Every rank must call it."""
    size, own = rank.mesh.size, own_number(rank)
    failed = torch.tensor([0 if error is None else size - own], device=rank.device)
    first = size - int(_reduce(rank, failed, "max"))
    if first == size:
        return
    text = "" if error is None else _describe(error)
    reason = share(rank, text[:SHOWN], first) if size > 1 else text
    where = f" (on rank {first} of {size})" if size > 1 else ""
    raise CheckpointError(reason + where) from error


def share(rank: Rank, text: str, source: int = 0) -> str:
    """Return the `text` of the global rank `source` on every rank."""
    own = text.encode(errors="replace") if own_number(rank) == source else b""
    length = int(_reduce(rank, torch.tensor([len(own)], device=rank.device), "max"))
    sent = torch.zeros(length, dtype=torch.int64, device=rank.device)
    sent[: len(own)] = torch.tensor(list(own), dtype=torch.int64)
    return bytes(_reduce(rank, sent, "max").tolist()).decode()


def _reduce(rank: Rank, x: Tensor, op: Reduction) -> Tensor:
    for group in reversed(rank.groups.values()):
        x = group.all_reduce(x, op)
    return x


def _describe(error: Exception) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
