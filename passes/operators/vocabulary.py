"""Lookups of rows, losses over a vocabulary, and other picks by a tensor of numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autoptd.passes.ir.nodes import argument, called, shape_of
from autoptd.passes.ir.views import contiguous_copies
from autoptd.passes.operators import axes as ax
from autoptd.passes.operators import proof
from autoptd.passes.operators.axis_map import AxisMap, opaque
from autoptd.passes.operators.layout import DimOrder, LayoutWriter, Written, plain_dim, size_of
from autoptd.passes.operators.localizer import Localizer
from autoptd.passes.operators.quantities import Value, Work, tensor_arguments
from autoptd.passes.operators.record import OperatorRules, Trait
from autoptd.runtime import aten, kernels
from autoptd.runtime.program.placement import AxisPlacement, Shard

# Axes


def _embedding_axes(axis_map: AxisMap, node: fx.Node) -> ax.Axes:
    """Contract the vocabulary in a lookup: one-hot(ids) x weight."""
    weight, ids = axis_map.of(node.args[0]), axis_map.of(node.args[1])
    axis_map.contractions[node] = weight[0]
    if node.args[1] not in axis_map.batch:
        ax.block(weight[0], f"{called(node)} looks up the same rows in every step")
    return (*ids, weight[1])


def _cross_entropy_axes(axis_map: AxisMap, node: fx.Node) -> ax.Axes:
    """Contract the vocabulary in the loss (SC21 §2.3: computed without gathering the logits)."""
    logits, target = axis_map.of(node.args[0]), axis_map.of(node.args[1])
    weighted = argument(node, 2, "weight") is not None or argument(node, 5, "label_smoothing", 0.0) != 0.0
    plain = len(logits) == 2 and len(target) == 1 and argument(node, 3, "reduction", 1) in (1, 2)
    if not plain or weighted:
        return _class_loss_axes(axis_map, node)
    ax.unify(logits[0], target[0])
    axis_map.contractions[node] = logits[1]
    return ()


def _class_loss_axes(axis_map: AxisMap, node: fx.Node) -> ax.Axes:
    """Keep the classes whole in a loss of [N, classes, ..] against [N, ..]."""
    logits, target = axis_map.of(node.args[0]), axis_map.of(node.args[1])
    classes = min(1, len(logits) - 1)
    rest = (*logits[:classes], *logits[classes + 1 :])
    for own, axis in zip(target, logits if len(target) == len(logits) else rest, strict=True):
        ax.unify(own, axis)
    weight = argument(node, 2, "weight")
    for axis in (logits[classes], *(axis_map.of(weight) if isinstance(weight, fx.Node) else ())):
        ax.block(axis, f"{called(node)} is a loss that is not divided")
    return target if shape_of(node) else ()


def _index_axes(axis_map: AxisMap, node: fx.Node) -> Any:
    """Rows picked out of one dimension by a tensor of numbers: that dimension is needed whole."""
    own = axis_map.of(node.args[0])
    picks = _picks(node)
    if len(picks) != 1:
        return opaque(axis_map, node)
    ((dim, numbers),) = picks.items()
    if numbers.meta["val"].is_floating_point() or numbers.meta["val"].dtype == torch.bool:
        return opaque(axis_map, node)
    ax.block(own[dim], f"{called(node)} picks from it")
    if numbers not in axis_map.batch:
        for axis in axis_map.of(numbers):
            ax.block(axis, f"{called(node)} picks by it")
    return (*own[:dim], *axis_map.of(numbers), *own[dim + 1 :])


def _picks(node: fx.Node) -> dict[int, fx.Node]:
    given: Any = node.args[1]
    return {d: numbers for d, numbers in enumerate(given) if numbers is not None}


def _gather_axes(axis_map: AxisMap, node: fx.Node) -> ax.Axes:
    """One element of a dimension for each element of an index: that dimension is needed whole."""
    own, index = axis_map.of(node.args[0]), axis_map.of(node.args[2])
    dim: Any = node.args[1]
    for d, (axis, picked) in enumerate(zip(own, index, strict=True)):
        if d != dim % len(own) and axis.size == picked.size:
            ax.unify(axis, picked)
        else:
            ax.block(axis, f"{called(node)} picks from it")
            ax.block(picked, f"{called(node)} picks by it")
    return index


# One rank's call


def _embedding_local(localizer: Localizer, node: fx.Node) -> fx.Node:
    """Vocabulary-parallel lookup: each rank looks up what its rows hold, the sum is the embedding."""
    axis = localizer.axis_map.contractions[node]
    if not localizer.is_divided((axis,)):
        return localizer.copy(node)
    padding = argument(node, 2, "padding_idx", -1)
    known = (axis.size, padding) if padding >= 0 else (axis.size,)
    args = (localizer.rank, localizer.whole(node.args[0]), localizer.whole(node.args[1]), *known)
    return localizer.add(kernels.embedding, args, node, name=node.name, partial=True)


def _cross_entropy_local(localizer: Localizer, node: fx.Node) -> fx.Node:
    """Vocabulary-parallel loss: the logits stay divided."""
    axis = localizer.axis_map.contractions.get(node)
    if axis is None or not localizer.is_divided((axis,)):
        return localizer.copy(node)
    reduction = {1: "mean", 2: "sum"}[argument(node, 3, "reduction", 1)]
    logits, target = localizer.whole(node.args[0]), localizer.whole(node.args[1])
    ignore = argument(node, 4, "ignore_index", -100)
    args = (localizer.rank, logits, target, axis.size, ignore, reduction)
    return localizer.add(kernels.cross_entropy, args, node, name=node.name)


# The proof


def _embedding_placed(node: fx.Node, placements: proof.Placements) -> AxisPlacement:
    """Prove a plain lookup: columns of the table may be divided, rows not."""
    placement = proof.read(node.args[0], placements)
    if placement.dim == 0:
        raise proof.PlacementError(
            f"looks up rows of {node.args[0]}, whose rows are divided over the tensor ranks: expected "
            "kernels.embedding"
        )
    return proof.UNKNOWN if placement.dim is None else replace(placement, dim=len(shape_of(node)) - 1)


def _divided_placed(
    dim: int, found: AxisPlacement, whole: str
) -> Callable[[fx.Node, proof.Placements], AxisPlacement]:
    """Return the rule of a kernel of a vocabulary, `dim` of its argument after the rank, that is divided."""

    def rule(node: fx.Node, placements: proof.Placements) -> AxisPlacement:
        placement = proof.read(node.args[1], placements)
        fits = isinstance(placement, Shard) and placement.dim in (dim, None)
        if fits or isinstance(placement, proof.Unknown):
            proof.check_vocabulary(node, placement)
            return found
        raise proof.PlacementError(
            f"reads {proof.describe(node.args[1], placements)}: expected it divided along dimension {dim}, the "
            f"vocabulary; use {whole} for a whole one"
        )

    return rule


def _whole_loss_placed(node: fx.Node, placements: proof.Placements) -> AxisPlacement:
    if proof.read(node.args[0], placements) is proof.UNKNOWN:
        return proof.UNKNOWN
    raise proof.PlacementError(
        f"takes as logits {proof.describe(node.args[0], placements)}: expected whole logits, or kernels.cross_entropy"
    )


def _index_placed(node: fx.Node, placements: proof.Placements) -> proof.Found:
    """Rows picked alike on every rank; the dimensions before the first picked one stay where they are."""
    picks, placement = _picks(node), proof.read(node.args[0], placements)
    if any(proof.read(numbers, placements) is not proof.WHOLE for numbers in picks.values()):
        return proof.UNKNOWN
    moved = len(picks) > 1 or len(shape_of(node)) != len(shape_of(node.args[0]))  # type: ignore[arg-type]
    return proof.UNKNOWN if placement.dim is not None and (placement.dim in picks or moved) else placement


# The sequence-first layout


def _embedding_order(writer: LayoutWriter, node: fx.Node) -> Written:
    weight, ids, *rest = node.args
    order = writer.order(ids)
    out = DimOrder((*order.dims, plain_dim(shape_of(node)[-1])), order.transposed)
    return writer.write((writer.restore(weight), writer.value(ids), *rest), node.kwargs), out


def _loss_order(writer: LayoutWriter, node: fx.Node) -> Written:
    """Rows of logits against labels: any order, the same for both."""
    logits, target, *rest = node.args
    order = writer.order(logits)
    rows = DimOrder(order.dims[:1], order.transposed)
    one = len(order.dims) == 2 and len(writer.order(target).dims) == 1
    if not order.merged or order.holds(1) or not one:
        return None
    others, kwargs = fx.map_arg((tuple(rest), node.kwargs), writer.restore)
    new = writer.write((writer.value(logits), writer.fit(target, rows), *others), kwargs)
    return new, rows if shape_of(node) else DimOrder(())


def _gather_order(writer: LayoutWriter, node: fx.Node) -> Written:
    source, dim, index = node.args[:3]
    order, dim = writer.order(source), int(dim)  # type: ignore[arg-type]
    picks = writer.order(index)
    sizes = enumerate(zip(order.shape, picks.shape, strict=True))
    same = all(a == b for d, (a, b) in sizes if order.holds(d))
    if order.holds(dim) or not same or not order.transposed:
        return None
    pairs = zip(order.dims, picks.dims, strict=True)
    out = replace(order, dims=tuple(a if size_of(a) == size_of(b) else b for a, b in pairs))
    return writer.write((writer.value(source), order.place(dim), writer.fit(index, order))), out


# Costs


def _embedding_work(node: fx.Node, value: Value) -> Work:
    """Of the table only the rows looked up; a divided table's are masked once more."""
    ids = tensor_arguments(node)[1]
    passes = 2 if node.target is kernels.embedding else 1
    size = passes * value.bytes(node)
    return Work(read=size + value.bytes(ids), written=size, launches=passes)


