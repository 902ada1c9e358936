"""Cut by layers, as Megatron-LM does: as many a stage, the embedding with the first and the head with the last."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from autoptd import compiler
from autoptd.passes.ir.nodes import info
from autoptd.passes.stages.solver import Cut
from autoptd.passes.structure.linear_order import Row
from autoptd.planning.layer_costs import LayerCosts
from autoptd.runtime.program.mesh import Mesh


def uniform_positions(row: Row, num_stages: int) -> list[int]:
    """The items that begin a stage: every l / (p v)-th layer's first; where that is no whole number, the nearest.

    ValueError where no layers are found, or too few.
    """
    starts: dict[tuple[int, int], int] = {}
    for index, node in enumerate(row.items):
        label = info(node).layer
        if label is not None:
            starts.setdefault(label, index)
    layers, fit = sorted(starts.values()), row.allowed()
    if len(layers) < num_stages:
        raise ValueError(f"{len(layers)} layers found for {num_stages} stages")
    wanted = [layers[round(stage * len(layers) / num_stages)] for stage in range(1, num_stages)]
    # A layer's label begins at its norm; what it takes may be computed before, in between.
    return [max(i for i in range(1, at + 1) if fit[i]) for at in wanted]


def find_uniform_cut(costs: LayerCosts, mesh: Mesh, _schedule: str, _m: int, v: int, **_: Any) -> tuple[Cut, tuple[()]]:
    """In the place of `find_cut`."""
    positions = tuple(uniform_positions(costs.row, mesh.pipeline * v))
    return Cut(positions, (1,), 1, 1, "by layers"), ()


@contextmanager
def uniform_cuts() -> Iterator[None]:
    """`autoptd.compile` cuts by layers within."""
    with patch.object(compiler, "find_cut", find_uniform_cut):
        yield
