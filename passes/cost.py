"""What a node costs on one rank: FLOPs, memory traffic, and nanoseconds of forward and backward.

Rough on purpose: the cut needs proportions. All numbers come from the shapes in ``meta["val"]``, which are
one rank's already.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

import torch
from torch import fx

from autoptd.passes.program import tensor_bytes
from autoptd.runtime import aten, collectives, kernels

NANOSECONDS = 10**9


@dataclass(frozen=True)
class Device:
    """Rates of one device: FLOP/s reached in 2-byte GEMMs, and bytes/s of its memory and links.

    The defaults are an A100's: half of 312 TFLOP/s, as SC21 §5.1 measures, NVLink inside a server and 200
    Gb/s InfiniBand between. `latency`, in nanoseconds, is what the smallest kernel or message takes: tiny
    models are cut by their number of operators.
    """

    flops: float = 156e12
    memory: float = 1.5e12
    tensor_link: float = 300e9
    pipeline_link: float = 25e9
    latency: int = 1_000


REFERENCE = Device()

# GEMM -> the position of its argument whose last dimension is contracted.
GEMMS: Mapping[Any, int] = {
    aten.linear.default: 0,
    aten.mm.default: 0,
    aten.bmm.default: 0,
    aten.matmul.default: 0,
    kernels.split_linear: 0,
    aten.addmm.default: 1,
    aten.baddbmm.default: 1,
}
# Lookups -> the position of their table.
LOOKUPS: Mapping[Any, int] = {aten.embedding.default: 0, kernels.embedding: 1}


def node_flops(node: fx.Node) -> int:
    """Forward FLOPs: 2mkn for a GEMM, an attention's products in full, else one per element."""
    if node.op != "call_function" or is_free(node) or node.target in COLLECTIVES:
        return 0
    value = node.meta["val"]
    if node.target in GEMMS:
        factor: Any = node.args[GEMMS[node.target]]
        flops: int = 2 * value.numel() * factor.meta["val"].shape[-1]
        return flops
    if node.target is aten.scaled_dot_product_attention.default:
        factors: Any = node.args[:3]
        q, k, v = (tensor.meta["val"].shape for tensor in factors)
        return int(2 * q[:-1].numel() * k[-2] * (q[-1] + v[-1]))
    if node.target is aten.einsum.default:
        operands: Any = node.args[1]
        return _einsum_flops(str(node.args[0]), [operand.meta["val"] for operand in operands])
    return _sum_over(value, torch.Tensor.numel)


def node_bytes(node: fx.Node) -> int:
    """Bytes that a forward reads and writes: arguments and result; of a table only the rows looked up."""
    if node.op != "call_function" or is_free(node):
        return 0
    written = _bytes(node)
    if node.target in LOOKUPS:
        return 2 * written
    read = sum(map(_bytes, node.all_input_nodes))
    return int(read + written)


def node_nanoseconds(node: fx.Node, *, tensor: int, device: Device = REFERENCE) -> int:
    """Time of forward and backward on one of `tensor` tensor ranks; views are free, 0.

    A GEMM's backward is two GEMMs, any other backward twice the arithmetic; it reads the result's gradient
    and the arguments, and writes the arguments' gradients. Compute or memory, whichever takes longer, and
    then communication by rings.
    """
    if node.op != "call_function" or is_free(node):
        return 0
    value = node.meta["val"]
    first = value[0] if isinstance(value, (tuple, list)) else value
    forward, written = node_bytes(node), _bytes(node)
    compute, moved, least = node_flops(node), forward, device.latency
    if first.is_floating_point():
        least *= 2
        compute *= 3
        moved += 2 * (forward - written) + written
    if node.target in LOOKUPS:
        table: Any = node.args[LOOKUPS[node.target]]
        moved += 3 * _bytes(table)  # its gradient is made whole, and added to the others
    rate = device.flops * min(1.0, 2 / first.element_size())
    time = max(compute / rate, moved / device.memory)
    if node.target in COLLECTIVES:
        time += 2 * (tensor - 1) / tensor * COLLECTIVES[node.target](node) / device.tensor_link
    whole: int = ceil(time * NANOSECONDS)
    return max(least, whole)


def transfer_nanoseconds(
    value: torch.Tensor, *, divided: bool, gradient: bool, tensor: int, device: Device = REFERENCE
) -> int:
    """Time to send one tensor to the next stage, and its `gradient` back.

    Of an undivided tensor each tensor rank sends 1/t, all-gathered on arrival (SC21 §4.1).
    """
    size = tensor_bytes(value)
    share = size if divided else size / tensor
    time = share / device.pipeline_link + (size - share) / device.tensor_link
    return (ceil(time * NANOSECONDS) + device.latency) * (2 if gradient else 1)


def is_free(node: fx.Node) -> bool:
    """Whether the node only looks at its argument's memory in another way. Contiguous copies are not free."""
    if node.target is operator.getitem or node.target is collectives.take_own:
        return True
    if not getattr(node.target, "is_view", False) or node.target is aten.contiguous.default:
        return False
    value = node.meta["val"]
    source = node.all_input_nodes[0].meta["val"] if node.all_input_nodes else value
    return not isinstance(value, torch.Tensor) or bool(value.dtype == source.dtype)


def _loss_statistics(node: fx.Node) -> int:
    """Bytes that a vocabulary-parallel loss reduces: three float32 numbers per row."""
    logits: Any = node.args[1]
    return 12 * int(logits.meta["val"].shape[0])


def _einsum_flops(equation: str, operands: Sequence[torch.Tensor]) -> int:
    """2 x the sizes of all letters, what "..." stands for counted once: a GEMM's 2mkn for two operands."""
    sizes: dict[Any, int] = {}
    groups = equation.replace(" ", "").split("->")[0].split(",")
    for group, operand in zip(groups, operands, strict=True):
        head, _, tail = group.partition("...")
        rest = range(len(head), operand.dim() - len(tail))
        # Dimensions of "..." are numbered from the right, as they broadcast.
        letters = [*head, *(index - rest.stop for index in rest), *tail]
        for letter, size in zip(letters, operand.shape, strict=True):
            sizes[letter] = max(size, sizes.get(letter, 1))
    return 2 * prod(sizes.values())


def _bytes(node: fx.Node) -> int:
    value = node.meta.get("val")
    return 0 if value is None else _sum_over(value, tensor_bytes)


def _sum_over(value: Any, measure: Callable[[torch.Tensor], int]) -> int:
    if isinstance(value, torch.Tensor):
        return measure(value)
    return sum(measure(tensor) for tensor in value if isinstance(tensor, torch.Tensor))


# Collective -> the bytes that it all-reduces, forward or backward.
COLLECTIVES: Mapping[Any, Callable[[fx.Node], int]] = {
    collectives.copy_to_tensor: _bytes,
    collectives.reduce_from_tensor: _bytes,
    kernels.cross_entropy: _loss_statistics,
}
