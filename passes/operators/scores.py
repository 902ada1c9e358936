"""A vocabulary that may be divided: lookups of rows, and of scores losses, softmaxes, maxima and picks among them.

Each contracts the classes, so that a rank keeps its own and a few numbers per row are all-reduced (SC21 §2.3). What
ranks then hold of a log_softmax is divided like its argument: sums over it are partial, as all sums are.
"""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import fx

from autoptd.passes.ir.nodes import argument, arguments, called, shape_of
from autoptd.passes.ir.views import contiguous_copies, reduced_dims
from autoptd.passes.operators import axes as ax
from autoptd.passes.operators import proof
from autoptd.passes.operators.axis_map import RUNS, AxisMap
from autoptd.passes.operators.layout import DimOrder, LayoutWriter, Written
from autoptd.passes.operators.localizer import Localizer, if_divided
from autoptd.passes.operators.pieces import resize_order
from autoptd.passes.operators.quantities import Value, Work, tensor_arguments
from autoptd.passes.operators.record import OperatorRules, Trait
from autoptd.passes.operators.reductions import over_placed
from autoptd.passes.operators.views import drop_order, mapped_axes
from autoptd.runtime import aten, kernels
from autoptd.runtime.program.placement import AxisPlacement, Shard

REDUCTIONS = ("none", "mean", "sum")

# Axes


def _softmax_axes(axis_map: AxisMap, node: fx.Node) -> ax.Axes:
    own = axis_map.of(node.args[0])
    axis_map.contract_classes(node, own[int(argument(node, "dim"))], RUNS)
    return own


def _contract(axis_map: AxisMap, node: fx.Node, over: list[ax.Axis]) -> ax.Axis | None:
    if len(over) != 1 or argument(node, "dim") is None:
        return None
    axis_map.contract_classes(node, over[0], "reduces over it")
    return over[0]


def _loss_axes(axis_map: AxisMap, node: fx.Node) -> ax.Axes:
    """Compare rows of [N, classes] with N labels."""
    logits, target, weight = axis_map.of(node.args[0]), axis_map.of(node.args[1]), argument(node, "weight")
    whole = axis_map.of(weight) if isinstance(weight, fx.Node) else ()
    if len(logits) == 2 and len(target) == 1:
        ax.unify(logits[0], target[0])
        axis_map.contract_classes(node, logits[1])
    else:
        whole = (*whole, *logits, *target)
    for axis in whole:
        ax.block(axis, f"{called(node)} is a loss that is not divided")
    return target[: len(shape_of(node))]


def _gather_axes(axis_map: AxisMap, node: fx.Node) -> ax.Axes:
    """One class for each element of an index; the other dimensions are the same, or needed whole."""
    own, index = axis_map.of(node.args[0]), axis_map.of(node.args[2])
    dim = int(node.args[1]) % len(own)  # type: ignore[arg-type]
    for d, (axis, picked) in enumerate(zip(own, index, strict=True)):
        if d != dim and axis.size == picked.size:
            ax.unify(axis, picked)
            continue
        ax.block(picked, f"{called(node)} picks by it")
        if d != dim:
            ax.block(axis, f"{called(node)} picks from it")
    axis_map.contract_classes(node, own[dim], "picks from it")
    return index


def _one_hot_axes(axis_map: AxisMap, node: fx.Node) -> ax.Axes:
    """Make an axis of classes, which are whatever meets them."""
    return (*axis_map.of(node.args[0]), ax.Axis(shape_of(node)[-1]))


def _lookup_axes(axis_map: AxisMap, node: fx.Node) -> ax.Axes:
    """Contract the vocabulary in a lookup: one-hot(ids) x weight."""
    weight, ids = axis_map.of(node.args[0]), axis_map.of(node.args[1])
    axis_map.contract_classes(node, weight[0])
    if node.args[1] not in axis_map.batch:
        ax.block(weight[0], f"{called(node)} looks up the same rows in every step")
    return (*ids, weight[1])


# One rank's call


def _softmax(localizer: Localizer, node: fx.Node, axis: ax.Axis, *, logarithm: bool = False) -> fx.Node:
    """Subtract the logarithm of the sum of the exponentials of all classes; the result stays divided."""

    def write(target: Any, *args: Any) -> fx.Node:
        return localizer.copy(node, args=args, target=target)

    x, dim, dtype = localizer.whole(node.args[0]), argument(node, "dim"), node.meta["val"].dtype
    if x.meta["val"].dtype != dtype:
        x = write(aten.to.dtype, x, dtype)
    args = (localizer.rank, x, dim, axis.size, True)
    total = localizer.add(kernels.logsumexp, args, node, name=f"{node.name}_total")
    made = write(aten.sub.Tensor, x, total)
    if not logarithm:
        made = write(aten.exp.default, localizer.clear_padding(made, localizer.axis_map.of(node)))
    return made if made.meta["val"].dtype == dtype else write(aten.to.dtype, made, dtype)


