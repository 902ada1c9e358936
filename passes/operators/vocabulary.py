"""Lookups of rows by a tensor of numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import fx

from autoptd.passes.ir.nodes import argument, called, shape_of
from autoptd.passes.operators import axes as ax
from autoptd.passes.operators import proof
from autoptd.passes.operators.axis_map import AxisMap, opaque
from autoptd.passes.operators.layout import LayoutWriter, Written
from autoptd.passes.operators.localizer import Localizer, if_divided
from autoptd.passes.operators.quantities import Value, Work, tensor_arguments
from autoptd.passes.operators.record import OperatorRules, Trait
from autoptd.runtime import aten, kernels
from autoptd.runtime.program.placement import AxisPlacement

# Axes


def _lookup_axes(axis_map: AxisMap, node: fx.Node) -> ax.Axes:
    """Contract the vocabulary in a lookup: one-hot(ids) x weight."""
    weight, ids = axis_map.of(node.args[0]), axis_map.of(node.args[1])
    axis_map.contract_classes(node, weight[0])
    if node.args[1] not in axis_map.batch:
        ax.block(weight[0], f"{called(node)} looks up the same rows in every step")
    return (*ids, weight[1])


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


def _put_axes(axis_map: AxisMap, node: fx.Node) -> Any:
    """Elements of the last dimensions replaced by numbers: the dimensions before these are the same of both."""
    into, rows = (axis_map.of(node.args[at]) for at in (0, 2))
    lead = _lead(node)
    if not lead:
        return opaque(axis_map, node)
    for axis in chain(into[lead:], rows[lead:], *map(axis_map.of, _picks(node).values())):
        ax.block(axis, f"{called(node)} puts elements into it")
    for pair in zip(into[:lead], rows, strict=False):
        ax.unify(*pair)
    return into


def _lead(node: fx.Node) -> int:
    """Return how many dimensions are before those that an ``index_put`` picks; 0 if others follow, or rows repeat."""
    into, rows, picks = shape_of(node), shape_of(node.args[2]), _picks(node)  # type: ignore[arg-type]
    numbers, lead = [n.meta["val"] for n in picks.values()], len(into) - len(picks)
    last = [*picks] == [*range(lead, len(into))] and all(n.dtype != torch.bool for n in numbers)
    plain = last and rows[:lead] == into[:lead] and len(rows) == lead + max(n.dim() for n in numbers)
    return lead if plain else 0


def _picks(node: fx.Node) -> dict[int, fx.Node]:
    given: Any = node.args[1]
    return {d: numbers for d, numbers in enumerate(given) if numbers is not None}


# One rank's call


def _lookup_local(localizer: Localizer, node: fx.Node, axis: ax.Axis) -> fx.Node:
    """Vocabulary-parallel lookup: each rank looks up what its rows hold, the sum is the embedding."""
    padding = argument(node, 2, "padding_idx", -1)
    known = (axis.size, padding) if padding >= 0 else (axis.size,)
    args = (localizer.rank, localizer.whole(node.args[0]), localizer.whole(node.args[1]), *known)
    return localizer.add(kernels.embedding, args, node, name=node.name, partial=True)


# The proof


def _lookup_placed(node: fx.Node, placements: proof.Placements) -> AxisPlacement:
    """Prove a plain lookup: columns of the table may be divided, rows not."""
    placement = proof.read(node.args[0], placements)
    if placement.dim == 0:
        raise proof.PlacementError(
            f"looks up rows of {node.args[0]}, which are divided over the tensor ranks: expected kernels.embedding"
        )
    return proof.UNKNOWN if placement.dim is None else replace(placement, dim=len(shape_of(node)) - 1)


def _index_placed(node: fx.Node, placements: proof.Placements) -> proof.Found:
    """Rows picked alike on every rank; the dimensions before the first picked one stay where they are."""
    picks, placement = _picks(node), proof.read(node.args[0], placements)
    if any(proof.read(numbers, placements) is not proof.WHOLE for numbers in picks.values()):
        return proof.UNKNOWN
    moved = len(picks) > 1 or len(shape_of(node)) != len(shape_of(node.args[0]))  # type: ignore[arg-type]
    return proof.UNKNOWN if placement.dim is not None and (placement.dim in picks or moved) else placement


def _put_placed(node: fx.Node, placements: proof.Placements) -> proof.Found:
    """Both divided alike, along a dimension before those that numbers pick."""
    given: Any = [(n, proof.read(n, placements)) for n in (node.args[0], node.args[2])]
    picked = (proof.read(numbers, placements) is proof.WHOLE for numbers in _picks(node).values())
    known = all(picked) and {p.dim for _, p in given} <= {*range(_lead(node))}
    return proof.merge(given, shape_of(node)) if known else proof.UNKNOWN


# The sequence-first layout


def _lookup_order(writer: LayoutWriter, node: fx.Node) -> Written:
    weight, ids, *rest = node.args
    return writer.write((writer.restore(weight), writer.value(ids), *rest), node.kwargs), ids in writer.transposed


# Costs


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


_PADDED = Trait.PADDING_SAFE | Trait.KNOWS_SIZE | Trait.NUMBERS
_LOOKUP = OperatorRules(placed=_lookup_placed, work=_lookup_work, backward=_lookup_backward, traits=_PADDED)
RULES: Mapping[Any, OperatorRules] = {
    aten.embedding: replace(_LOOKUP, axes=_lookup_axes, local=if_divided(_lookup_local), order=_lookup_order),
    kernels.lookup: _LOOKUP,
    kernels.embedding: replace(
        _LOOKUP, placed=proof.divided(0, proof.PARTIAL, "aten.embedding"), traits=Trait.ANY_PLACEMENT
    ),
    aten.index: OperatorRules(axes=_index_axes, placed=_index_placed, keeps="nothing"),
    aten.index_put: OperatorRules(axes=_put_axes, placed=_put_placed),
}
