"""A program that is compiled for a cluster is in its devices' memory as it is simulated, or that is said."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import autoptd
from autoptd import Cluster
from autoptd.passes.stages.cost_sequence import Memory
from autoptd.passes.stages.cut import fit_cut
from autoptd.passes.stages.solver import Cut
from samples.gpt import GPT, GPTConfig

LAPTOP = Cluster.load("laptop-cpu")


def with_memory(count: float) -> Cluster:
    return replace(LAPTOP, device=replace(LAPTOP.device, memory_bytes=count, reserved_bytes=0.0))


def compile_heavy(cluster: Cluster | None, chunks: int) -> autoptd.CompiledProgram:
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=4096, block_size=128, n_layer=8, n_head=4, n_embd=64))
    schedule = "1f1b" if chunks == 1 else "interleaved_1f1b"
    options: Any = {"num_microbatches": 8, "num_model_chunks": chunks, "schedule": schedule}
    return autoptd.compile(model, (1, 4, 1), cluster=cluster, **options)


@pytest.mark.parametrize(("chunks", "graphs"), [(1, False), (2, False), (2, True)])
def test_a_program_for_a_cluster_fits_where_a_cut_does(chunks: int, graphs: bool) -> None:
    device = replace(LAPTOP.device, graphed_launch_seconds=1e-6 * graphs)
    free = max(compile_heavy(None, chunks).simulate(replace(LAPTOP, device=device)).memory_bytes)
    cluster = replace(LAPTOP, device=replace(device, memory_bytes=0.94 * free, reserved_bytes=0.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compile_heavy(cluster, chunks).simulate(cluster).fits


@pytest.mark.parametrize(("limit", "expected"), [(119, "quick"), (105, "middling"), (101, "middling"), (96, "lean")])
def test_reserved_bytes_are_those_of_each_cut(limit: int, expected: str) -> None:
    """Of three cuts, the best first: bytes that are summed, and those besides."""
    cuts = {"quick": (90, 29), "middling": (80, 21), "lean": (79, 17)}
    rows = list(cuts.values())

    class Summed(Memory):
        def count(self, positions: Sequence[int]) -> list[int]:
            return [rows[positions[0]][0]]

    def find(asked: Memory | None) -> Cut:
        more = asked.reserved[0] if asked else -limit
        fitting = [place for place, (summed, _) in enumerate(rows) if summed + more <= limit]
        return Cut(((*fitting, 2)[0],), (), 0, 0, "", fits=bool(fitting))

    found, held = fit_cut(find, lambda cut: [sum(rows[cut.positions[0]])], Summed([], [], [], [0], limit))
    assert list(cuts)[found.positions[0]] == expected
    assert held == [sum(cuts[expected])]


def test_a_program_that_does_not_fit_is_warned_of() -> None:
    cluster = with_memory(5e6)
    with pytest.warns(UserWarning, match="does not fit laptop CPU: pipeline rank ") as said:
        program = compile_heavy(cluster, 1)
    memory = program.simulate(cluster).memory_bytes
    text, held = str(said[0].message), max(memory)
    assert f"rank {memory.index(held)} holds {held:,} bytes, {held - 5_000_000:,} more than a device's 5,0" in text
    assert said[0].filename == __file__