def _logsumexp_local(localizer: Localizer, node: fx.Node, axis: ax.Axis) -> fx.Node:
    x, dtype = localizer.whole(node.args[0]), node.meta["val"].dtype
    (dim,) = reduced_dims(node, x.meta["val"].dim())
    args = (localizer.rank, x, dim, axis.size, argument(node, "keepdim"))
    made = localizer.add(kernels.logsumexp, args, node, name=node.name)
    same = made.meta["val"].dtype == dtype
    return made if same else localizer.add(aten.to.dtype, (made, dtype), node, name=node.name)


def _maximum_local(localizer: Localizer, node: fx.Node, axis: ax.Axis) -> fx.Node:
    """Both results of ``max``, of which ``argmax`` is the second."""
    keep, x = argument(node, "keepdim"), localizer.whole(node.args[0])
    args = (localizer.rank, x, argument(node, "dim"), axis.size, keep)
    made = localizer.add(kernels.maximum, args, node, name=node.name)
    several = isinstance(node.meta["val"], (tuple, list))
    return made if several else localizer.add(operator.getitem, (made, 1), node, name=node.name)


def _gather_local(localizer: Localizer, node: fx.Node, axis: ax.Axis) -> fx.Node:
    x, dim, index = fx.map_arg(node.args[:3], localizer.whole)
    return localizer.add(kernels.pick, (localizer.rank, x, index, axis.size, dim), node, name=node.name)


def _one_hot_local(localizer: Localizer, node: fx.Node) -> fx.Node:
    classes = localizer.axis_map.of(node)[-1]
    if not localizer.is_divided((classes,)):
        return localizer.copy(node)
    args = (localizer.rank, localizer.whole(node.args[0]), classes.size)
    return localizer.copy(node, args=args, target=kernels.one_hot)


def _loss_local(localizer: Localizer, node: fx.Node, axis: ax.Axis) -> fx.Node:
    given = fx.map_arg(arguments(node), localizer.whole)
    logits, target, ignored = (given[name] for name in ("self", "target", "ignore_index"))
    kernel = kernels.cross_entropy if "label_smoothing" in given else kernels.nll_loss
    args = (localizer.rank, logits, target, axis.size, ignored, REDUCTIONS[given["reduction"]])
    made = localizer.add(kernel, args, node, name=node.name)
    made.kwargs = {name: given[name] for name in ("weight", "label_smoothing") if given.get(name)}
    return made


def _lookup_local(localizer: Localizer, node: fx.Node, axis: ax.Axis) -> fx.Node:
    """Vocabulary-parallel lookup: each rank looks up what its rows hold, the sum is the embedding."""
    padding = argument(node, "padding_idx")
    known = (axis.size, padding) if padding >= 0 else (axis.size,)
    args = (localizer.rank, localizer.whole(node.args[0]), localizer.whole(node.args[1]), *known)
    return localizer.add(kernels.embedding, args, node, name=node.name, partial=True)


# The proof


def _whole_placed(node: fx.Node, placements: proof.Placements) -> AxisPlacement:
    if proof.read(node.args[0], placements) is proof.UNKNOWN:
        return proof.UNKNOWN
    raise proof.misplaced("takes as logits", node.args[0], placements, "whole logits, or kernels.cross_entropy")


def _one_hot_placed(node: fx.Node, placements: proof.Placements) -> AxisPlacement:
    whole = proof.read(node.args[1], placements) is proof.WHOLE
    return Shard(len(shape_of(node)) - 1) if whole else proof.UNKNOWN


def _lookup_placed(node: fx.Node, placements: proof.Placements) -> AxisPlacement:
    """Prove a plain lookup: columns of the table may be divided, rows not."""
    placement = proof.read(node.args[0], placements)
    if placement.dim == 0:
        raise proof.PlacementError(
            f"looks up rows of {node.args[0]}, which are divided over the tensor ranks: expected kernels.embedding"
        )
    return proof.UNKNOWN if placement.dim is None else replace(placement, dim=len(shape_of(node)) - 1)


# The sequence-first layout


def _loss_order(writer: LayoutWriter, node: fx.Node) -> Written:
    """Rows of logits against labels: any order, the same for both."""
    logits, target, *rest = node.args
    order = writer.order(logits)
    rows = DimOrder(order.shape[:1], (-1, True), order.rows, transposed=True)
    one = len(order.shape) == 2 and len(writer.order(target).shape) == 1
    if not order.merged or order.holds(1) or not one:
        return None
    others, kwargs = fx.map_arg((tuple(rest), node.kwargs), writer.restore)
    return writer.write((writer.value(logits), writer.fit(target, rows), *others), kwargs), bool(shape_of(node))


def _lookup_order(writer: LayoutWriter, node: fx.Node) -> Written:
    weight, ids, *rest = node.args
    return writer.write((writer.restore(weight), writer.value(ids), *rest), node.kwargs), ids in writer.transposed


# Costs


def _work(node: fx.Node, value: Value, numbers: int) -> Work:
    """Read the scores once, and reduce wide `numbers` for each row."""
    sources = tensor_arguments(node)
    count, read, size = value.count(sources[0]), sum(map(value.bytes, sources)), value.statistics(sources[0])
    return Work(elementwise=count, read=read, written=2 * size, reduced=numbers * size, launches=1)


