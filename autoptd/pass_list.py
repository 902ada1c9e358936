"""The passes that every program walks through, in their order, to the cut of stages; from it, see `passes.uncut`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from autoptd.passes.attention.recognition import recognize_attention
from autoptd.passes.ir.node_info import require_info
from autoptd.passes.ir.program import Passes, Program
from autoptd.passes.layout.sequence_first import rewrite_layout
from autoptd.passes.normal_form.constants import fold_constants
from autoptd.passes.normal_form.normalize import normalize
from autoptd.passes.structure.layers import label_layers
from autoptd.passes.tensor_parallel.sharding import shard_tensors
from autoptd.progress import Watch


def run_passes(
    passes: Passes, program: Program, watch: Watch, keep: Callable[[Program, str], None] | None = None
) -> Program:
    """Walk the corridor: each pass makes the next program, which `keep` is given with the pass's name.

    Raises ValueError where a pass leaves a node undescribed.
    """
    for name, step in passes:
        watch.say(name)
        program = step(program)
        for stage in program.stages:
            require_info(stage.graph, f'after the pass "{name}"')
        if keep is not None:
            keep(program, name)
    return program


def passes_to_the_division(layout: str) -> Passes:
    """Return the passes whose result is the same for any number of tensor ranks."""
    moving: Passes = (("rewrite layout", rewrite_layout),) if layout == "sbh" else ()
    return (
        ("normalize", normalize),
        ("fold constants", fold_constants),
        ("recognize attention", recognize_attention),
        *moving,
    )


def passes_to_the_cut(rules: Mapping[Any, str] | None) -> Passes:
    """Return the passes that divide the program over the tensor ranks."""
    return ("shard tensors", partial(shard_tensors, rules=rules)), ("label layers", label_layers)