def _embedding_backward(node: fx.Node, value: Value, wanted: Sequence[fx.Node]) -> Work:
    """A whole table of zeros, to whose rows gradients are added."""
    table, ids = tensor_arguments(node)[:2]
    passes = 2 if node.target is kernels.embedding else 1
    size = value.bytes(node)
    return Work(
        elementwise=value.count(node),
        read=(passes + 1) * size + value.bytes(ids),
        written=value.bytes(table) + passes * size,
        launches=passes + 1,
    )


def _loss_work(node: fx.Node, value: Value) -> Work:
    """The vocabulary-parallel loss reads the logits once, and reduces three wide numbers per row."""
    logits, target = tensor_arguments(node)[:2]
    size = value.statistics(logits)
    return Work(
        elementwise=value.count(logits),
        read=value.bytes(logits) + value.bytes(target),
        written=2 * size,
        reduced=3 * size,
        launches=1,
    )


def _whole_loss_work(node: fx.Node, value: Value) -> Work:
    """log_softmax, whose result is kept, and the loss of it."""
    logits, target = tensor_arguments(node)[:2]
    size = value.bytes(logits)
    return Work(elementwise=value.count(logits), read=size + value.bytes(target), written=size, launches=2)


def _whole_loss_backward(node: fx.Node, value: Value, wanted: Sequence[fx.Node]) -> Work:
    """The loss's gradient, zero but for the targets, and log_softmax's from it and its result."""
    logits = tensor_arguments(node)[0]
    size = value.bytes(logits)
    return Work(elementwise=value.count(logits), read=2 * size, written=2 * size, launches=2)


