"""The passes that every program walks through, in their order: to the cut of its stages, and from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from autoptd.passes.attention import recognize_attention
from autoptd.passes.constants import fold_constants
from autoptd.passes.fusion import fuse_operators
from autoptd.passes.layers import label_layers
from autoptd.passes.layout import rewrite_layout
from autoptd.passes.normalize import normalize
from autoptd.passes.overlap import overlap_reductions
from autoptd.passes.program import Program
from autoptd.passes.recompute import recompute_activations
from autoptd.passes.sharding import shard_tensors
from autoptd.watch import Watch

Passes = tuple[tuple[str, Callable[[Program], Program]], ...]


def run_passes(
    passes: Passes, program: Program, watch: Watch, keep: Callable[[Program, str], None] | None = None
) -> Program:
    """Walk the corridor: each pass makes the next program, which `keep` is given with the pass's name."""
    for name, step in passes:
        watch.say(name)
        program = step(program)
        if keep is not None:
            keep(program, name)
    return program


def passes_to_the_division(layout: str) -> Passes:
    """What is the same for any number of tensor ranks."""
    moving: Passes = (("rewrite layout", rewrite_layout),) if layout == "sbh" else ()
    return (
        ("normalize", normalize),
        ("fold constants", fold_constants),
        ("recognize attention", recognize_attention),
        *moving,
    )


def passes_to_the_cut(rules: Mapping[Any, str] | None) -> Passes:
    """The division over the tensor ranks."""
    return ("shard tensors", partial(shard_tensors, rules=rules)), ("label layers", label_layers)


def passes_from_the_cut(recompute: str | int, fuse: bool) -> Passes:
    """Layers are found before a kernel joins the end of one with the begin of the next."""
    fusing: Passes = (("fuse operators", fuse_operators),) if fuse else ()
    return (
        ("recompute activations", partial(recompute_activations, recompute=recompute)),
        *fusing,
        ("overlap reductions", overlap_reductions),
    )
