"""Point-to-point through memory that two processes of one machine share.

The source copies a tensor into a block of its own memory and says so through a pipe. The destination copies it out when
it needs it, and answers through the pipe back: then the block may be filled again. Gloo's messages cross the loopback
interface in pieces, each of which wakes a thread at either end.
"""

from __future__ import annotations

import mmap
import os
import select
import struct
import weakref
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from autoptd.runtime.shared_files import Peer, close_all, explain_end, leave_when_forked, meet

NEIGHBOURS = 2  # that a pipeline rank has at most
LEAST_REGION = 1 << 20
MOST_IDLE = 1 << 26  # bytes of free blocks that stay in memory
_SIGNAL = struct.Struct("=qqqqqq16s")  # the message's number, its block, its bytes and dtype
_ANSWER = -1  # instead of a number: the block is free
_SIGNALS = 64  # read at a time


class Block(NamedTuple):
    """A part of a process's memory: its place and capacity, and the place and size of the region it is mapped with."""

    place: int
    capacity: int
    region: int
    region_size: int


class Pages:
    """The memory of one process as this one has mapped it, a region at a time, since each keeps a file open."""

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self._regions: dict[int, tuple[mmap.mmap, Tensor]] = {}
        self.close = weakref.finalize(self, os.close, memory)

    def show(self, block: Block, size: int, dtype: torch.dtype) -> Tensor:
        """The first `size` bytes of `block`, as a row."""
        _, region = self._map(block)
        start = block.place - block.region
        return region[start : start + size].view(dtype)

    def drop(self, block: Block) -> None:
        """Give the system what `block` holds; it stays mapped, for when it is filled again."""
        pages, _ = self._map(block)
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
        self._free: dict[int, list[Block]] = {}  # by capacity
        self._dropped: set[Block] = set()  # of those that are free
        self._idle = self._used = self._size = self._region = 0

    def take(self, size: int) -> Block:
        """The smallest free block that holds `size` bytes, or a new one."""
        fitting = [capacity for capacity, blocks in self._free.items() if blocks and capacity >= size]
        if not fitting:
            return self._make(max(1, -(-size // mmap.PAGESIZE)) * mmap.PAGESIZE)
        block = self._free[min(fitting)].pop()
        if block in self._dropped:
            self._dropped.remove(block)
        else:
            self._idle -= block.capacity
        return block

    def give(self, block: Block) -> None:
        """It is free again. Beyond MOST_IDLE only its place is kept, and taken last."""
        free = self._free.setdefault(block.capacity, [])
        if self._idle + block.capacity <= MOST_IDLE:
            self._idle += block.capacity
            free.append(block)
        else:
            self.pages.drop(block)
            self._dropped.add(block)
            free.insert(0, block)

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
        self._write(_SIGNAL.pack(number, *block, own.nbytes, _label(own.dtype)))
        self.counts["send"] += 1
        self.elements["send"] += x.numel()
        return number

    def release(self, number: int) -> None:
        """Nothing is held here."""

    def receive(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> _SharedPending:
        x, number = torch.empty(tuple(shape), dtype=dtype), self.counts["receive"]
        self.counts["receive"] += 1
        self.elements["receive"] += x.numel()
        return _SharedPending(self, number, x)

    def flush(self) -> None:
        """Nothing to wait for: a send is over when it returns."""

    def leave(self, reason: str) -> None:
        """Pass nothing more; the other end reads the end of its pipe."""
        self._broken = reason
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
        if (size, label) != (x.nbytes, _label(x.dtype)):
            found = label.rstrip(bytes(1)).decode()
            raise RuntimeError(
                f"receive {number} from rank {self._peer.rank} of {x.dtype}{list(x.shape)}, {x.nbytes} bytes, met a "
                f"send of {found}, {size} bytes: the two ends disagree on their order"
            )
        x.view(-1).copy_(self._its.show(block, size, x.dtype))
        self._write(_SIGNAL.pack(_ANSWER, *block, 0, b""), unless_ended=True)

    def _write(self, signal: bytes, unless_ended: bool = False) -> None:
        """A pipe that is full is read in time, but perhaps only after this one has been: both may be writing."""
        while True:
            try:
                os.write(self._peer.outgoing, signal)
            except BlockingIOError:
                room = select.poll()
                room.register(self._peer.outgoing, select.POLLOUT)
                room.register(self._peer.incoming, select.POLLIN)
                room.poll()
                self._read_what_is_there()
                continue
            except BrokenPipeError:
                if not unless_ended:
                    raise explain_end([self._peer.rank]) from None
            return

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
    memory, met = meet(dist.group.WORLD, peers, NEIGHBOURS, device)
    if not met:
        return {}
    blocks = Blocks(Pages(memory))
    return {peer.rank: SharedChannel(peer, blocks) for peer in met}


def _label(dtype: torch.dtype) -> bytes:
    return str(dtype).removeprefix("torch.").encode().ljust(16, bytes(1))
