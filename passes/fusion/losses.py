"""Replace losses by the loss kernel, which keeps one tensor as wide as the vocabulary.

It sums half-precision logits in float32 without the model's copy in float32; of whole logits it keeps the softmax,
which becomes the gradient, where torch makes two more tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autoptd.passes.fusion.patterns import Call, Match, is_call, is_reshape, is_single
from autoptd.passes.ir.nodes import argument, shape_of
from autoptd.runtime import aten, kernels
from autoptd.runtime.kernels.precision import HALF

REDUCTIONS = {1: "mean", 2: "sum"}


def match_half_loss(node: fx.Node) -> Match | None:
    """Match kernels.cross_entropy(logits.float(), target), of logits divided over the tensor ranks."""
    rank, logits, *rest = node.args
    narrow, cast = _narrow(logits)
    options = {**node.kwargs, "dtype": torch.float32}
    return Match(Call(kernels.cross_entropy, (rank, narrow, *rest), node, options), cast) if cast else None


def match_whole_loss(node: fx.Node) -> Match | None:
    """Match cross_entropy(logits, target) on one tensor rank, which the kernel takes for the only one."""
    logits: Any = node.args[0]
    target: Any = node.args[1]
    weight, reduction, ignored, smoothing = (argument(node, i, name, d) for i, name, d in _OPTIONS)
    plain = weight is None and smoothing == 0 and reduction in REDUCTIONS
    if not plain or len(shape_of(logits)) != 2 or len(shape_of(target)) != 1:
        return None
    narrow, cast = _narrow(logits)
    options = {"ignore_index": ignored, "reduction": REDUCTIONS[reduction]}
    options |= {"dtype": torch.float32} if cast else {}
    arguments = (next(iter(node.graph.nodes)), narrow, target, shape_of(logits)[1])
    return Match(Call(kernels.cross_entropy, arguments, node, options), cast)


_OPTIONS = ((2, "weight", None), (3, "reduction", 1), (4, "ignore_index", -100), (5, "label_smoothing", 0.0))


def _narrow(logits: Any) -> tuple[Any, list[fx.Node]]:
    """Return the half-precision logits behind a cast to float32 and single-use reshapes, and those nodes.

    Other logits as they are, and no nodes.
    """
    if not isinstance(logits, fx.Node) or not is_single(logits):
        return logits, []
    if is_reshape(logits):
        inner, cast = _narrow(logits.args[0])
        shaped = Call(logits.target, (inner, *logits.args[1:]), logits)
        return (shaped, [*cast, logits]) if cast else (logits, [])
    source: Any = logits.args[0] if is_call(logits, aten.to.dtype) else None
    half = source is not None and source.meta["val"].dtype in HALF
    return (source, [logits]) if half and logits.meta["val"].dtype == torch.float32 else (logits, [])
