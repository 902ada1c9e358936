"""The batch inputs that are row numbers of a table or classes of a loss, with the number of rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import fx

from autoptd.loss.labels import MOVING
from autoptd.passes.ir.node_info import info
from autoptd.passes.ir.nodes import argument
from autoptd.passes.ir.program import Program
from autoptd.passes.operators.table import has_trait
from autoptd.runtime import aten, kernels
from autoptd.runtime.program.manifest import Input


def describe_rows(program: Program, inputs: Sequence[Input]) -> tuple[Input, ...]:
    """Return the `inputs` of `program`, those that are read as row numbers with their number of `rows`.

    Only operators that move elements may lie between. An input has `exempt` if all its readers are losses that ignore
    the same number.
    """
    rows: dict[str, int] = {}
    exempt: dict[str, set[int | None]] = {}
    for stage in program.stages:
        for node in stage.graph.nodes:
            for numbers, count, ignored in _read_rows(node):
                source = _find_input(numbers)
                if source is not None:
                    rows[source] = min(count, rows.get(source, count))
                    exempt.setdefault(source, set()).add(ignored)
    return tuple(
        replace(value, rows=rows[value.name], exempt=_only(exempt[value.name]))
        if value.name in rows and not value.dtype.is_floating_point
        else value
        for value in inputs
    )


def _only(numbers: set[int | None]) -> int | None:
    return next(iter(numbers)) if len(numbers) == 1 else None


def _read_rows(node: fx.Node) -> Iterator[tuple[fx.Node, int, int | None]]:
    """Yield the row numbers that `node` reads, the number of rows, and the row number that is ignored."""
    numbers: object = None
    rows: object = None
    ignored: int | None = None
    if node.target is kernels.embedding:
        numbers, rows = node.args[2:4]
    elif node.target is kernels.cross_entropy:
        numbers, rows = node.args[2:4]
        ignored = argument(node, 4, "ignore_index", -100)
    elif node.target is aten.embedding.default:
        table, numbers = node.args[:2]
        rows = table.meta["val"].shape[0] if isinstance(table, fx.Node) else None
    elif node.target is aten.cross_entropy_loss.default:
        logits, numbers = node.args[:2]
        rows = logits.meta["val"].shape[1] if isinstance(logits, fx.Node) else None
        ignored = argument(node, 4, "ignore_index", -100)
    if isinstance(numbers, fx.Node) and isinstance(rows, int):
        yield numbers, rows, ignored


def _find_input(node: fx.Node) -> str | None:
    """Return the batch input whose elements `node` holds; None if an operator between them does more than move."""
    while info(node).role != "input":
        if not has_trait(node, MOVING) or len(node.all_input_nodes) != 1:
            return None
        (node,) = node.all_input_nodes
    return str(node.target)
