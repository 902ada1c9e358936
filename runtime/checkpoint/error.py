"""The error of checkpoints, raised on all ranks or on none."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from autoptd.runtime.comm.agreement import share_text
from autoptd.runtime.comm.rank import Rank

SHOWN = 2000  # characters of another rank's message


class CheckpointError(ValueError):
    """An error in saving or loading a checkpoint; raised on every rank, with the reason of the first failing rank."""


@contextmanager
def agreed(rank: Rank) -> Iterator[None]:
    """Raise CheckpointError on every rank where one raises an error in the block. Every rank must enter it."""
    error: Exception | None = None
    try:
        yield
    except Exception as failure:
        error = failure
    size = rank.mesh.size
    failed = torch.tensor([0 if error is None else size - rank.number], device=rank.device)
    first = size - int(rank.maximum(failed))
    if first == size:
        return
    named = isinstance(error, CheckpointError) or error is None
    text = str(error or "") if named else f"{type(error).__name__}: {error}"
    reason = share_text(rank, text[:SHOWN], first) if size > 1 else text
    where = f" (on rank {first} of {size})" if size > 1 else ""
    raise CheckpointError(reason + where) from error
