"""The work of a call on one rank: its FLOPs, memory traffic and communication.

The rules of `autoptd.passes.operators` hold for any kind of number. They read the sizes of tensors from a `Sizes`: one
rank's integers, or expressions in the field's letters; their decisions depend on the integers. Times are a device's.
"""

from collections.abc import Container, Sequence
from dataclasses import replace

import torch
from torch import fx

from autoptd.passes.ir.program import Stage, may_be_trained
from autoptd.passes.operators import quantities
from autoptd.passes.operators.quantities import Product, Sizes, Value, Work, local_sizes
from autoptd.passes.operators.table import Trait, has_trait, rules_of
from autoptd.runtime import aten

__all__ = ["Product", "Work", "backward_work", "forward_work", "is_free"]

HALVES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def forward_work(node: fx.Node, sizes: Sizes = local_sizes) -> Work:
    """Return the work of the forward of one node of a stage's graph. Views cost nothing."""
    if node.op != "call_function" or is_free(node):
        return Work()
    return _in_half((rules_of(node).work or quantities.compute)(node, Value(sizes)), node)


def backward_work(node: fx.Node, trained: Container[fx.Node] | None = None, sizes: Sizes = local_sizes) -> Work:
    """Return the work of the backward of one node: gradients of its arguments from those of its results.

    Included is that the gradients of a value with several readers are summed, and that a parameter's gradient is
    added to those of the microbatches before. Views cost nothing but where a gradient must be put together. `trained`
    are the values that have a gradient (see `find_trained`); by default all that may have one.
    """

    def has_gradient(node: fx.Node) -> bool:
        return may_be_trained(node) if trained is None else node in trained

    wanted = [source for source in quantities.tensor_arguments(node) if has_gradient(source)]
    if node.op != "call_function" or not has_gradient(node) or not wanted:
        return Work()
    value = Value(sizes)
    rules = rules_of(node)
    if rules.backward is not None:
        work = _in_half(rules.backward(node, value, wanted), node)
    elif is_free(node):
        work = Work()
    else:
        arguments = quantities.differentiable_arguments(node)
        kept = {"arguments": arguments, "result": [node], "nothing": []}[rules.keeps]
        work = _in_half(quantities.differentiate(node, value, wanted, kept), node)
    for source in wanted:
        if source.op == "get_attr":
            work += _accumulate(source, value, 1)
    readers = sum(user.op == "output" or has_gradient(user) for user in node.users)
    if readers > 1 and isinstance(node.meta["val"], torch.Tensor):
        work += _accumulate(node, value, readers - 1)
    return work


def describe_saving(before: Sequence[Stage], after: Sequence[Stage]) -> str:
    """Describe what rewriting stages saves in a microbatch's forward: "40 -> 28 launches, 1,024 -> 512 bytes moved"."""
    works = ([forward_work(n) for stage in stages for n in stage.graph.nodes] for stages in (before, after))
    sums = [(sum(work.launches for work in own), int(sum(work.moved for work in own))) for own in works]
    (launches, moved), (fewer, less) = sums
    return f"{launches:,} -> {fewer:,} launches, {moved:,} -> {less:,} bytes moved a microbatch"


def is_free(node: fx.Node) -> bool:
    """Return whether the forward only views its argument's memory differently. Contiguous copies are not free."""
    if has_trait(node, Trait.FREE):
        return True
    if not getattr(node.target, "is_view", False) or node.target is aten.contiguous.default:
        return False
    value = node.meta["val"]
    source = node.all_input_nodes[0].meta["val"] if node.all_input_nodes else value
    return not isinstance(value, torch.Tensor) or bool(value.dtype == source.dtype)


def _in_half(work: Work, node: fx.Node) -> Work:
    """Return the work with the half type of its products, if the node's value has one."""
    if not work.products:
        return work
    value = node.meta["val"]
    half = HALVES.get((value if isinstance(value, torch.Tensor) else value[0]).dtype)
    if half is None:
        return work
    overlapped = work.overlapped and _in_half(work.overlapped, node)
    return replace(work, products=tuple(replace(p, dtype=half) for p in work.products), overlapped=overlapped)


def _accumulate(node: fx.Node, value: Value, times: int) -> Work:
    size = times * value.bytes(node)
    return Work(elementwise=times * value.count(node), read=2 * size, written=size, launches=times)
