"""Files that processes of one machine open of each other: memory, and pipes to say what lies in it."""

from __future__ import annotations

import os
import select
import sys
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from threading import Lock, Thread
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from autoptd.runtime.health.local_ranks import gather, machine_number


class Shared(Protocol):
    """What has such files open."""

    def leave(self, reason: str) -> None:
        """Close them, and use them no more."""


_used: weakref.WeakSet[Shared] = weakref.WeakSet()


class Peer:
    """Another process, by its global rank: its `memory`, where it reads our signals, and where we read its."""

    def __init__(self, rank: int, memory: int, outgoing: int, incoming: int) -> None:
        self.rank, self.memory, self.outgoing, self.incoming = rank, memory, outgoing, incoming
        os.set_blocking(incoming, False)
        self._poll = select.poll()
        self._poll.register(incoming, select.POLLIN)
        self._lock = Lock()
        self._late: deque[bytes] = deque()  # signals that a thread writes when there is room
        self._closed = False

    def write(self, signal: bytes) -> None:
        """Say it, or have a thread say it when there is room; does not wait. BrokenPipeError where nobody reads.

        What has found no room when this process closes is lost.
        """
        with self._lock:
            if not self._late:
                with suppress(BlockingIOError):
                    os.write(self.outgoing, signal)
                    return
                Thread(target=self._write_late, daemon=True).start()
            self._late.append(signal)

    def read(self, size: int) -> bytes:
        """What it has written, `size` bytes at most, as soon as there is any; nothing where it has ended."""
        while True:
            with suppress(BlockingIOError):
                return os.read(self.incoming, size)
            if not self._poll.poll(1000 * default_pg_timeout.total_seconds()):
                raise RuntimeError(f"rank {self.rank} gave no sign for {default_pg_timeout}")

    def has_ended(self) -> bool:
        """Whether nobody can write to this process's end any more."""
        return any(event & select.POLLHUP for _, event in self._poll.poll(0))

    def close(self) -> None:
        """Read and write no more; the other reads the end of this process's pipe."""
        # In a forked child a thread that is not there may hold the lock.
        held = self._lock.acquire(timeout=1)
        self._closed = True
        os.close(self.incoming)
        os.close(self.outgoing)
        if held:
            self._lock.release()

    def _write_late(self) -> None:
        room = select.poll()
        room.register(self.outgoing, select.POLLOUT)
        while True:
            room.poll(1000)
            with self._lock:
                try:
                    while self._late and not self._closed:
                        os.write(self.outgoing, self._late[0])
                        self._late.popleft()
                    return
                except BlockingIOError:
                    continue
                except BrokenPipeError:  # the next signal finds it too
                    self._late.clear()
                    return


def close_all(peers: Sequence[Peer]) -> None:
    for peer in peers:
        peer.close()


def leave_when_forked(shared: Shared) -> None:
    """Have a child, such as a data loader's worker, leave: what it holds would outlive its parent's."""
    _used.add(shared)


def explain_end(ranks: Sequence[int]) -> RuntimeError:
    """What is wrong where `ranks` have closed their ends."""
    return RuntimeError(f"ranks {sorted(ranks)} have ended, or failed before this")


def may_meet(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether processes of `group`, those of one machine, might: on Linux, for what gloo would pass of a CPU."""
    linux = sys.platform == "linux" and hasattr(os, "memfd_create")
    return linux and device.type == "cpu" and dist.get_backend(group) == "gloo"


def meet(
    group: dist.ProcessGroup, others: Sequence[int], most: int, device: torch.device
) -> tuple[int, list[Peer]]:
    """Make this process's memory, empty, and know `others` of `group`, by global rank: those that it met.

    Every process of `group`, which `may_meet`, must call it, with `most` others at most, each of which names this one
    too. Not met are processes of other machines and those that may not look into each other. The files are the
    caller's to close; where it met nobody there are none, -1.
    """
    own, ranks = dist.get_rank(), dist.get_process_group_ranks(group)
    files: list[int] = []  # all that are open
    kept: set[int] = set()
    try:
        memory, pipes = _make(len(others), files)
        row = [machine_number(), os.getpid(), memory, _inode(memory)]
        for other, (_, end) in zip(others, pipes, strict=True):
            row += [other, end, _inode(end)]
        rows = gather(row + [-1] * 3 * (most - len(others)), device, group)
        opened = []
        for other, (reading, _) in zip(others, pipes, strict=True):
            with suppress(OSError):
                its = rows[ranks.index(other)]
                opened.append(Peer(other, *_open(row, its, its[4::3].index(own), files), reading))
        # Each knows who could not open what it needs.
        reached = gather([peer.rank for peer in opened] + [-1] * (most - len(opened)), device, group)
        met = [peer for peer in opened if own in reached[ranks.index(peer.rank)]]
        kept = {n for peer in met for n in (memory, peer.memory, peer.incoming, peer.outgoing)}
        return memory if met else -1, met
    finally:
        # Also those made for the others, so that a pipe ends with the process that writes to it.
        for number in set(files) - kept:
            os.close(number)


def _make(count: int, files: list[int]) -> tuple[int, list[tuple[int, int]]]:
    """A file of memory and so many pipes, all added to `files`; each -1 where the system has no more."""
    pipes = []
    try:
        files.append(memory := os.memfd_create("autoptd"))
        for _ in range(count):
            pipes.append(os.pipe())
            files += pipes[-1]
    except OSError:
        return -1, [(-1, -1)] * count
    return memory, pipes


def _open(own: Sequence[int], row: Sequence[int], place: int, files: list[int]) -> tuple[int, int]:
    """The memory and the pipe at `place` of the process of `row`, added to `files`; OSError where that cannot be."""
    if row[0] != own[0] or own[2] < 0:
        raise OSError("another machine, or nothing for the other to open here")
    found = []
    for number, inode, flags in (
        (*row[2:4], os.O_RDWR),
        (*row[5 + 3 * place : 7 + 3 * place], os.O_WRONLY | os.O_NONBLOCK),
    ):
        files.append(opened := os.open(f"/proc/{row[1]}/fd/{number}", flags))
        if os.fstat(opened).st_ino != inode:
            raise OSError(f"process {row[1]} is another one here")
        found.append(opened)
    return found[0], found[1]


def _inode(number: int) -> int:
    """Which file it is, on its machine."""
    return os.fstat(number).st_ino if number >= 0 else -1


def _forget() -> None:
    for shared in list(_used):
        shared.leave("this process was forked from one that did")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
