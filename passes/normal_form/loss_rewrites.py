"""Rewrite losses to the normal form: rows of scores with the classes last; others as torch computes them."""

from importlib import import_module
from typing import Any

import torch
from torch import fx

from autoptd.passes.ir.nodes import nodes_in
from autoptd.passes.ir.views import dim_map
from autoptd.passes.normal_form.writer import Call
from autoptd.passes.operators.table import Trait, has_trait
from autoptd.runtime import aten


def write_loss(call: Call) -> fx.Node | None:
    """Write a loss of [N, classes, ..] by rows, and that of a log_softmax as its cross-entropy."""
    target, x, labels = call.node.target, call.source, call.args[1]
    if labels.meta["val"].is_floating_point():
        return None if call.argument("weight") is not None else write_composite(call)
    if call.given.dim() > 2:
        classes = call.given.shape[1]
        x = call.reshape(_put_classes_last(call, x), [call.given.numel() // classes, classes])
    options = [call.argument(name) for name in ("weight", "reduction", "ignore_index")]
    if target is aten.cross_entropy_loss.default:
        options.append(call.argument("label_smoothing"))
    elif (scores := _read_log_softmax(call, x)) is not None:
        target, x = aten.cross_entropy_loss.default, scores
    if x is call.source:
        return None
    losses = call.derive(target, x, call.reshape(labels, [len(x.meta["val"])]), *options)
    return call.reshape(losses, list(call.val.shape))


def _put_classes_last(call: Call, x: fx.Node) -> fx.Node:
    """Permute [N, classes, ..]; what was permuted the other way, back."""
    order: list[Any] = [0, *range(2, x.meta["val"].dim()), 1]
    if has_trait(x, Trait.PERMUTES):
        dims, (x, *_) = dim_map(x), x.all_input_nodes
        order = [dims[d] for d in order]
    return x if order == sorted(order) else call.derive(aten.permute.default, x, order)


def _read_log_softmax(call: Call, logarithms: fx.Node) -> fx.Node | None:
    """Return rows of scores whose log_softmax, perhaps reshaped, are these `logarithms`; None where they are others."""
    node, val = logarithms, logarithms.meta["val"]
    while has_trait(node, Trait.RESHAPES):
        (node,) = node.all_input_nodes
    given: Any = node.args
    shape = node.meta["val"].shape
    last = val.dim() == 2 and shape[-1] == val.shape[-1] and given[1:2] in ((-1,), (len(shape) - 1,))
    if not last or not has_trait(node, Trait.LOG_SOFTMAX):
        return None
    (x,) = node.all_input_nodes
    if x.meta["val"].dtype != val.dtype:
        x = call.derive(aten.to.dtype, x, val.dtype)
    return call.reshape(x, list(val.shape))


def write_composite(call: Call) -> fx.Node:
    """Write the operators that torch makes this one of, as it calls them for such arguments."""
    given = list(dict.fromkeys(nodes_in((call.args, call.kwargs))))

    def run(*tensors: torch.Tensor) -> Any:
        args, kwargs = fx.map_arg((call.args, call.kwargs), dict(zip(given, tensors, strict=True)).__getitem__)
        return call.node.target(*args, **kwargs)  # type: ignore[operator]

    tool = import_module("torch.fx.experimental.proxy_tensor")  # which torch.export imports when it is needed
    traced: fx.Graph = tool.make_fx(run)(*(node.meta["val"] for node in given)).graph
    made: dict[Any, fx.Node] = dict(zip(traced.find_nodes(op="placeholder"), given, strict=True))
    for node in (node for node in traced.nodes if node.op == "call_function"):
        args, kwargs = fx.map_arg((node.args, node.kwargs), made.__getitem__)
        made[node] = call.writer.emit(node.target, args, {**call.meta, "val": node.meta["val"]}, kwargs)
    return made[traced.output_node().args[0]]


def write_index(call: Call) -> fx.Node | None:
    """Write one class of each row, ``x[arange(N), labels]``, as a gather; negative numbers count from the end."""
    shape, picks = call.given.shape, call.args[1]
    if len(picks) != 2 or len(shape) != 2 or None in picks:
        return None
    rows, labels = picks
    every = rows.target is aten.arange.default and rows.meta["val"].shape == shape[:1]
    if not every or labels.meta["val"].dtype != torch.int64 or labels.meta["val"].shape != shape[:1]:
        return None
    wrapped = call.derive(aten.add.Tensor, labels, shape[1])
    labels = call.derive(aten.where.self, call.derive(aten.lt.Scalar, labels, 0), wrapped, labels)
    found = call.derive(aten.gather.default, call.source, 1, call.derive(aten.unsqueeze.default, labels, 1))
    return call.emit(aten.squeeze.dim, found, 1)
