"""Find dropouts of batch-independent values that need a mask per sequence, which a batch of one does not show."""

import warnings
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
from torch import fx, nn

from autoptd.capture.autocast_state import leave_autocast
from autoptd.capture.export import capture
from autoptd.capture.results import LossFunction
from autoptd.options import Options
from autoptd.pass_list import select_passes
from autoptd.passes.ir.nodes import argument, info, walk, where
from autoptd.passes.ir.program import Program, copy_graph
from autoptd.runtime import kernels
from autoptd.runtime.program.tagged_json import decode_value
from autoptd.runtime.user_warnings import warn_caller


def mark_expanded(program: Program, layout: str, model: nn.Module, loss_fn: LossFunction) -> Program:
    """Mark the dropouts of the undivided, one-sequence `program` that would draw two masks for a batch of two.

    These act on positions expanded to the batch. Positions shared by all sequences, [1, s], look the same in a batch
    of one, so the model is traced again with two.
    """
    found = _list_dropouts(program)
    if not found or all(i.batch_dim is None or i.shape[i.batch_dim] > 1 for i in program.inputs):
        return program
    inputs: dict[str, Any] = {n: decode_value(value, n) for n, value in program.fixed.items()}
    for i in program.inputs:
        shape = [2 * n if d == i.batch_dim else n for d, n in enumerate(i.shape)]
        inputs[i.name] = torch.empty(shape, dtype=i.dtype, device="meta")
    try:
        with warnings.catch_warnings(action="ignore"):  # the batch of one was warned of
            two = capture(model, mesh=program.mesh, example_inputs=inputs, loss_fn=loss_fn, microbatch_size=2)
            with leave_autocast():
                for _, step in select_passes(Options(layout=layout), "arrange"):
                    two = step(two)
    except (TypeError, ValueError) as error:
        place = where(next(iter(found.values())))
        warn_caller(
            f"dropout at {place} has one mask for all sequences, because its input does not depend on them. This is "
            f"wrong if the model expands that input to its batch, which only a trace with two sequences shows, and "
            f"this trace fails ({error}). If it does, drop after the tokens are added, or write the model for any batch"
        )
        return program
    sizes = {number: node.meta["val"].numel() for number, node in _list_dropouts(two).items()}
    own = {number for number, node in found.items() if sizes.get(number) == 2 * node.meta["val"].numel()}
    if not own:
        return program
    (stage,) = program.stages
    graph = copy_graph(stage.graph)
    for node in graph.nodes:
        if node.target is kernels.dropout and argument(node, 3, "operator") in own:
            node.kwargs = {**node.kwargs, "sample": 0}
    entry = f"mark_expanded: {len(own)} dropouts of positions have a mask for each sequence"
    return program.replace_stages((replace(stage, graph=graph),), entry)


def _list_dropouts(program: Program) -> dict[int, fx.Node]:
    """Return the dropouts of values that do not depend on the batch, by operator number."""
    graph = program.stages[0].graph
    varying = set(walk((node for node in graph.nodes if info(node).role == "input"), attrgetter("users")))
    dropouts = graph.find_nodes(op="call_function", target=kernels.dropout)
    return {int(argument(node, 3, "operator")): node for node in dropouts if node not in varying}
