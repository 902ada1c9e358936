"""Point-to-point transfer: one first-in-first-out channel per ordered pair of ranks; sends post and never wait."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from autoptd.runtime.threads import ThreadWorld


class Pending(Protocol):
    """A tensor on its way here."""

    def wait(self) -> Tensor:
        """The tensor, once it has arrived. Call it once."""


class Channel(Protocol):
    """From one rank to one other: its source sends, its destination receives, in the same order.

    `counts` and `elements` count this end's calls and their elements, by kind: "send", "receive".
    """

    counts: Counter[str]
    elements: Counter[str]

    def send(self, x: Tensor) -> None:
        """Post `x`, which must not be changed before `flush`."""

    def receive(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Pending:
        """Post a receive of the next tensor of the channel."""

    def flush(self) -> None:
        """Wait until all that was sent has left; at the end of a step."""


class ThreadChannel:
    """A channel between two threads of `world`; both ends share the object."""

    def __init__(self, world: ThreadWorld, name: str) -> None:
        self.world = world
        self.name = name
        self.counts: Counter[str] = Counter()
        self.elements: Counter[str] = Counter()
        self._arrived: dict[int, Tensor] = {}

    def send(self, x: Tensor) -> None:
        with self.world.condition:
            self.counts["send"] += 1
            self.elements["send"] += x.numel()
            # The receiver gets memory of its own, as from another process.
            self._arrived[self.counts["send"] - 1] = x.detach().clone()
            self.world.condition.notify_all()

    def receive(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Pending:
        number = self.counts["receive"]
        self.counts["receive"] += 1
        self.elements["receive"] += torch.Size(shape).numel()
        return _ThreadPending(self, number, torch.Size(shape), dtype)

    def flush(self) -> None:
        """Nothing to wait for: a send is complete when it returns."""


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
            raise RuntimeError(f"{what} met a send of {x.dtype}{list(x.shape)}: the ends disagree on their order")
        return x


class ProcessChannel:
    """A channel between the processes of global ranks `source` and `destination`.

    `group` None uses the default group: right for gloo, where tag-less messages of an ordered pair keep their order
    and directions do not meet. NCCL runs what is posted to one communicator in turn, so there a channel has a
    two-rank group of its own, and a send never waits behind a receive; `process_channel` makes it.
    """

    def __init__(self, source: int, destination: int, group: dist.ProcessGroup | None = None) -> None:
        self.source = source
        self.destination = destination
        self.group = group
        self.counts: Counter[str] = Counter()
        self.elements: Counter[str] = Counter()
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()

    def send(self, x: Tensor) -> None:
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()
        self.counts["send"] += 1
        self.elements["send"] += x.numel()
        x = x.detach().contiguous()
        self._sent.append((_work(dist.isend(x, self.destination, self.group)), x))

    def receive(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Pending:
        x = torch.empty(tuple(shape), dtype=dtype, device=device)
        self.counts["receive"] += 1
        self.elements["receive"] += x.numel()
        return _ProcessPending(_work(dist.irecv(x, self.source, self.group)), x)

    def flush(self) -> None:
        while self._sent:
            self._sent.popleft()[0].wait()


@dataclass
class _ProcessPending:
    work: dist.Work
    x: Tensor

    def wait(self) -> Tensor:
        self.work.wait()
        return self.x


def process_channel(source: int, destination: int) -> ProcessChannel:
    """The channel from global rank `source` to `destination`; to be called by both, in the same order of channels."""
    group = None
    if dist.get_backend() == "nccl":
        group = dist.new_group([source, destination], use_local_synchronization=True)
    return ProcessChannel(source, destination, group)


def _work(work: dist.Work | None) -> dist.Work:
    if work is None:
        raise RuntimeError("this process is no member of the channel's group")
    return work
