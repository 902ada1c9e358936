"""The normalised graph while it is written: a call as rewrite rules see it, and memory turned into values."""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from autoptd.passes.ir.nodes import NodeInfo, add_node, argument, change_info, describe, name_arguments, where
from autoptd.passes.ir.program import may_be_trained
from autoptd.passes.ir.views import is_view, read_cut
from autoptd.passes.operators.table import Trait, has_trait
from autoptd.runtime import aten


@dataclass(frozen=True)
class Call:
    """One call of the exported graph, `node`, with arguments of the new graph and the ``meta`` of its result."""

    writer: Writer
    node: fx.Node
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    meta: Mapping[str, Any]

    @property
    def source(self) -> fx.Node:
        """Return the first argument, a node of the new graph."""
        node: fx.Node = self.args[0]
        return node

    @property
    def given(self) -> Tensor:
        """Return the first argument's shape and dtype."""
        val: Tensor = self.source.meta["val"]
        return val

    @property
    def val(self) -> Any:
        """Return the result's shape and dtype: a meta tensor, or a list of them."""
        return self.meta["val"]

    def argument(self, name: str) -> Any:
        """Return the argument `name`, by position, keyword or default."""
        return name_arguments(self.node.target, self.args, self.kwargs)[name]

    def emit(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Write a call of `target` in its place."""
        return self.writer.emit(target, args, self.meta, kwargs)

    def derive(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Append a further call of the rewrite; its result's shape and dtype are found on the meta device."""
        val = target(*fx.map_arg(args, lambda n: n.meta["val"]), **kwargs)
        return self.writer.emit(target, args, {**self.meta, "val": val}, kwargs)

    def fill(self, target: Any, shape: Sequence[int], dtype: torch.dtype) -> fx.Node:
        """Append a factory of equal elements."""
        val = torch.empty(shape, dtype=dtype, device="meta")
        return self.writer.emit(target, (list(shape),), {**self.meta, "val": val}, {"dtype": dtype})

    def reshape(self, x: fx.Node, shape: list[int]) -> fx.Node:
        """Append a reshape; return what has that shape as it is."""
        return x if list(x.meta["val"].shape) == shape else self.derive(aten.reshape.default, x, shape)


# Memory: in-place operators make new values, and views of written memory are taken again

_SCATTERS = {aten.slice.Tensor: aten.slice_scatter.default, aten.select.int: aten.select_scatter.default}


@dataclass(eq=False)
class Cell:
    """A tensor of the exported graph as memory: `node` is its present value.

    A view has the cell it looks into (`base`), the call that takes it (`view`), and the base's version it saw. `owner`
    is the name of the user's parameter or buffer whose memory this is.
    """

    node: fx.Node
    version: int = 0
    base: Cell | None = None
    view: fx.Node | None = None
    seen: int = 0
    owner: str = ""


@functools.cache
def is_mutation(target: Any) -> bool:
    """Return whether an operator writes to one of its arguments."""
    return isinstance(target, OpOverload) and bool(target._schema.is_mutable)


@functools.cache
def functional_twin(target: OpOverload) -> OpOverload | None:
    """Return the operator that computes an in-place one's result as a new tensor; None if torch has none."""
    name = target._opname
    packet = getattr(torch.ops.aten, name[:-1], None) if name.endswith("_") and name[-2] != "_" else None
    return getattr(packet, target._overloadname, None)


class Writer:
    """A writer of the normalised graph, which keeps the present value of every tensor.

    What is written through a view is written to the tensor below it. A gradient reaches parameters through `trained`.
    """

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.trained: set[fx.Node] = set()
        self.counts: Counter[str] = Counter()
        self.remarks: Counter[str] = Counter()  # for the log
        self.casts: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}
        self.rank = self.graph.placeholder("rank")
        describe(self.rank, None, NodeInfo(role="rank"))

    def emit(self, target: Any, args: Any, meta: Mapping[str, Any], kwargs: Any = None) -> fx.Node:
        """Append a call of `target`, its ``meta`` taken from the operator it replaces."""
        node = add_node(self.graph, "call_function", target, args, kwargs or {}, meta=meta)
        change_info(node, role=None)  # it may be taken from an input that is written into a tensor
        if may_be_trained(node) and not self.trained.isdisjoint(node.all_input_nodes):
            self.trained.add(node)
        return node

    def next_number(self, kind: Literal["dropouts", "draws"]) -> int:
        """Return the number of the next operator that draws a mask, or random numbers."""
        self.counts[kind] += 1
        return self.counts[kind] - 1

    def read(self, cell: Cell) -> fx.Node:
        """Return the present value; a view whose base was written since is taken again."""
        if cell.base is not None and cell.view is not None:
            value = self.read(cell.base)
            if cell.base.version != cell.seen:
                target, rest = _read_view(cell.view)
                cell.node = self.emit(target, (value, *rest), cell.view.meta, cell.view.kwargs)
                cell.seen = cell.base.version
                cell.version += 1
        return cell.node

    def derive(self, node: fx.Node, made: fx.Node, values: Mapping[fx.Node, Any]) -> Cell:
        """Return the cell of the operator `node`, written as `made`: its argument's own, a view, or new memory."""
        source = values.get(node.args[0]) if node.args and isinstance(node.args[0], fx.Node) else None
        aliases = node.target is operator.getitem or (isinstance(node.target, OpOverload) and node.target.is_view)
        if not isinstance(source, Cell) or not aliases:
            return Cell(made)
        if node.target is operator.getitem:  # without a base one of several new tensors, as of topk
            return Cell(made, base=source.base, view=made, seen=source.seen)
        if made is source.node:
            return source
        if made.args[0] is not source.node or _copies(made, source.node):
            return Cell(made)
        return Cell(made, base=source, view=made, seen=source.version)

    def write(self, cell: Cell, value: fx.Node) -> None:
        """Give `cell`, and every tensor that it is a view of, the new `value`. Raises ValueError if it cannot."""
        refuse_owned(cell, value)
        kept = cell.node.meta["val"]
        if value.meta["val"].dtype != kept.dtype:
            value = self.emit(aten.to.dtype, (value, kept.dtype), {**value.meta, "val": kept})
        cell.node = value
        cell.version += 1
        if cell.base is not None and cell.view is not None:
            self.write(cell.base, self._undo(cell.view, self.read(cell.base), value))
            cell.seen = cell.base.version

    def _undo(self, view: fx.Node, whole: fx.Node, value: fx.Node) -> fx.Node:
        """Return `whole` with `value` written where `view` looks."""
        target, rest = _read_view(view)
        meta = {**value.meta, "val": whole.meta["val"]}
        if target in _SCATTERS:
            return self.emit(_SCATTERS[target], (whole, value, *rest), meta)
        if target is aten.transpose.int:
            return self.emit(target, (value, *rest), meta)
        if has_trait(view, Trait.RESHAPES | Trait.SQUEEZES):
            return self.emit(aten.reshape.default, (value, list(meta["val"].shape)), meta)
        raise ValueError(
            f"{where(value)}: writing in place through {target} ({value.target}) is not supported; write it out of "
            "place"
        )


