"""Point-to-point messages: one first-in-first-out channel per ordered pair of ranks, whose sends never wait."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from autoptd.runtime.comm.groups import group_cache, require_work
from autoptd.runtime.comm.threads import ThreadWorld
from autoptd.runtime.program.mesh import Mesh


class Pending(Protocol):
    """A tensor on its way here."""

    def wait(self) -> Tensor:
        """Wait until the tensor has arrived and return it. Call this once."""


class Channel(Protocol):
    """A channel from one rank to another: its source sends and its destination receives, in the same order.

    `counts` and `elements` count this end's calls and their elements, by kind: "send", "receive".
    """

    counts: Counter[str]
    elements: Counter[str]

    def send(self, x: Tensor) -> int:
        """Post `x`, which must not be changed before `release` or `flush`; return its number on the channel."""

    def release(self, number: int) -> None:
        """Release the tensors that were sent up to `number`, which must have arrived."""

    def receive(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Pending:
        """Post the receive of the next tensor of the channel."""

    def flush(self) -> None:
        """Wait until all posted tensors have left; for the end of a step."""


class ThreadChannel:
    """A channel between two threads of `world`; both ends share the object."""

    def __init__(self, world: ThreadWorld, name: str) -> None:
        self.world = world
        self.name = name
        self.counts: Counter[str] = Counter()
        self.elements: Counter[str] = Counter()
        self._arrived: dict[int, Tensor] = {}

    def send(self, x: Tensor) -> int:
        with self.world.condition:
            number = self.counts["send"]
            self.counts["send"] += 1
            self.elements["send"] += x.numel()
            # A copy, since a receiver in another process would have memory of its own too.
            self._arrived[number] = x.detach().clone()
            self.world.condition.notify_all()
        return number

    def release(self, number: int) -> None:
        """Do nothing: this channel holds no tensors."""

    def receive(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Pending:
        number = self.counts["receive"]
        self.counts["receive"] += 1
        self.elements["receive"] += torch.Size(shape).numel()
        return _ThreadPending(self, number, torch.Size(shape), dtype)

    def flush(self) -> None:
        """Do nothing: a send is complete when it returns."""


@dataclass
class _ThreadPending:
    channel: ThreadChannel
    number: int
    shape: torch.Size
    dtype: torch.dtype

    def wait(self) -> Tensor:
        channel, number = self.channel, self.number
        what = f"receive {number} on {channel.name} of {self.dtype}{list(self.shape)}"
        with channel.world.condition:
            channel.world.wait(lambda: number in channel._arrived, what)
            x = channel._arrived.pop(number)
        if x.shape != self.shape or x.dtype != self.dtype:
            raise RuntimeError(
                f"{what} met a send of {x.dtype}{list(x.shape)}: the two ends disagree on their order"
            )
        return x


class ProcessChannel:
    """A channel between the processes of global ranks `source` and `destination`.

    `group` None is the default group. A group of all ranks is right for gloo, which keeps the order of the messages of
    an ordered pair and does not mix the two directions. NCCL runs the operations of one communicator one after the
    other, so there a channel needs a group of its own two ranks, lest a send wait for a receive.
    """

    def __init__(self, source: int, destination: int, group: dist.ProcessGroup | None = None) -> None:
        self.source = source
        self.destination = destination
        self.group = group
        self.counts: Counter[str] = Counter()
        self.elements: Counter[str] = Counter()
        self._sent: deque[tuple[int, dist.Work, Tensor]] = deque()

    def send(self, x: Tensor) -> int:
        x, number = x.detach().contiguous(), self.counts["send"]
        self._sent.append((number, require_work(dist.isend(x, self.destination, self.group)), x))
        self.counts["send"] += 1
        self.elements["send"] += x.numel()
        # Free what has left only after posting `x`, which the receiver may be waiting for. (Gloo reports a send as
        # complete only to `wait`, which `release` and `flush` call.)
        while len(self._sent) > 1 and self._sent[0][1].is_completed():
            self._sent.popleft()
        return number

    def release(self, number: int) -> None:
        while self._sent and self._sent[0][0] <= number:
            self._sent.popleft()[1].wait()

    def receive(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Pending:
        x = torch.empty(tuple(shape), dtype=dtype, device=device)
        self.counts["receive"] += 1
        self.elements["receive"] += x.numel()
        return _ProcessPending(require_work(dist.irecv(x, self.source, self.group)), x)

    def connect(self, device: torch.device) -> None:
        """Pass one element, uncounted; return when both ends are connected."""
        x = torch.zeros(1, device=device)
        if dist.get_rank() == self.source:
            require_work(dist.isend(x, self.destination, self.group)).wait()
        else:
            require_work(dist.irecv(x, self.source, self.group)).wait()

    def flush(self) -> None:
        while self._sent:
            self._sent.popleft()[1].wait()


@dataclass
class _ProcessPending:
    work: dist.Work
    x: Tensor

    def wait(self) -> Tensor:
        self.work.wait()
        return self.x


def neighbours(mesh: Mesh) -> list[tuple[int, int]]:
    """Return all ordered pairs of global ranks that are pipeline neighbours, first and last included, ascending."""
    pairs = set()
    for rank in range(mesh.size):
        line = mesh.group("pipeline", rank)
        following = line[(line.index(rank) + 1) % len(line)]
        pairs |= {(rank, following), (following, rank)}
    return sorted(pair for pair in pairs if pair[0] != pair[1])


def thread_channels(mesh: Mesh, world: ThreadWorld) -> dict[tuple[int, int], ThreadChannel]:
    """Make all channels of `mesh` by (source, destination), for ranks that are threads of `world`."""
    return {pair: ThreadChannel(world, f"channel {pair[0]} -> {pair[1]}") for pair in neighbours(mesh)}


def process_channels(mesh: Mesh, device: torch.device) -> dict[tuple[int, int], ProcessChannel]:
    """Make this process's channels by (source, destination); every process of `mesh` must call it.

    All are connected here, on all ranks in the same order, before any schedule runs: NCCL connects two ranks at their
    first message, and that send waits.
    """
    own, nccl = dist.get_rank(), device.type == "cuda"
    groups = group_cache(dist.group.WORLD)
    channels: dict[tuple[int, int], ProcessChannel] = {}
    for pair in neighbours(mesh):
        group = groups(dist.new_group, pair, group_desc="channel") if nccl else groups.world
        if own in pair:
            channels[pair] = ProcessChannel(*pair, group)
            if nccl:
                channels[pair].connect(device)
    return channels
