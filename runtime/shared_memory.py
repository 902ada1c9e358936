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
import select
import struct
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.constants import default_pg_timeout

from autoptd.runtime.roster import gather, machine_number

SLOT_BYTES = 1 << 20
MOST_RANKS = 8  # each reads all the others' slots: with more, messages in a ring are sooner round
_MOST_VIEWS = 64
_SIGNAL = struct.Struct("=qq48s")  # the number of the exchange, bytes of the whole, and what is done
_memories: weakref.WeakSet[SharedMemory] = weakref.WeakSet()

Result = TypeVar("Result")


@dataclass(frozen=True)
class Peer:
    """Another rank, by its global number: where its signals are read, and where it reads ours."""

    rank: int
    incoming: int
    outgoing: int


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
        self._polls = {peer: select.poll() for peer in peers}
        for peer, poll in self._polls.items():
            os.set_blocking(peer.incoming, False)
            poll.register(peer.incoming, select.POLLIN)
        self.close = weakref.finalize(self, _close, [n for p in peers for n in (p.outgoing, p.incoming)])
        _memories.add(self)

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
                os.write(peer.outgoing, self._signal)
            except BrokenPipeError:
                raise self._explain_end(peer) from None

    def _run_first(self) -> None:
        exchange, expected = self._posted[0], self._signal
        for peer in self._peers:
            signal = self._read(peer)
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

    def _read(self, peer: Peer) -> bytes:
        while True:
            try:
                signal = os.read(peer.incoming, _SIGNAL.size)
            except BlockingIOError:
                if not self._polls[peer].poll(1000 * default_pg_timeout.total_seconds()):
                    raise RuntimeError(f"rank {peer.rank} gave no sign for {default_pg_timeout}") from None
                continue
            if not signal:
                raise self._explain_end(peer)
            return signal

    def _explain_end(self, found: Peer) -> RuntimeError:
        gone = {p.rank for p, poll in self._polls.items() if any(e & select.POLLHUP for _, e in poll.poll(0))}
        return RuntimeError(f"ranks {sorted({found.rank, *gone})} have ended, or failed before this")


def share_memory(group: dist.ProcessGroup, device: torch.device) -> SharedMemory | None:
    """The memory of `group`'s processes, for tensors on `device`; every one of them must call it.

    None where they are on several machines or more than MOST_RANKS, may not look into each other, use no gloo or no
    CPU, or it is not Linux.
    """
    size, index = dist.get_world_size(group), dist.get_rank(group)
    linux = sys.platform == "linux" and hasattr(os, "memfd_create")
    if not linux or device.type != "cpu" or dist.get_backend(group) != "gloo" or not 1 < size <= MOST_RANKS:
        return None
    machine = machine_number()
    made: list[int] = []  # that others open: the memory, and by rank where it writes to this one
    kept: list[int] = []  # where this one reads, and writes to the others
    shared = False
    try:
        with suppress(OSError):
            _make(made, kept, size, index)
        files = made if len(made) == 1 + size else [-1] * (1 + size)
        inodes = [os.fstat(number).st_ino if number >= 0 else -1 for number in files]
        rows = gather([machine, os.getpid(), *files, *inodes], device, group)
        pages = None
        with suppress(OSError):
            pages = _open(rows, kept, index)
        reached = gather([int(pages is not None)], device, group)  # all have opened what they need
        shared = all(row[0] for row in reached)
    finally:
        # So that a pipe ends with the process that writes to it.
        _close(number for number in (made if shared else made + kept) if number >= 0)
    if pages is None or not shared:
        return None
    ranks = [rank for i, rank in enumerate(dist.get_process_group_ranks(group)) if i != index]
    peers = [Peer(*of) for of in zip(ranks, kept[: size - 1], kept[size - 1 :], strict=True)]
    with torch.inference_mode(False):
        region = torch.frombuffer(pages, dtype=torch.uint8).view(2, size, SLOT_BYTES)
    return SharedMemory(index, region, peers)


def _make(made: list[int], kept: list[int], size: int, index: int) -> None:
    """Add this rank's memory and the ends of its pipes; OSError where the system has no more."""
    made.append(os.memfd_create("autoptd"))
    os.ftruncate(made[0], 2 * size * SLOT_BYTES)
    for other in range(size):
        if other == index:
            made.append(-1)
        else:
            reading, writing = os.pipe()
            made.append(writing)
            kept.append(reading)


def _open(rows: Sequence[Sequence[int]], kept: list[int], index: int) -> mmap.mmap:
    """Open what the ranks of `rows` have made for this one, and the first one's memory; OSError where it cannot be."""
    size = len(rows)
    if len({row[0] for row in rows}) > 1:
        raise OSError("they are on several machines")
    for other, row in enumerate(rows):
        if other != index:
            kept.append(_open_of(row, 1 + index, os.O_WRONLY | os.O_NONBLOCK, size))
    region = _open_of(rows[0], 0, os.O_RDWR, size)
    try:
        return mmap.mmap(region, 2 * size * SLOT_BYTES)
    finally:
        os.close(region)


def _open_of(row: Sequence[int], place: int, flags: int, size: int) -> int:
    """The file at `place` of those that the process of `row` has made."""
    number = os.open(f"/proc/{row[1]}/fd/{row[2 + place]}", flags)
    if os.fstat(number).st_ino != row[3 + size + place]:
        os.close(number)
        raise OSError(f"process {row[1]} is another one here")
    return number


@lru_cache
def _label(kind: str, dtype: torch.dtype) -> bytes:
    return f"{kind} of {dtype}".encode()


def _describe(signal: bytes) -> str:
    number, size, label = _SIGNAL.unpack(signal)
    return f"{label.rstrip(bytes(1)).decode()}, {size} bytes, as exchange {number}"


def _close(numbers: Iterable[int]) -> None:
    for number in numbers:
        os.close(number)


def _forget() -> None:
    """In a forked child, such as a data loader's worker: the ends are not its own, and would outlive its parent's."""
    for memory in list(_memories):
        memory.leave("this process was forked from one that did")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
