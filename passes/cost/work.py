"""State what an operator computes, moves and communicates on one rank: the one statement of its cost.

The rules (`product_work`, `memory_work`) hold for any kind of number. They read the sizes of tensors from a `Sizes`:
one rank's integers, or expressions in the field's letters; decisions in a rule use the integers. The time that the
work takes depends on the device.
"""

from __future__ import annotations

import operator
from collections.abc import Container, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autoptd.passes.cost import memory_work, product_work
from autoptd.passes.cost.quantities import Product, Sizes, Value, Work, local_sizes, tensor_arguments
from autoptd.passes.ir.gradients import may_be_trained
from autoptd.passes.ir.program import Stage
from autoptd.runtime import aten, collectives

__all__ = ["Product", "Work", "backward_work", "forward_work", "is_free"]

FORWARDS = {**product_work.FORWARDS, **memory_work.FORWARDS}
BACKWARDS = {**product_work.BACKWARDS, **memory_work.BACKWARDS}
HALVES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def forward_work(node: fx.Node, sizes: Sizes = local_sizes) -> Work:
    """Return the work of one node's forward. Views cost nothing."""
    if node.op != "call_function" or is_free(node):
        return Work()
    rule: Any = (
        memory_work.compute if _is_rearranged(node) else FORWARDS.get(node.target, memory_work.compute)
    )
    return _in_half(rule(node, Value(sizes)), node)


def backward_work(
    node: fx.Node, trained: Container[fx.Node] | None = None, sizes: Sizes = local_sizes
) -> Work:
    """Return the work of one node's backward: gradients of its arguments from those of its results.

    It includes the sum of the gradients of a value with several readers, and adding a parameter's gradient to those of
    earlier microbatches. Views cost nothing unless a gradient must be put together. `trained` are the values that have
    a gradient (see `find_trained`); by default all that may have one.
    """

    def has_gradient(node: fx.Node) -> bool:
        return may_be_trained(node) if trained is None else node in trained

    wanted = [source for source in tensor_arguments(node) if has_gradient(source)]
    if node.op != "call_function" or not has_gradient(node) or not wanted:
        return Work()
    value = Value(sizes)
    other = memory_work.no_work if is_free(node) else memory_work.differentiate
    rule: Any = other if _is_rearranged(node) else BACKWARDS.get(node.target, other)
    work = _in_half(rule(node, value, wanted), node)
    for source in wanted:
        if source.op == "get_attr":
            work += _accumulate(source, value, 1)
    readers = sum(user.op == "output" or has_gradient(user) for user in node.users)
    if readers > 1 and isinstance(node.meta["val"], torch.Tensor):
        work += _accumulate(node, value, readers - 1)
    return work


def describe_saving(before: Sequence[Stage], after: Sequence[Stage]) -> str:
    """Describe what rewriting stages saves in a microbatch's forward: "40 -> 28 launches, 1,024 -> 512 bytes moved"."""
    old, new = (
        sum((forward_work(node) for stage in stages for node in stage.graph.nodes), Work())
        for stages in (before, after)
    )
    moved = [f"{int(work.read + work.written):,}" for work in (old, new)]
    return f"{old.launches:,} -> {new.launches:,} launches, {' -> '.join(moved)} bytes moved a microbatch"


def _is_rearranged(node: fx.Node) -> bool:
    """Whether an einsum is no product of two tensors: a transpose, a sum, a diagonal, or several products."""
    return node.target is aten.einsum.default and not product_work.find_factors(node)


def is_free(node: fx.Node) -> bool:
    """Return whether the forward only views its argument's memory differently. Contiguous copies are not free."""
    if node.target is operator.getitem or node.target is collectives.take_own:
        return True
    if node.target is collectives.copy_to_tensor:
        return True
    if not getattr(node.target, "is_view", False) or node.target is aten.contiguous.default:
        return False
    value = node.meta["val"]
    source = node.all_input_nodes[0].meta["val"] if node.all_input_nodes else value
    return not isinstance(value, torch.Tensor) or bool(value.dtype == source.dtype)


def _in_half(work: Work, node: fx.Node) -> Work:
    """The work with the half type that its products are computed in, where the node's value is of one."""
    if not work.products:
        return work
    value = node.meta["val"]
    half = HALVES.get((value if isinstance(value, torch.Tensor) else value[0]).dtype)
    if half is None:
        return work
    overlapped = work.overlapped and _in_half(work.overlapped, node)
    return replace(work, products=tuple(replace(p, dtype=half) for p in work.products), overlapped=overlapped)


def _accumulate(node: fx.Node, value: Value, times: int) -> Work:
    """Add a gradient to others, `times`."""
    size = value.bytes(node)
    return Work(
        elementwise=times * value.count(node), read=2 * times * size, written=times * size, launches=times
    )
