"""Transfers over stage boundaries: scatter/gather between ranks (SC21 §4.1), or a buffer within one rank.

A boundary tensor that every tensor rank holds in full is sent as 1/t per tensor rank, over t links at once,
and joined by an all-gather inside the receiving node. A divided tensor is sent as it is.

A stage puts its outputs into a `SendBuffer` and takes its inputs from a `RecvBuffer`; for two stages of one rank a
`LocalBoundary` is both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from autoptd.runtime.comm.groups import Group, Posted
from autoptd.runtime.comm.point_to_point import Channel
from autoptd.runtime.program.manifest import Boundary
from autoptd.runtime.program.schedule import Action, Schedule


def is_scattered(boundary: Boundary, tensor: int, scatter_gather: bool) -> bool:
    """Return whether `boundary` is sent in `tensor` equal pieces; it is sent whole if its elements do not divide."""
    whole = boundary.placement.is_divided or not scatter_gather or tensor == 1
    return not whole and prod(boundary.shape) % tensor == 0


class LocalBoundary:
    """A stage boundary inside one rank: one stage takes the tensors that the other has put."""

    def __init__(self) -> None:
        self._held: dict[int, Sequence[Tensor]] = {}
        self.put = self._held.__setitem__
        self.take = self._held.pop
        self.clear = self._held.clear


class SendBuffer:
    """The sending end of one direction of a stage boundary; `sent` counts its elements under `label`."""

    def __init__(
        self,
        boundaries: Sequence[Boundary],
        channel: Channel,
        tensor: Group,
        scatter_gather: bool,
        sent: Counter[str],
        label: str,
    ) -> None:
        self._channel = channel
        self._tensor = tensor
        self._expected = [
            (b.name, b.shape, b.dtype, is_scattered(b, tensor.size, scatter_gather)) for b in boundaries
        ]
        self._sent = sent
        self._label = label
        self._held: dict[int, Sequence[Tensor]] = {}
        self._last: dict[int, int] = {}  # number of each microbatch's last message
        self.put = self._held.__setitem__

    def clear(self) -> None:
        self._held.clear()
        self._last.clear()

    def send(self, microbatch: int) -> None:
        """Post the tensors of `microbatch`; never wait."""
        for tensor, expected in zip(self._held.pop(microbatch), self._expected, strict=True):
            name, shape, dtype, scattered = expected
            if tensor.shape != shape or tensor.dtype is not dtype:
                raise ValueError(
                    f"{name} crosses {self._label} as {tensor.dtype}{list(tensor.shape)}, expected "
                    f"{dtype}{list(shape)}: correct the stage's text, or compile again"
                )
            piece = tensor.contiguous()
            if scattered:
                piece = piece.view(self._tensor.size, -1)[self._tensor.index]
            self._last[microbatch] = self._channel.send(piece)
            self._sent[self._label] += piece.numel()

    def release(self, microbatch: int) -> None:
        """Release the tensors of `microbatch`, which has arrived, and all that were sent before it over the channel."""
        if microbatch in self._last:  # not without boundary tensors, or in a step without backwards
            self._channel.release(self._last[microbatch])


class RecvBuffer:
    """The receiving end of one direction of a stage boundary.

    `acknowledge` maps a microbatch to a function to call when its tensors have arrived, which proves that earlier
    messages of this rank have arrived too.
    """

    def __init__(
        self,
        boundaries: Sequence[Boundary],
        channel: Channel,
        tensor: Group,
        scatter_gather: bool,
        device: torch.device,
    ) -> None:
        self._channel = channel
        self._tensor = tensor
        self._device = device
        self._expected: list[tuple[tuple[int, ...], torch.dtype, tuple[int, ...] | None]] = []
        for boundary in boundaries:
            scattered = is_scattered(boundary, tensor.size, scatter_gather)
            piece = (prod(boundary.shape) // tensor.size,) if scattered else boundary.shape
            self._expected.append((piece, boundary.dtype, boundary.shape if scattered else None))
        self.acknowledge: dict[int, Callable[[], None]] = {}
        self._posted: dict[int, list[Posted[Tensor]]] = {}
        self.clear = self._posted.clear

    def post(self, microbatch: int) -> None:
        """Post the receives of `microbatch`'s tensors."""
        self._posted[microbatch] = [
            self._channel.receive(shape, dtype, self._device) for shape, dtype, _ in self._expected
        ]

    def take(self, microbatch: int) -> list[Tensor]:
        """Wait for `microbatch`'s tensors and return them as the stage takes them."""
        tensors = []
        for posted, (*_, whole) in zip(self._posted.pop(microbatch), self._expected, strict=True):
            piece = posted.wait()
            if whole is not None:
                piece = torch.cat(self._tensor.all_gather(piece)).view(whole)
            tensors.append(piece)
        if tensors and microbatch in self.acknowledge:  # no tensor proves nothing
            self.acknowledge[microbatch]()
        return tensors


def find_acknowledged(schedule: Schedule, rank: int) -> Mapping[Action, Action]:
    """Return, for receives of pipeline rank `rank`, the last of its sends that the sender had used before it sent.

    A channel keeps its order, so everything sent earlier over the same channel has arrived too. This also holds in a
    step of forwards only, where three ranks or more acknowledge nothing.
    """
    place = {action: number for number, action in enumerate(schedule[rank])}
    p = len(schedule)
    found = {}
    for peer in {(rank - 1) % p, (rank + 1) % p} - {rank}:
        last = None
        for action in schedule[peer]:
            if action.kind.computes:
                used = action.receive.counterpart
                if used in place and (last is None or place[used] > place[last]):
                    last = used
            elif last is not None and action.kind.sends and action.counterpart in place:
                found[action.counterpart] = last
    return found
