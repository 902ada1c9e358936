"""Point-to-point through memory that two processes of one machine share.

The source copies a tensor into a block of its own memory and says so through a pipe. The destination copies it out when
it needs it, and answers through the pipe back: then the block may be filled again. Gloo's messages cross the loopback
interface in pieces, each of which wakes a thread at either end.
"""

from __future__ import annotations

import mmap
import os
import struct
import weakref
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from autoptd.runtime.comm.shared_files import Peer, close_all, explain_end, leave_when_forked, may_meet, meet

NEIGHBOURS = 2  # that a pipeline rank has at most
LEAST_REGION = 1 << 20
MOST_IDLE = 1 << 26  # bytes of free blocks that stay in memory
_LETTERS = 48  # that say of what dtype and shape a message is
_SIGNAL = struct.Struct(f"=qqqqqq{_LETTERS}s")  # the message's number; its Block; its bytes, and its letters
_ANSWER = -1  # instead of a number: the block is free again
_SIGNALS = 64  # read at a time


class Block(NamedTuple):
    """A part of a process's memory: its place and capacity, and the place and size of the region it is mapped with."""

    place: int
    capacity: int
    region: int
    region_size: int


class Pages:
    """The memory of one process as this one has mapped it, in few regions: Python keeps a file open for each.

    What is held counts to this process's container, as other memory, and not to /dev/shm.
    """

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self._regions: dict[int, tuple[mmap.mmap, Tensor]] = {}
        self.close = weakref.finalize(self, os.close, memory)
        leave_when_forked(self)

    def leave(self, reason: str) -> None:
        """Hold it no more."""
        self._regions.clear()
        self.close()

    def show(self, block: Block, size: int, dtype: torch.dtype) -> Tensor:
        """The first `size` bytes of `block`, as a row."""
        _, region = self._map(block)
        start = block.place - block.region
        return region[start : start + size].view(dtype)

    def drop(self, block: Block) -> None:
        """Give the system what `block` holds; it stays mapped, for when it is filled again."""
        pages, _ = self._map(block)
        with suppress(OSError):  # where the user has locked all pages
            pages.madvise(mmap.MADV_REMOVE, block.place - block.region, block.capacity)

    def count_held(self) -> int:
        """Bytes that the system keeps of it."""
        return 512 * os.fstat(self._memory).st_blocks

    def grow(self, size: int) -> None:
        """Have room for `size` bytes, which take none of it yet."""
        os.ftruncate(self._memory, size)

    def _map(self, block: Block) -> tuple[mmap.mmap, Tensor]:
        if block.region not in self._regions:
            pages = mmap.mmap(self._memory, block.region_size, offset=block.region)
            with torch.inference_mode(False):
                self._regions[block.region] = pages, torch.frombuffer(pages, dtype=torch.uint8)
        return self._regions[block.region]


