"""The order of a value under the sequence-first layout: where batch and sequence are, and whether they changed places.

A dimension is a product of factors, outermost first, of which the batch and the sequence matter. A value in which the
sequence follows right behind the batch, [.., b, s, ..] or merged [.., b * s, ..], may be *transposed*: the new graph
holds it as [.., s, b, ..] or [.., s * b, ..]. The new graph holds all other values as the user wrote them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

Factor = tuple[str, int]  # (BATCH, 2), (SEQUENCE, 16), or ("", size) of anything else
Dim = tuple[Factor, ...]  # outermost first; () has size 1
BATCH, SEQUENCE = "b", "s"


def size_of(dim: Dim) -> int:
    return prod(size for _, size in dim)


def plain_dim(size: int) -> Dim:
    return () if size == 1 else (("", size),)


@dataclass(frozen=True)
class DimOrder:
    """A value's dimensions as the user orders them; `transposed`: the new graph has batch and sequence exchanged."""

    dims: tuple[Dim, ...]
    transposed: bool = False

    @cached_property
    def pair(self) -> tuple[int, bool] | None:
        """The dimension of the batch, right before the sequence's, and whether it is merged with that."""
        for at, dim in enumerate(self.dims):
            if dim and dim[0][0] == BATCH:
                if len(dim) > 1:
                    return (at, True) if dim[1][0] == SEQUENCE else None
                following = self.dims[at + 1 : at + 2]
                alone = following and len(following[0]) == 1 and following[0][0][0] == SEQUENCE
                return (at, False) if alone else None
        return None

    @property
    def shape(self) -> list[int]:
        """Sizes in the user's order."""
        return [size_of(dim) for dim in self.dims]

    @property
    def permutation(self) -> list[int]:
        """For each dimension of the new graph's value, which of the user's it is."""
        result = list(range(len(self.dims)))
        if self.transposed and self.pair is not None and not self.pair[1]:
            at = self.pair[0]
            result[at], result[at + 1] = at + 1, at
        return result

    def place(self, dim: int) -> int:
        """Return the position of the user's dimension `dim` in the new graph."""
        return self.permutation.index(dim % len(self.dims))

    def arrange(self, sizes: Sequence[int]) -> list[int]:
        """Return `sizes`, one per dimension in the user's order, in the new graph's order."""
        return [sizes[dim] for dim in self.permutation]

    def holds(self, dim: int) -> bool:
        """Return whether the user's dimension `dim` is the batch or the sequence of a transposed value (or both)."""
        if not self.transposed or self.pair is None:
            return False
        at, merged = self.pair
        return dim % len(self.dims) in ((at,) if merged else (at, at + 1))

    @property
    def merged(self) -> bool:
        """Return whether batch and sequence are one dimension of a transposed value."""
        return self.transposed and self.pair is not None and self.pair[1]

    @property
    def rows(self) -> tuple[int, int]:
        """Batch and sequence size of a value that has a pair."""
        assert self.pair is not None
        at, merged = self.pair
        batch, sequence = self.dims[at][:2] if merged else (self.dims[at][0], self.dims[at + 1][0])
        return batch[1], sequence[1]

    def replaced(self, dim: int, by: Dim) -> DimOrder:
        """Return the same with another dimension `dim`."""
        dim %= len(self.dims)
        return replace(self, dims=(*self.dims[:dim], by, *self.dims[dim + 1 :]))

    def resized(self, dim: int, size: int) -> DimOrder:
        """Dimension `dim` cut or grown to `size`: a batch stays a batch, a sequence a sequence."""
        own = self.dims[dim % len(self.dims)]
        return self.replaced(dim, ((own[0][0], size),) if len(own) == 1 and own[0][0] else plain_dim(size))

    def without(self, dims: Sequence[int]) -> DimOrder:
        """Return the same without some dimensions."""
        return replace(self, dims=tuple(dim for d, dim in enumerate(self.dims) if d not in dims))


def plain_order(shape: Sequence[int]) -> DimOrder:
    """Return the order of a value in the user's order, of which nothing is known."""
    return DimOrder(tuple(plain_dim(size) for size in shape))


def regroup(dims: Sequence[Dim], shape: Sequence[int]) -> tuple[Dim, ...]:
    """Regroup `dims` as a ``view`` as `shape` does: a batch or sequence that it cuts is none any longer."""
    pending = [factor for dim in dims for factor in dim][::-1]
    result: list[Dim] = []
    for size in shape:
        taken: list[Factor] = []
        left = size
        while pending and (left > 1 or pending[-1][1] == 1) and (left > 1 or not taken):
            name, extent = pending.pop()
            if left % extent == 0:
                taken.append((name, extent))
                left //= extent
            elif extent % left == 0:
                pending.append(("", extent // left))
                taken.append(("", left))
                left = 1
            else:  # they do not nest: what is left is one heap
                heap = extent * prod(other for _, other in pending)
                pending = [("", heap // left)] if heap % left == 0 else []
                taken.append(("", left))
                left = 1
        result.append(_joined(taken))
    return tuple(result)


def _joined(factors: Sequence[Factor]) -> Dim:
    """Neighbours that are neither batch nor sequence as one factor."""
    result: list[Factor] = []
    for name, size in factors:
        if not name and result and not result[-1][0]:
            result[-1] = ("", result[-1][1] * size)
        elif name or size != 1:
            result.append((name, size))
    return tuple(result)


def broadcast(orders: Sequence[DimOrder], shape: Sequence[int]) -> tuple[Dim, ...]:
    """Return the dimensions of an elementwise result; if its arguments disagree, nothing is known."""
    result: list[Dim] = []
    for back in range(len(shape), 0, -1):
        size = shape[-back]
        known = {
            order.dims[-back]
            for order in orders
            if len(order.dims) >= back and size_of(order.dims[-back]) == size and _is_named(order.dims[-back])
        }
        result.append(known.pop() if len(known) == 1 else plain_dim(size))
    return tuple(result)


def _is_named(dim: Dim) -> bool:
    return any(name for name, _ in dim)
