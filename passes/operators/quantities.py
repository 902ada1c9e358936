"""Quantities of work in any kind of number: products, FLOPs, bytes, launches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import fx

from autoptd.passes.ir.nodes import as_results, has_gradients, results_of
from autoptd.runtime.kernels.operands import widen

Number = Any  # an int or a sympy expression
Sizes = Callable[[fx.Node], Any]  # a value's shape, a tuple of shapes for several results


@dataclass(frozen=True)
class Product:
    """A batch of `batch` GEMMs of [rows, inner] by [inner, columns].

    `repeated`: scores that a fused attention's backward computes again. `dtype`: the half type of autocast, by name.
    `share`: of the FLOPs that are computed. A fused causal attention leaves out half, which SC21's FLOPs count too.
    """

    batch: Number
    rows: Number
    columns: Number
    inner: Number
    repeated: bool = False
    dtype: str = ""
    share: float = 1.0

    @property
    def flops(self) -> Number:
        return 2 * self.batch * self.rows * self.columns * self.inner


@dataclass(frozen=True)
class Work:
    """The work of one direction of one operator, on one rank and one microbatch.

    `elementwise` are FLOPs besides the products, one per element; `read` and `written` bytes of memory; `reduced`
    the bytes that are all-reduced over the tensor group, `gathered` those that are all-gathered or reduce-scattered, of
    all ranks together, `dispatched` those that a rank sends to the ranks that share experts with it, in an all-to-all;
    `launches` the kernels that a device starts. `overlapped` is the part of the work that is
    computed while these run; None if the device waits for them.
    """

    products: tuple[Product, ...] = ()
    elementwise: Number = 0
    read: Number = 0
    written: Number = 0
    reduced: Number = 0
    gathered: Number = 0
    dispatched: Number = 0
    launches: int = 0
    overlapped: Work | None = None

    @property
    def flops(self) -> Number:
        """The FLOPs of products and elementwise operations."""
        return sum((product.flops for product in self.products), self.elementwise)

    @property
    def moved(self) -> Number:
        """The bytes read and written."""
        return self.read + self.written

    @property
    def exchanged(self) -> Number:
        """The bytes of the values that tensor ranks reduce, scatter and gather."""
        return self.reduced + self.gathered

    def __add__(self, other: Work) -> Work:
        sums = {name: own + getattr(other, name) for name, own in vars(self).items() if name != "overlapped"}
        overlapped = sum(filter(None, (self.overlapped, other.overlapped)), Work()) or None
        return Work(**sums, overlapped=overlapped)

    def __bool__(self) -> bool:
        return self.launches > 0 or self.exchanged != 0


def local_sizes(node: fx.Node) -> Any:
    """Return one rank's shape of a value in integers."""
    return as_results(node, [tuple(value.shape) for value in results_of(node)])


class Value:
    """The elements and bytes of values, in the numbers of one `Sizes`."""

    def __init__(self, sizes: Sizes) -> None:
        self.shape = sizes

    def _sum(self, node: fx.Node, measure: Callable[[torch.Tensor, Number], Number]) -> Number:
        values, shape = results_of(node), self.shape(node)
        pairs = zip(values, [shape] if values[0] is node.meta["val"] else shape, strict=True)
        return sum(measure(v, prod(own)) for v, own in pairs if isinstance(v, torch.Tensor))

    def count(self, node: fx.Node) -> Number:
        return self._sum(node, lambda value, count: count)

    def bytes(self, node: fx.Node) -> Number:
        return self._sum(node, lambda value, count: count * value.element_size())

    def statistics(self, node: fx.Node) -> Number:
        """Return the bytes of one wide number per row of the result."""
        return prod(self.shape(node)[:-1]) * widen(node.meta["val"].dtype).itemsize


def tensor_arguments(node: fx.Node) -> list[fx.Node]:
    """Return the tensor arguments, each once."""
    return [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), (torch.Tensor, tuple, list))]


def differentiable_arguments(node: fx.Node) -> list[fx.Node]:
    """Return the tensor arguments that may have gradients, each once."""
    return [source for source in tensor_arguments(node) if has_gradients(source.meta["val"])]


def largest(node: fx.Node, operands: Iterable[fx.Node]) -> fx.Node:
    """Return the node itself, or the operand with more elements than its results: a reduction reads them all."""
    return max((node, *operands), key=lambda own: sum(value.numel() for value in results_of(own)))


def compute(node: fx.Node, value: Value) -> Work:
    """Return the work of a memory-bound operator, which reads its arguments and writes its results."""
    operands = tensor_arguments(node)
    count, read = value.count(largest(node, operands)), sum(map(value.bytes, operands))
    return Work(elementwise=count, read=read, written=value.bytes(node), launches=1)


def differentiate(node: fx.Node, value: Value, made: Sequence[fx.Node], kept: Iterable[fx.Node]) -> Work:
    """Return the work of a memory-bound backward, which reads the results' gradients and what was `kept`.

    It writes the gradients of the arguments in `made`; where there are none, nothing is done.
    """
    if not made:
        return Work()
    read, written = value.bytes(node) + sum(map(value.bytes, kept)), sum(map(value.bytes, made))
    return Work(elementwise=value.count(largest(node, made)), read=read, written=written, launches=1)
