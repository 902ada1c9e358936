"""Memory that the processes of one machine share, through which tensors go from each to all, a slot at a time.

Gloo's messages cross the loopback interface, in pieces, through two threads more a process; where ranks share cores
that costs as much as what they compute between. Here a rank copies its tensors into its slot, tells the others through
pipes, and reads theirs where they lie.

A rank has two slots, used in turn. It fills one for exchange k + 2 when all others have said that theirs of k + 1 are
full, which they say only after they have taken what was in those of k.
"""

from __future__ import annotations

import mmap
import os
import struct
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from autoptd.runtime.comm.shared_files import Peer, close_all, explain_end, leave_when_forked, may_meet, meet
from autoptd.runtime.health.local_ranks import gather

SLOT_BYTES = 1 << 20
MOST_RANKS = 8  # each reads all the others' slots: with more, messages in a ring are sooner round
_MOST_VIEWS = 64
_SIGNAL = struct.Struct("=qq48s")  # the number of the exchange, bytes of the whole, and what is done

Result = TypeVar("Result")


class Exchange(Generic[Result]):
    """A row that each rank shows to all, its own of `pieces` [n]: `take` makes the result of the rows in rank order."""

    def __init__(
        self,
        memory: SharedMemory,
        kind: str,
        pieces: Sequence[Tensor],
        take: Callable[[Sequence[Tensor]], Result],
        whole_bytes: int,
    ) -> None:
        self.kind, self.pieces, self.take, self.whole_bytes = kind, pieces, take, whole_bytes
        self.count, self.dtype = sum(piece.numel() for piece in pieces), pieces[0].dtype
        self.result: Result | None = None
        self._memory = memory

    def wait(self) -> Result:
        """The result, once all have given theirs. RuntimeError where one has ended, or does something else."""
        if self.result is None:
            self._memory.finish(self)
        assert self.result is not None
        return self.result


