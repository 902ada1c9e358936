"""One rank's view of a program: its slices, and its stages as modules."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import fx

from autoptd.runtime.comm.rank import Rank
from autoptd.runtime.program.manifest import Manifest
from autoptd.runtime.program.mesh import Coordinates, Mesh
from autoptd.runtime.program.placement import AxisPlacement, Segment, Shard
from autoptd.text.rank_program import RankProgram
from autoptd.text.writer import emit_texts
from tests.two_stages import random_tensors, two_stages


def rank_program(rank: int, tensor: int = 2) -> tuple[RankProgram, Manifest]:
    program, manifest, schedule = two_stages(tensor)
    texts = emit_texts(program, manifest, schedule, title="")
    return RankProgram(manifest, rank, texts[manifest.mesh.coordinates(rank).pipeline]), manifest


def test_where_it_stands() -> None:
    program, _ = rank_program(3)
    assert program.coordinates == Coordinates(data=0, pipeline=1, tensor=1)
    assert program.peers == {"tensor": (2, 3), "pipeline": (1, 3), "data": (3,)}
    assert [str(action) for action in program.schedule[:3]] == ["1RECV_F0", "1F0", "1RECV_F1"]
    assert "def stage_1(" in program.code


def test_parameters_are_slices() -> None:
    program, _ = rank_program(1)
    shape, local, part = program.parameters["h.0.attn.c_attn.weight"]
    assert (shape, local) == ((48, 16), (24, 16))
    assert part == (0, (range(8, 16), range(24, 32), range(40, 48)))
    assert program.parameters["h.0.ln_1.weight"].slice.dim is None
    assert "wte.weight" in rank_program(3)[0].parameters
    assert "h.0.ln_1.weight" not in rank_program(3)[0].parameters


SEGMENTS = [
    (Shard(0, (Segment(1, 8, 1, True),)), 8),
    (Shard(0, (Segment(1, 10, 1, True),), 9), 9),
    (Shard(0, (Segment(3, 4, 2, True),)), 24),
    (Shard(0, (Segment(1, 4, 2, True), Segment(1, 1, 2, False), Segment(1, 1, 2, False))), 12),
]


@pytest.mark.parametrize(("placement", "rows"), SEGMENTS)
@pytest.mark.parametrize("index", [0, 1])
def test_slice_is_what_placement_takes(placement: AxisPlacement, rows: int, index: int) -> None:
    whole = torch.arange(1, rows + 1)
    taken = placement.take(whole, 2, index)
    runs = list(placement.runs(2, index))
    assert [int(whole[row]) for run in runs for row in range(*run)] == [int(x) for x in taken if x]
    assert all(stop < start for (_, stop), (start, _) in pairwise(runs))


def test_module_has_the_ranks_shapes() -> None:
    module = rank_program(1)[0].module()
    assert isinstance(module.stage_0, fx.GraphModule)
    assert {name: tuple(p.shape) for name, p in module.stage_0.named_parameters()}["wte.weight"] == (15, 16)
    assert "stage_1" not in dict(module.named_children())
    module.stage_0.graph.lint()


def test_module_runs_without_a_process_group() -> None:
    first, manifest = rank_program(0, tensor=1)
    second, _ = rank_program(1, tensor=1)
    rank = Rank.local(Mesh(1, 1, 1))
    stages = []
    for program, name in ((first, "stage_0"), (second, "stage_1")):
        stage = program.module("cpu").get_submodule(name)
        tensors = {**random_tensors(manifest), "constant.bias": torch.zeros(8, 8)}
        own = {n: tensors[n] for n in program.parameters if n in manifest.stages[int(name[-1])].parameters}
        stages.append((stage, own))
    ids = torch.randint(0, 30, (1, 8))
    sent = torch.func.functional_call(stages[0][0], stages[0][1], (rank, ids))
    loss = torch.func.functional_call(stages[1][0], stages[1][1], (rank, *sent, ids))
    assert loss.shape == ()
    assert torch.isfinite(loss)
