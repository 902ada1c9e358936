"""Which batch inputs are row numbers of a table, or classes of a loss, and how many rows there are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import fx
from torch._ops import OpOverload

from autoptd.labels import MOVING
from autoptd.passes.program import Program
from autoptd.runtime import aten, kernels
from autoptd.runtime.manifest import Input


def describe_rows(program: Program, inputs: Sequence[Input]) -> tuple[Input, ...]:
    """The `inputs` of `program` with `rows`, where one is read as row numbers: moved on its way, not computed with."""
    found: dict[str, int] = {}
    for stage in program.stages:
        for node in stage.graph.nodes:
            for numbers, rows in _read_rows(node):
                source = _find_input(numbers)
                if source is not None:
                    found[source] = min(rows, found.get(source, rows))
    return tuple(
        value if value.dtype.is_floating_point else replace(value, rows=found.get(value.name))
        for value in inputs
    )


def _read_rows(node: fx.Node) -> Iterator[tuple[fx.Node, int]]:
    """The row numbers that `node` takes, and the count of rows."""
    numbers: object = None
    rows: object = None
    if node.target in (kernels.embedding, kernels.cross_entropy):
        numbers, rows = node.args[2:4]
    elif node.target is aten.embedding.default:
        table, numbers = node.args[:2]
        rows = table.meta["val"].shape[0] if isinstance(table, fx.Node) else None
    elif node.target is aten.cross_entropy_loss.default:
        logits, numbers = node.args[:2]
        rows = logits.meta["val"].shape[1] if isinstance(logits, fx.Node) else None
    if isinstance(numbers, fx.Node) and isinstance(rows, int):
        yield numbers, rows


def _find_input(node: fx.Node) -> str | None:
    """The batch input whose elements `node` holds; None where something is computed on the way."""
    while node.meta.get("role") != "input":
        moving = (
            isinstance(node.target, OpOverload) and node.target._schema.name.removeprefix("aten::") in MOVING
        )
        if not moving or len(node.all_input_nodes) != 1:
            return None
        (node,) = node.all_input_nodes
    return str(node.target)
