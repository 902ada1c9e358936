"""Point-to-point messages: one first-in-first-out channel per ordered pair of ranks, whose sends never wait."""

from collections import deque
from collections.abc import Sequence
from functools import partial
from itertools import count

import torch
import torch.distributed as dist
from torch import Tensor

from autoptd.runtime.comm.groups import Posted, group_cache, running
from autoptd.runtime.comm.threads import ThreadWorld
from autoptd.runtime.program.mesh import Mesh


class ThreadChannel:
    """A channel between two threads of `world`; both ends share the object. A send is complete when it returns."""

    def __init__(self, world: ThreadWorld, name: str) -> None:
        self.world = world
        self.name = name
        self.arrived: dict[int, Tensor] = {}
        self._sent, self._received = count(), count()

    def send(self, x: Tensor) -> None:
        with self.world.condition:
            # A copy, since a receiver in another process would have memory of its own too.
            self.arrived[next(self._sent)] = x.detach().clone()
            self.world.condition.notify_all()

    def release(self) -> None:
        """Do nothing: a receiver has a copy."""

    def receive(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Posted[Tensor]:
        return Posted(partial(self._take, next(self._received), tuple(shape), dtype))

    def _take(self, number: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        what = f"receive {number} on {self.name} of {dtype}{list(shape)}"
        with self.world.condition:
            self.world.wait(lambda: number in self.arrived, what)
            x = self.arrived.pop(number)
        if x.shape != shape or x.dtype != dtype:
            raise RuntimeError(f"{what} met a send of {x.dtype}{list(x.shape)}: the ends have other orders")
        return x


class ProcessChannel:
    """A channel between the processes of global ranks `source`, which sends, and `destination`, in the same order.

    `group` None is the default group. A group of all ranks is right for gloo, which keeps the order of the messages of
    an ordered pair and does not mix the two directions. NCCL runs the operations of one communicator one after the
    other, so there a channel needs a group of its own two ranks, lest a send wait for a receive.
    """

    def __init__(self, source: int, destination: int, group: dist.ProcessGroup | None = None) -> None:
        self.source = source
        self.destination = destination
        self.group = group
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()

    def send(self, x: Tensor) -> None:
        """Post `x`, which must not be changed before it is released."""
        x = x.detach().contiguous()
        work = dist.isend(x, self.destination, self.group)
        assert work is not None  # as for a process outside of the group
        self._sent.append((work, x))
        # Free what has left only after posting `x`, which the receiver may be waiting for. (Gloo reports a send as
        # complete only to `wait`, so that on a CPU all are held until `release`.)
        while len(self._sent) > 1 and self._sent[0][0].is_completed():
            self._sent.popleft()

    def release(self) -> None:
        """Wait until all tensors sent have left, at the end of a step; let go of them."""
        while self._sent:
            self._sent.popleft()[0].wait()

    def receive(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Posted[Tensor]:
        """Post the receive of the next tensor of the channel."""
        x = torch.empty(tuple(shape), dtype=dtype, device=device)
        return running(x, dist.irecv(x, self.source, self.group))

    def connect(self, device: torch.device) -> None:
        """Pass one element, uncounted; return when both ends are connected."""
        x, sends = torch.zeros(1, device=device), dist.get_rank() == self.source
        post, peer = (dist.isend, self.destination) if sends else (dist.irecv, self.source)
        running(x, post(x, peer, self.group)).wait()


Channel = ThreadChannel | ProcessChannel


def neighbours(mesh: Mesh) -> list[tuple[int, int]]:
    """Return all ordered pairs of global ranks that are pipeline neighbours, first and last included, ascending."""
    around = [pair for line in mesh.groups("pipeline") for pair in zip(line, line[1:] + line[:1], strict=True)]
    return sorted({pair for a, b in around if a != b for pair in ((a, b), (b, a))})


def thread_channels(mesh: Mesh, world: ThreadWorld) -> dict[tuple[int, int], ThreadChannel]:
    """Make all channels of `mesh` by (source, destination), for ranks that are threads of `world`."""
    return {pair: ThreadChannel(world, f"channel {pair[0]} -> {pair[1]}") for pair in neighbours(mesh)}


def process_channels(mesh: Mesh, device: torch.device) -> dict[tuple[int, int], ProcessChannel]:
    """Make this process's channels by (source, destination); every process of `mesh` must call it.

    All are connected here, in one order on all ranks, before any schedule: NCCL connects at a first message, and waits.
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