def _read_view(view: fx.Node) -> tuple[Any, tuple[Any, ...]]:
    """Return the operator of a view and its arguments besides the base; a piece is the slice or the row that it is."""
    if view.target is not operator.getitem:
        return view.target, view.args[1:]
    piece: Any = view.args
    split, index = piece
    if split.target is aten.unbind.int:
        return aten.select.int, (argument(split, "dim"), index)
    cut = read_cut(split)
    start = sum(cut.lengths[:index])
    return aten.slice.Tensor, (cut.dim, start, start + cut.lengths[index])


def refuse_owned(cell: Cell, node: fx.Node) -> None:
    """Raise ValueError if `node`, which writes to `cell`, changes a tensor of the user's."""
    while cell.base is not None:
        cell = cell.base
    if cell.owner:
        raise ValueError(
            f"{where(node)}: forward writes to {cell.owner!r}, a parameter or buffer; changing it in the step is not "
            "supported. Keep it constant, or update it outside forward; if only the first call fills it, make that "
            "call before compile; if it is a cache of earlier tokens, call forward without it"
        )


def _copies(made: fx.Node, source: fx.Node) -> bool:
    """Return whether an operator that may give a view had to copy."""
    if made.target in (aten.to.dtype, aten.contiguous.default):
        return True
    return made.target is aten.reshape.default and not is_view(source.meta["val"], made.args[1])  # type: ignore[arg-type]
