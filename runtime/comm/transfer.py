"""Transfers over stage boundaries: scatter/gather between ranks (SC21 §4.1), or a buffer within one rank.

A boundary tensor that every tensor rank holds in full is sent as 1/t per tensor rank, over t links at once,
and joined by an all-gather inside the receiving node. A divided tensor is sent as it is.

A stage puts outputs into a `SendBuffer` and takes inputs from a `RecvBuffer`; on one rank a `LocalBoundary` is both.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from autoptd.runtime.comm.groups import Group, Posted
from autoptd.runtime.comm.point_to_point import Channel
from autoptd.runtime.program.manifest import Boundary


def is_scattered(boundary: Boundary, tensor: int, scatter_gather: bool) -> bool:
    """Return whether `boundary` is sent in `tensor` equal pieces; it is sent whole if its elements do not divide."""
    whole = boundary.placement.is_divided or not scatter_gather or tensor == 1
    return not whole and prod(boundary.shape) % tensor == 0


class LocalBoundary(dict[int, Sequence[Tensor]]):
    """A stage boundary inside one rank: one stage takes the tensors of a microbatch that the other has put."""

    put = dict.__setitem__
    take = dict.pop


@dataclass(eq=False)
class SendBuffer:
    """The sending end of one direction of a stage boundary; errors name it by its `label`."""

    boundaries: Sequence[Boundary]
    channel: Channel
    tensor: Group
    scatter_gather: bool
    label: str

    def __post_init__(self) -> None:
        self._held: dict[int, Sequence[Tensor]] = {}
        self.put = self._held.__setitem__
        self.clear = self._held.clear

    def send(self, microbatch: int) -> None:
        """Post the tensors of `microbatch`; never wait."""
        for tensor, boundary in zip(self._held.pop(microbatch), self.boundaries, strict=True):
            if tensor.shape != boundary.shape or tensor.dtype is not boundary.dtype:
                raise ValueError(
                    f"{boundary.name} crosses {self.label} as {tensor.dtype}{list(tensor.shape)}, expected "
                    f"{boundary.dtype}{list(boundary.shape)}: correct the stage's text, or compile again"
                )
            piece = tensor.contiguous()
            if is_scattered(boundary, self.tensor.size, self.scatter_gather):
                piece = piece.view(self.tensor.size, -1)[self.tensor.index]
            self.channel.send(piece)


@dataclass(eq=False)
class RecvBuffer:
    """The receiving end of one direction of a stage boundary."""

    boundaries: Sequence[Boundary]
    channel: Channel
    tensor: Group
    scatter_gather: bool
    device: torch.device

    def __post_init__(self) -> None:
        self._scattered = [is_scattered(b, self.tensor.size, self.scatter_gather) for b in self.boundaries]
        self._posted: dict[int, list[Posted[Tensor]]] = {}
        self.clear = self._posted.clear

    def post(self, microbatch: int) -> None:
        """Post the receives of `microbatch`'s tensors."""
        posted = self._posted[microbatch] = []
        for boundary, scattered in zip(self.boundaries, self._scattered, strict=True):
            shape = (prod(boundary.shape) // self.tensor.size,) if scattered else boundary.shape
            posted.append(self.channel.receive(shape, boundary.dtype, self.device))

    def take(self, microbatch: int) -> list[Tensor]:
        """Wait for `microbatch`'s tensors and return them as the stage takes them."""
        tensors = []
        received = zip(self.boundaries, self._scattered, self._posted.pop(microbatch), strict=True)
        for boundary, scattered, posted in received:
            piece = posted.wait()
            if scattered:
                piece = torch.cat(self.tensor.all_gather(piece)).view(boundary.shape)
            tensors.append(piece)
        return tensors