_PADDED = Trait.PADDING_SAFE | Trait.KNOWS_SIZE
_LOOKUP = OperatorRules(placed=_embedding_placed, work=_embedding_work, backward=_embedding_backward)
_LOSS = OperatorRules(axes=_class_loss_axes, order=_loss_order, copies=contiguous_copies)

RULES: Mapping[Any, OperatorRules] = {
    aten.embedding: replace(
        _LOOKUP, axes=_embedding_axes, local=_embedding_local, order=_embedding_order, traits=_PADDED
    ),
    kernels.lookup: _LOOKUP,
    kernels.embedding: replace(
        _LOOKUP, placed=_divided_placed(0, proof.PARTIAL, "aten.embedding"), traits=Trait.ANY_PLACEMENT
    ),
    aten.cross_entropy_loss: replace(
        _LOSS,
        axes=_cross_entropy_axes,
        local=_cross_entropy_local,
        placed=_whole_loss_placed,
        work=_whole_loss_work,
        backward=_whole_loss_backward,
        traits=_PADDED,
    ),
    kernels.cross_entropy: OperatorRules(
        placed=_divided_placed(1, proof.WHOLE, "aten.cross_entropy_loss"),
        work=_loss_work,
        traits=Trait.ANY_PLACEMENT | Trait.SUMS_RANKS,
    ),
    **dict.fromkeys((aten.nll_loss, aten.nll_loss_nd), _LOSS),
    aten.nll_loss2d: replace(_LOSS, order=None, copies=None),
    aten.index: OperatorRules(axes=_index_axes, placed=_index_placed, keeps="nothing"),
    aten.gather: OperatorRules(axes=_gather_axes, order=_gather_order),
}
