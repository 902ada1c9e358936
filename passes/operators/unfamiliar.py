"""The costs of an operator without a record: its products as torch's own counter finds them, or a bound of these."""

from collections.abc import Sequence
from importlib import import_module
from math import isqrt
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from autoptd.passes.ir.nodes import has_gradients, results_of, shape_of
from autoptd.passes.operators import quantities
from autoptd.passes.operators.quantities import Product, Value, Work, compute, differentiate, tensor_arguments
from autoptd.passes.operators.record import OperatorRules

_counted: dict[str, int] = {}


def count_products(node: fx.Node) -> int:
    """Return the FLOPs of the products that torch finds in a call, if the operator is made of others."""
    call = fx.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
    key = f"{node.target}{call}"
    if key not in _counted:
        tool = import_module("torch.utils.flop_counter")  # when it is needed: it imports Triton
        with tool.FlopCounterMode(display=False) as counter, torch.no_grad():
            node.target(*call[0], **call[1])  # type: ignore[operator]
        _counted[key] = counter.get_total_flops()
    return _counted[key]


def bound_hidden(node: fx.Node) -> int:
    """Return the most FLOPs of products that a call may hide; 0 if torch finds some, or it works by elements or picks.

    A product of two tensors has at most 2 sqrt(a b c) FLOPs, from their elements and those of its result (the
    inequality of Loomis and Whitney): just as many if it sums over one dimension, without a batch.
    """
    target: Any = node.target
    own = [value for source in tensor_arguments(node) for value in results_of(source)]
    floats = sorted(value.numel() for value in own if has_gradients(value))
    aten = isinstance(target, OpOverload) and target.namespace == "aten"
    alone = len(floats) < 2 and "linalg" not in str(target)
    harmless = aten and (alone or len(floats) < len(own) or torch.Tag.pointwise in target.tags)
    if harmless or not floats or count_products(node):
        return 0
    first, second = (floats * 2)[-2:]
    return 2 * isqrt(first * second * max(value.numel() for value in results_of(node)))


def count_work(node: fx.Node, value: Value) -> Work:
    """Return the work of a call by what torch counts of it."""
    return compute(node, value) + _products(node)


def count_backward(node: fx.Node, value: Value, wanted: Sequence[fx.Node]) -> Work:
    """Each product has a gradient for each of its factors, which vectors such as a bias are none of."""
    factors = min(2, sum(len(shape_of(source)) > 1 for source in wanted))
    return differentiate(node, value, wanted, quantities.differentiable_arguments(node)) + _products(node, factors)


def _products(node: fx.Node, times: int = 1) -> Work:
    side = round((count_products(node) / 2) ** (1 / 3))  # a cube, as tiles would waste most of a single row
    return Work((Product(1, side, side, count_products(node) / 2 / side**2),) * times if side else ())


UNFAMILIAR = OperatorRules(work=count_work, backward=count_backward)