def _whole_loss(node: fx.Node, value: Value, *wanted: Sequence[fx.Node]) -> Work:
    """log_softmax, whose result is kept, and the loss of it; backward the gradients of both, each as large."""
    logits, target = tensor_arguments(node)[:2]
    size = value.bytes(logits)
    read, written = (2 * size, 2 * size) if wanted else (size + value.bytes(target), size)
    return Work(elementwise=value.count(logits), read=read, written=written, launches=2)


def _lookup_work(node: fx.Node, value: Value) -> Work:
    """Of the table only the rows looked up; a divided table's are masked once more."""
    ids = tensor_arguments(node)[1]
    passes = 2 if node.target is kernels.embedding else 1
    size = passes * value.bytes(node)
    return Work(read=size + value.bytes(ids), written=size, launches=passes)


def _lookup_backward(node: fx.Node, value: Value, wanted: Sequence[fx.Node]) -> Work:
    """A whole table of zeros, to whose rows gradients are added."""
    table, ids = tensor_arguments(node)[:2]
    passes, size = 2 if node.target is kernels.embedding else 1, value.bytes(node)
    read, written = (passes + 1) * size + value.bytes(ids), value.bytes(table) + passes * size
    return Work(elementwise=value.count(node), read=read, written=written, launches=passes + 1)


_CLASSES = Trait.PADDING_SAFE | Trait.KNOWS_SIZE
_ROWS = _CLASSES | Trait.NUMBERS
_OURS = Trait.ANY_PLACEMENT | Trait.SUMS_RANKS
_SOFTMAX = OperatorRules(
    axes=_softmax_axes,
    local=if_divided(_softmax),
    placed=over_placed(lambda node, rank: [int(argument(node, "dim"))]),
    order=resize_order,
    keeps="result",
    traits=_CLASSES | Trait.SOFTMAX,
)
_LOGARITHM = replace(_SOFTMAX, local=if_divided(partial(_softmax, logarithm=True)), traits=_CLASSES | Trait.LOG_SOFTMAX)
_REDUCED = OperatorRules(axes=mapped_axes("reduces over it", _contract), placed=over_placed(reduced_dims), traits=_ROWS)
_LOSS = OperatorRules(
    axes=_loss_axes, local=if_divided(_loss_local), order=_loss_order, copies=contiguous_copies, traits=_ROWS
)
_LOOKUP = OperatorRules(placed=_lookup_placed, work=_lookup_work, backward=_lookup_backward, traits=_ROWS)


def _kernel(whole: str, numbers: int, dim: int | None = None) -> OperatorRules:
    """Return the record of a kernel that reduces the divided dimension `dim`, or the one that the call names."""
    work = partial(_work, numbers=numbers)
    return OperatorRules(placed=proof.divided(dim, proof.WHOLE, whole), work=work, traits=_OURS)


RULES: Mapping[Any, OperatorRules] = {
    aten.embedding: replace(_LOOKUP, axes=_lookup_axes, local=if_divided(_lookup_local), order=_lookup_order),
    kernels.lookup: _LOOKUP,
    kernels.embedding: replace(
        _LOOKUP, placed=proof.divided(0, proof.PARTIAL, "aten.embedding"), traits=Trait.ANY_PLACEMENT
    ),
    aten.softmax: replace(_SOFTMAX, copies=contiguous_copies),
    aten.log_softmax: replace(_LOGARITHM, copies=contiguous_copies),
    aten._softmax: _SOFTMAX,
    aten._log_softmax: _LOGARITHM,
    aten.logsumexp: replace(_REDUCED, local=if_divided(_logsumexp_local), order=drop_order, traits=_CLASSES),
    **dict.fromkeys((aten.max, aten.argmax), replace(_REDUCED, local=if_divided(_maximum_local))),
    aten.gather: OperatorRules(axes=_gather_axes, local=if_divided(_gather_local), traits=_ROWS),
    aten.cross_entropy_loss: replace(_LOSS, placed=_whole_placed, work=_whole_loss, backward=_whole_loss),
    **dict.fromkeys((aten.nll_loss, aten.nll_loss_nd), _LOSS),
    kernels.cross_entropy: _kernel("aten.cross_entropy_loss", 3, 1),
    kernels.nll_loss: _kernel("aten.nll_loss_nd", 1, 1),
    kernels.logsumexp: _kernel("aten.logsumexp", 2),
    kernels.pick: _kernel("aten.gather", 1),
    kernels.maximum: _kernel("aten.max", 3),
    aten.one_hot: OperatorRules(axes=_one_hot_axes, local=_one_hot_local, traits=_CLASSES),
    kernels.one_hot: OperatorRules(placed=_one_hot_placed, traits=Trait.ANY_PLACEMENT),
    kernels.clear_padding: OperatorRules(
        placed=proof.divided(None, None, "the value itself"), keeps="nothing", traits=Trait.ANY_PLACEMENT
    ),
}
