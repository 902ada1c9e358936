"""Read a graph for fusion rules: single-use chains, biases and casts; and describe a match."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autoptd.passes.ir.nodes import shape_of
from autoptd.passes.ir.products import MatrixProduct, read_product
from autoptd.passes.operators.table import Trait, has_trait
from autoptd.runtime import aten


@dataclass(frozen=True)
class Call:
    """A call to write: its arguments are nodes, constants, or calls written before it."""

    target: Any
    args: tuple[Any, ...]
    like: fx.Node
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Match:
    """A chain that one call replaces.

    The call gives the value of the node that it is like, or those of `several` nodes. `members` are the further nodes
    that it makes superfluous, `constants` those to which it gives no gradient.
    """

    call: Call
    members: Collection[fx.Node] = ()
    several: tuple[fx.Node, ...] = ()
    constants: tuple[fx.Node, ...] = ()

    @property
    def results(self) -> tuple[fx.Node, ...]:
        """Return the nodes whose values the call gives, in graph order."""
        return self.several or (self.call.like,)


# x, the parameter of the last dimension's size that is added to it, and the nodes of the sum.
Biased = tuple[Any, Any, tuple[fx.Node, ...]]


def is_call(node: Any, *targets: Any) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


def is_reshape(node: Any) -> bool:
    return isinstance(node, fx.Node) and has_trait(node, Trait.RESHAPES)


def both_orders(node: Any) -> tuple[tuple[Any, Any], ...]:
    """Yield the two arguments of a commutative call, either first; nothing if it has more, or options."""
    if node.kwargs or len(node.args) != 2:
        return ()
    one, other = node.args
    return (one, other), (other, one)


def is_single(node: fx.Node) -> bool:
    """Return whether one node alone reads the value."""
    return len(node.users) == 1


def plain_add(node: Any) -> tuple[fx.Node, fx.Node] | None:
    """Return the terms of a sum of two tensors of the result's shape and dtype, without ``alpha``."""
    if not is_call(node, aten.add.Tensor) or node.kwargs or len(node.args) != 2:
        return None
    one, other = node.args
    val = node.meta["val"]
    fits = all(isinstance(term, fx.Node) and alike(term.meta["val"], val) for term in (one, other))
    return (one, other) if fits else None


def alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype


def is_vector(node: Any, size: int) -> bool:
    """Return whether the node is a parameter of one dimension of this size."""
    return isinstance(node, fx.Node) and node.op == "get_attr" and shape_of(node) == (size,)


def split_bias(node: fx.Node, members: Collection[fx.Node] = (), of_linear: bool = False) -> Biased | None:
    """Read a value as x + bias, through reshapes that keep the last dimension.

    Every value has one reader, besides `members`. A bias inside a linear costs nothing there and is left, unless
    `of_linear` asks for it; after the all-reduce of a row-parallel one it is added.
    """
    if not is_single(node) and not all(user in members for user in node.users):
        return None
    if is_reshape(node):
        source: Any = node.args[0]
        if shape_of(source)[-1:] != shape_of(node)[-1:]:
            return None
        inner = split_bias(source, of_linear=of_linear)
        if inner is None:
            return None
        x, bias, added = inner
        return Call(node.target, (x, *node.args[1:]), node), bias, (*added, node)
    linear = read_linear(node) if of_linear else None
    if linear is not None:
        target = aten.mm.default if linear.transposed else aten.linear.default
        return Call(target, (linear.x, linear.weight), node), linear.bias, (node,)
    for x, bias in both_orders(node) if is_call(node, aten.add.Tensor) and shape_of(node) else ():
        is_bias = is_vector(bias, shape_of(node)[-1])
        if is_bias and isinstance(x, fx.Node) and alike(x.meta["val"], node.meta["val"]):
            return x, bias, (node,)
    return None


def read_linear(node: Any) -> MatrixProduct | None:
    """Read a linear, or ``addmm``, with a bias of the result's dtype."""
    if not is_call(node, aten.linear.default, aten.addmm.default) or node.kwargs:
        return None
    product = read_product(node)
    if product is None or not is_vector(product.bias, shape_of(node)[-1]):
        return None
    return product if product.parameters[1].meta["val"].dtype == node.meta["val"].dtype else None
