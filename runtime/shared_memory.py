"""Memory that the processes of one machine share, through which small tensors go from one to the others.

Gloo's messages cross the loopback interface, in pieces, through two threads more a process; where ranks share cores
that costs as much as what they compute between. Here a rank copies its tensor into its slot, tells the others through
pipes, and reads theirs where they lie.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from autoptd.runtime.roster import gather, machine_number

SLOT_BYTES = 1 << 20
MOST_RANKS = 8  # each reads all the others' slots: with many, messages in a ring are sooner round
_SIGNAL = struct.Struct("=32sq")  # what is done, and bytes


class Exchange:
    """Every rank's tensor on its way to all of them. `take` makes the result of them, flat and in rank order."""

    def __init__(
        self, memory: SharedMemory, signal: bytes, slots: Sequence[Tensor], take: Callable[..., Tensor]
    ) -> None:
        self._memory: SharedMemory | None = memory
        self._signal, self._slots, self._take = signal, slots, take
        self._result: Tensor | None = None

    def wait(self) -> Tensor:
        """The result, once all have given theirs. RuntimeError where one has ended, or does something else."""
        if self._memory is not None:
            self._memory.await_signals(self._signal)
            self._memory, self._result = None, self._take(self._slots)
        assert self._result is not None
        return self._result


class SharedMemory:
    """Two slots a rank, used in turn: a rank that fills one knows from the other's signals that it has been read."""

    def __init__(self, index: int, region: Tensor, pipes: Sequence[Pipes]) -> None:
        """`region` is [2, ranks, SLOT_BYTES]; `pipes` are to and from the other ranks."""
        self._index, self._region, self._pipes = index, region, pipes
        self._turn = 0
        self._views: dict[tuple[int, int, torch.dtype], list[Tensor]] = {}
        self._last: Exchange | None = None
        ends = [end for pipe in pipes for end in (pipe.incoming, pipe.outgoing)]
        weakref.finalize(self, _close, ends)

    def post(self, kind: str, x: Tensor, take: Callable[[Sequence[Tensor]], Tensor]) -> Exchange:
        """Begin to show a contiguous `x`, of SLOT_BYTES at most, to all; `kind` is what for, the same on every rank."""
        if self._last is not None:
            self._last.wait()
        self._turn = 1 - self._turn
        slots = self._view(x.numel(), x.dtype)
        slots[self._index].copy_(x.detach().view(-1))
        signal = _SIGNAL.pack(f"{kind} {x.dtype}".encode(), x.nbytes)
        for pipe in self._pipes:
            try:
                os.write(pipe.outgoing, signal)
            except BrokenPipeError:
                raise _ended(pipe.rank) from None
        self._last = Exchange(self, signal, slots, take)
        return self._last

    def _view(self, count: int, dtype: torch.dtype) -> list[Tensor]:
        """This turn's slots as `count` elements each; kept, since programs exchange few sizes, and often."""
        key = self._turn, count, dtype
        if key not in self._views:
            self._views[key] = [
                slot[: count * dtype.itemsize].view(dtype) for slot in self._region[self._turn].unbind()
            ]
        return self._views[key]

    def await_signals(self, expected: bytes) -> None:
        """Read the others' signals of this turn."""
        for pipe in self._pipes:
            signal = os.read(pipe.incoming, _SIGNAL.size)
            if not signal:
                raise _ended(pipe.rank)
            if signal != expected:
                own, other = (_SIGNAL.unpack(given) for given in (expected, signal))
                raise RuntimeError(
                    f"{own[0].rstrip(bytes(1)).decode()} of {own[1]} bytes met rank {pipe.rank}'s "
                    f"{other[0].rstrip(bytes(1)).decode()} of {other[1]}: the ranks disagree on their order"
                )


@dataclass(frozen=True)
class Pipes:
    """Ends of this process's pipes from and to the one of global rank `rank`."""

    rank: int
    incoming: int
    outgoing: int


def share_memory(group: dist.ProcessGroup, device: torch.device) -> SharedMemory | None:
    """The memory of `group`'s processes, for tensors on `device`; every one of them must call it.

    None where they are on several machines or more than MOST_RANKS, use no gloo or no CPU, or it is not Linux.
    """
    size, index = dist.get_world_size(group), dist.get_rank(group)
    right = sys.platform == "linux" and device.type == "cpu" and dist.get_backend(group) == "gloo"
    if not right or not 1 < size <= MOST_RANKS:
        return None
    own = os.memfd_create("autoptd")
    os.ftruncate(own, 2 * size * SLOT_BYTES)
    inboxes = {other: os.pipe() for other in range(size) if other != index}
    ends = [inboxes[other][1] if other != index else -1 for other in range(size)]
    rows = gather([machine_number(), os.getpid(), own, *ends], device, group)
    opened: dict[int, int] = {}
    region = own
    if len({row[0] for row in rows}) == 1:
        with suppress(OSError):  # a process may not look into another: then there are messages
            for other in inboxes:
                opened[other] = os.open(f"/proc/{rows[other][1]}/fd/{rows[other][3 + index]}", os.O_WRONLY)
            region = os.open(f"/proc/{rows[0][1]}/fd/{rows[0][2]}", os.O_RDWR)
    reached = gather([int(region != own)], device, group)  # all have opened it
    pages = mmap.mmap(region, 2 * size * SLOT_BYTES)
    _close({own, region, *(writing for _, writing in inboxes.values())})  # a pipe ends with who writes to it
    if not all(row[0] for row in reached):
        _close([*(reading for reading, _ in inboxes.values()), *opened.values()])
        return None
    ranks = dist.get_process_group_ranks(group)
    pipes = [Pipes(ranks[other], inboxes[other][0], opened[other]) for other in inboxes]
    return SharedMemory(index, torch.frombuffer(pages, dtype=torch.uint8).view(2, size, SLOT_BYTES), pipes)


def _ended(rank: int) -> RuntimeError:
    return RuntimeError(f"the process of rank {rank} has ended")


def _close(numbers: Iterable[int]) -> None:
    for number in numbers:
        os.close(number)