class SharedMemory:
    """Exchanges run in the order in which they were posted, one at a time.

    Nothing runs beside the ranks' own threads: what is behind the first begins when somebody here waits for that.
    """

    def __init__(self, index: int, region: Tensor, peers: Sequence[Peer]) -> None:
        """`region` is [2, ranks, SLOT_BYTES]; `peers` are the other ranks."""
        self._index, self._region, self._peers = index, region, peers
        self._views: dict[tuple[int, int, torch.dtype], list[Tensor]] = {}
        self._posted: deque[Exchange[Any]] = deque()  # the first one's row is in its slot
        self._number = 0
        self._signal = b""  # what the others say when theirs of the first one's are full
        self._broken = ""  # by what: the error itself would hold all that its frames hold
        self.close = weakref.finalize(self, close_all, peers)
        leave_when_forked(self)

    def post(
        self,
        kind: str,
        pieces: Sequence[Tensor],
        take: Callable[[Sequence[Tensor]], Result],
        whole_bytes: int,
    ) -> Exchange[Result]:
        """Begin to show a row of `pieces` [n], SLOT_BYTES at most, to all; `kind` is what for, on every rank the same.

        It is a part of `whole_bytes`, or all of them: ranks whose wholes differ are refused at the first part. Does not
        wait: behind one that is not over it begins when that is.
        """
        self._check()
        exchange = Exchange(self, kind, pieces, take, whole_bytes)
        self._posted.append(exchange)
        if len(self._posted) == 1:
            try:
                self._show()
            except BaseException as error:
                self._break(error)
                raise
        return exchange

    def finish(self, exchange: Exchange[Any]) -> None:
        """Run what was posted, up to `exchange`."""
        self._check()
        try:
            while exchange.result is None:
                self._run_first()
        except BaseException as error:
            self._break(error)
            raise

    def leave(self, reason: str) -> None:
        """Exchange nothing more; the others read the end of the pipes."""
        self._broken = reason
        self._posted.clear()
        self.close()

    def _check(self) -> None:
        if self._broken:
            raise RuntimeError(f"ranks share no memory any more: {self._broken}")

    def _break(self, error: BaseException) -> None:
        """After a failure, which leaves the ranks' memory in an unknown state."""
        self.leave(f"an exchange before failed, by {type(error).__name__}: {error}")

    def _show(self) -> None:
        """Fill the slot for the first that was posted, and say so."""
        first = self._posted[0]
        self._number += 1
        self._signal = _SIGNAL.pack(self._number, first.whole_bytes, _label(first.kind, first.dtype))
        slot = self._slots(first)[self._index]
        if len(first.pieces) == 1:
            slot.copy_(first.pieces[0])
        else:
            torch.cat(list(first.pieces), out=slot)
        for peer in self._peers:
            try:
                peer.write(self._signal)
            except BrokenPipeError:
                raise self._explain_end(peer) from None

    def _run_first(self) -> None:
        exchange, expected = self._posted[0], self._signal
        for peer in self._peers:
            signal = peer.read(_SIGNAL.size)
            if not signal:
                raise self._explain_end(peer)
            if signal != expected:
                raise RuntimeError(
                    f"{_describe(expected)} met rank {peer.rank}'s {_describe(signal)}: the ranks are in different "
                    "calls (one trains, the other evaluates, saves or gathers the model), which all of them make alike"
                )
        exchange.result = exchange.take(self._slots(exchange))
        self._posted.popleft()
        if self._posted:
            self._show()

    def _slots(self, exchange: Exchange[Any]) -> list[Tensor]:
        """All ranks' slots of this turn, as rows like its; kept, since programs exchange few sizes, and often."""
        turn, count, dtype = self._number % 2, exchange.count, exchange.dtype
        if (turn, count, dtype) not in self._views:
            if len(self._views) == _MOST_VIEWS:
                self._views.clear()
            slots = self._region[turn].unbind()
            self._views[turn, count, dtype] = [slot[: count * dtype.itemsize].view(dtype) for slot in slots]
        return self._views[turn, count, dtype]

    def _explain_end(self, found: Peer) -> RuntimeError:
        return explain_end([peer.rank for peer in self._peers if peer is found or peer.has_ended()])


def share_memory(group: dist.ProcessGroup, device: torch.device) -> SharedMemory | None:
    """The memory of `group`'s processes, for tensors on `device`; every one of them must call it.

    None where they are more than MOST_RANKS, or not all can `meet`.
    """
    size, own = dist.get_world_size(group), dist.get_rank()
    if not 1 < size <= MOST_RANKS or not may_meet(group, device):
        return None
    ranks = dist.get_process_group_ranks(group)
    memory, peers = meet(group, [rank for rank in ranks if rank != own], size - 1, device)
    pages, shared = None, False
    try:
        with suppress(OSError):
            if len(peers) == size - 1:
                pages = _map({own: memory, **{peer.rank: peer.memory for peer in peers}}[ranks[0]], size)
        shared = all(row[0] for row in gather([int(pages is not None)], device, group))
    finally:
        for number in (memory, *(peer.memory for peer in peers)):
            if number >= 0:
                os.close(number)
        if not shared:
            close_all(peers)
    if pages is None or not shared:
        return None
    with torch.inference_mode(False):
        region = torch.frombuffer(pages, dtype=torch.uint8).view(2, size, SLOT_BYTES)
    return SharedMemory(ranks.index(own), region, peers)


def _map(memory: int, size: int) -> mmap.mmap:
    """The slots of `size` ranks in a file, which whoever comes first makes as long."""
    os.ftruncate(memory, 2 * size * SLOT_BYTES)
    return mmap.mmap(memory, 2 * size * SLOT_BYTES)


@lru_cache
def _label(kind: str, dtype: torch.dtype) -> bytes:
    return f"{kind} of {dtype}".encode()


def _describe(signal: bytes) -> str:
    number, size, label = _SIGNAL.unpack(signal)
    return f"{label.rstrip(bytes(1)).decode()}, {size} bytes, as exchange {number}"
