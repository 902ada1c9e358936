"""Find draws for batch-independent values that each sequence has its own of, which a batch of one does not show."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from typing import Any

from torch import fx

from autoptd.capture.example_inputs import make_example
from autoptd.passes.ir.nodes import argument, info, walk, where
from autoptd.passes.ir.program import Program, copy_graph
from autoptd.runtime import kernels
from autoptd.runtime.user_warnings import warn_caller


def mark_expanded(program: Program, trace: Callable[[Any], Program]) -> Program:
    """Mark the dropouts and draws of the undivided, one-sequence `program` that would draw twice for a batch of two.

    These act on positions expanded to the batch, or on constants with its size. Positions shared by all sequences,
    [1, s], look the same in a batch of one, so `trace` makes the program again of example inputs with two.
    """
    found = _list_draws(program)
    if not found or all(i.batch_dim is None or i.shape[i.batch_dim] > 1 for i in program.inputs):
        return program
    shapes = (tuple(2 * n if d == i.batch_dim else n for d, n in enumerate(i.shape)) for i in program.inputs)
    doubled = tuple(replace(i, shape=shape) for i, shape in zip(program.inputs, shapes, strict=True))
    try:
        with warnings.catch_warnings(action="ignore"):  # the batch of one was warned of
            two = trace(make_example(replace(program, inputs=doubled)))
    except (TypeError, ValueError) as error:
        place = where(next(iter(found.values())))
        warn_caller(
            f"the draw at {place} is one for all sequences, because its input does not depend on them. This is wrong "
            f"if the model expands that input to its batch, which only a trace with two sequences shows, and this "
            f"trace fails ({error}). If it does, draw after the tokens are added, or write the model for any batch"
        )
        return program
    sizes = {number: node.meta["val"].numel() for number, node in _list_draws(two).items()}
    own = {number for number, node in found.items() if sizes.get(number) != node.meta["val"].numel()}
    (stage,) = program.stages
    graph = copy_graph(stage.graph)
    for node in graph.nodes:
        if (number := _number_of(node)) in found:
            node.kwargs = {**node.kwargs, "sample": 0 if number in own else None}
    entry = f"mark_expanded: {len(own)} draws for values without a batch are for each sequence"
    return program.replace_stages((replace(stage, graph=graph),), entry)


def _list_draws(program: Program) -> dict[Any, fx.Node]:
    """Return the dropouts and draws for values that do not depend on the batch, by operator number."""
    graph = program.stages[0].graph
    varying = set(walk((node for node in graph.nodes if info(node).role == "input"), attrgetter("users")))
    return {_number_of(node): node for node in graph.nodes if _number_of(node) and node not in varying}


def _number_of(node: fx.Node) -> tuple[Any, int] | None:
    """Return kernel and operator number of a dropout or a draw."""
    if node.target not in (kernels.dropout, kernels.uniform):
        return None
    return node.target, argument(node, "operator")
