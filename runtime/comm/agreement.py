"""Agreement of ranks: whether all have the same numbers, who differs, and a text of one of them for all."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autoptd.runtime.comm.groups import Group
from autoptd.runtime.comm.rank import Rank

ABSENT = torch.iinfo(torch.int64).min  # the number of a rank that has none


def with_complements(numbers: Tensor) -> Tensor:
    """Return n and ~n of each int64, in turn: the maxima over some ranks tell `find_unlike` where ranks differ."""
    return torch.stack([numbers, torch.where(numbers == ABSENT, numbers, ~numbers)], -1).flatten()


def find_unlike(maxima: Sequence[int]) -> list[int]:
    """Return the places where ranks had different numbers, by the `maxima` of `with_complements` over them."""
    pairs = enumerate(zip(maxima[::2], maxima[1::2], strict=True))
    return [place for place, (n, inverse) in pairs if n != ~inverse and n != ABSENT]


def gather_given(group: Group, own: Tensor) -> dict[int, Any]:
    """Return every rank's `own` as numbers, by its index in the `group`. Every rank of it must call this."""
    return {index: given.tolist() for index, given in enumerate(group.all_gather(own))}


def find_others(given: Mapping[int, object]) -> tuple[list[int], int]:
    """Return the ranks whose `given` value is not that of the majority, and the first rank of the majority."""
    values = list(given.values())
    common = max(values, key=values.count)
    others = [rank for rank, value in given.items() if value != common]
    return others, next(rank for rank in given if rank not in others)


def share_text(rank: Rank, text: str, source: int = 0) -> str:
    """Return the `text` of the global rank `source` on every rank. Every rank must call it."""
    own = text.encode(errors="replace") if rank.number == source else b""
    length = int(rank.maximum(torch.tensor([len(own)], device=rank.device)))
    sent = torch.zeros(length, dtype=torch.int64, device=rank.device)
    sent[: len(own)] = torch.tensor(list(own), dtype=torch.int64)
    return bytes(rank.maximum(sent).tolist()).decode()
