"""Cut a program as `compile` does, at the positions that the search finds."""

from __future__ import annotations

from typing import Any

from autoptd.options import Options
from autoptd.pass_list import select_passes
from autoptd.passes.ir.program import Program
from autoptd.passes.stages.cut import cut_at, find_cut
from autoptd.passes.stages.fused_order import FusedOrder


def finish_uncut(program: Program, recompute: str | int = "none", fuse: bool = True) -> FusedOrder:
    """Return the one stage of a program in the order that the cut divides."""
    return FusedOrder(program, select_passes(Options(recompute, fuse), "finish"))


def cut_stages(program: Program, *, recompute: str | int = "none", fuse: bool = True, **options: Any) -> Program:
    """Cut the one stage of `program` where `find_cut` says; `options` and errors are its own."""
    found = find_cut(finish_uncut(program, recompute, fuse), **options)
    return cut_at(program, found.positions, found.entry)