class Blocks:
    """This process's own memory, out of which it lends blocks; regions double, so that there are few."""

    def __init__(self, pages: Pages) -> None:
        self.pages = pages
        self._free: dict[int, list[Block]] = {}  # by capacity, in the order in which they were given
        self._idle: dict[Block, None] = {}  # of those that are free, what the system holds, in that order
        self._idle_bytes = self._used = self._size = self._region = 0

    def take(self, size: int) -> Block:
        """A block that holds `size` bytes: the smallest that is free and not twice too large, or a new one."""
        step = max(mmap.PAGESIZE, 1 << max(0, size.bit_length() - 3))  # so that there are few capacities
        needed = max(1, -(-size // step)) * step
        fitting = [n for n, blocks in self._free.items() if blocks and needed <= n <= 2 * needed]
        if not fitting:
            return self._make(needed)
        block = self._free[min(fitting)].pop()
        if block in self._idle:
            del self._idle[block]
            self._idle_bytes -= block.capacity
        return block

    def give(self, block: Block) -> None:
        """It is free again. Beyond MOST_IDLE the system gets back what those hold that were given longest ago."""
        self._free.setdefault(block.capacity, []).append(block)
        self._idle[block] = None
        self._idle_bytes += block.capacity
        while self._idle_bytes > MOST_IDLE and len(self._idle) > 1:
            oldest = next(iter(self._idle))
            del self._idle[oldest]
            self._idle_bytes -= oldest.capacity
            self.pages.drop(oldest)

    def _make(self, capacity: int) -> Block:
        if self._used + capacity > self._size:
            self._region = self._used = self._size
            self._size += max(capacity, self._size, LEAST_REGION)
            self.pages.grow(self._size)
        block = Block(self._used, capacity, self._region, self._size - self._region)
        self._used += capacity
        return block


class SharedChannel:
    """This process's end of both channels between it and `peer`.

    A send is over when it returns: what it has sent lies in a block of its `own` memory.
    """

    def __init__(self, peer: Peer, blocks: Blocks) -> None:
        self.counts: Counter[str] = Counter()
        self.elements: Counter[str] = Counter()
        self.own, self._peer, self._its = blocks, peer, Pages(peer.memory)
        self._arrived: dict[int, tuple[Block, int, bytes]] = {}
        self._broken = ""
        self.close = weakref.finalize(self, close_all, [peer])
        leave_when_forked(self)

    def send(self, x: Tensor) -> int:
        self._check()
        self._read_what_is_there()
        own, number = x.detach().contiguous().view(-1), self.counts["send"]
        block = self.own.take(own.nbytes)
        self.own.pages.show(block, own.nbytes, own.dtype).copy_(own)
        try:
            self._peer.write(_SIGNAL.pack(number, *block, own.nbytes, _label(x.dtype, x.shape)))
        except BrokenPipeError:
            raise explain_end([self._peer.rank]) from None
        self.counts["send"] += 1
        self.elements["send"] += x.numel()
        return number

    def release(self, number: int) -> None:
        """Nothing is held here."""

    def receive(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> _SharedPending:
        with torch.inference_mode(False):
            x, number = torch.empty(tuple(shape), dtype=dtype, device=device), self.counts["receive"]
        self.counts["receive"] += 1
        self.elements["receive"] += x.numel()
        return _SharedPending(self, number, x)

    def flush(self) -> None:
        """Nothing to wait for: a send is over when it returns. What was answered is free for both neighbours."""
        self._check()
        self._read_what_is_there()

    def leave(self, reason: str) -> None:
        """Pass nothing more; the other end reads the end of its pipe."""
        self._broken = reason
        self._arrived.clear()
        self._its.leave(reason)
        self.close()

    def take(self, number: int, x: Tensor) -> None:
        """Wait for the message `number`, and write it into `x`, which is like it."""
        self._check()
        while number not in self._arrived:
            signals = self._peer.read(_SIGNALS * _SIGNAL.size)
            if not signals:
                raise explain_end([self._peer.rank])
            self._sort(signals)
        block, size, label = self._arrived.pop(number)
        if (size, label) != (x.nbytes, _label(x.dtype, x.shape)):
            expected, found = (_describe(words) for words in (_label(x.dtype, x.shape), label))
            self.leave(f"receive {number} was of {expected}, and {found} was sent")
            raise RuntimeError(
                f"receive {number} from rank {self._peer.rank} of {expected} met a send of {found}: the two ends "
                "disagree on their order"
            )
        x.view(-1).copy_(self._its.show(block, size, x.dtype))
        with suppress(BrokenPipeError):  # who has ended needs no answer
            self._peer.write(_SIGNAL.pack(_ANSWER, *block, 0, b""))

    def _read_what_is_there(self) -> None:
        """An end is left to be found by who writes, or waits for more."""
        with suppress(BlockingIOError):
            self._sort(os.read(self._peer.incoming, _SIGNALS * _SIGNAL.size))

    def _sort(self, signals: bytes) -> None:
        """Keep the messages, and take back the blocks of the answers."""
        for number, *of, size, label in _SIGNAL.iter_unpack(signals):
            if number == _ANSWER:
                self.own.give(Block(*of))
            else:
                self._arrived[number] = Block(*of), size, label

    def _check(self) -> None:
        if self._broken:
            raise RuntimeError(f"the channel with rank {self._peer.rank} is used no more: {self._broken}")


@dataclass(frozen=True)
class _SharedPending:
    channel: SharedChannel
    number: int
    x: Tensor

    def wait(self) -> Tensor:
        self.channel.take(self.number, self.x)
        return self.x


def share_channels(peers: Sequence[int], device: torch.device) -> dict[int, SharedChannel]:
    """The channels with each of `peers` that this process can `meet`, by global rank, NEIGHBOURS at most.

    Every rank of the default group must call it, and its peers have it among theirs.
    """
    assert dist.group.WORLD is not None
    if not may_meet(dist.group.WORLD, device):
        return {}
    memory, met = meet(dist.group.WORLD, peers, NEIGHBOURS, device)
    if not met:
        return {}
    blocks = Blocks(Pages(memory))
    return {peer.rank: SharedChannel(peer, blocks) for peer in met}


@lru_cache
def _label(dtype: torch.dtype, shape: torch.Size) -> bytes:
    return f"{dtype}{list(shape)}".encode()[:_LETTERS].ljust(_LETTERS, bytes(1))


def _describe(label: bytes) -> str:
    return label.rstrip(bytes(1)).decode()
