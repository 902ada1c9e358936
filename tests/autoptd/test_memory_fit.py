"""A program that is compiled for a cluster is in its devices' memory as it is simulated, or that is said."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import autoptd
from autoptd import Cluster
from autoptd.compiler import fit_program
from autoptd.passes.stages.solver import Cut
from samples.gpt import GPT, GPTConfig

LAPTOP = Cluster.load("laptop-cpu")


def with_memory(count: float) -> Cluster:
    return replace(LAPTOP, device=replace(LAPTOP.device, memory_bytes=count))


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
    cluster = replace(LAPTOP, device=replace(device, memory_bytes=0.94 * free))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compile_heavy(cluster, chunks).simulate(cluster).fits


@pytest.mark.parametrize(("limit", "expected"), [(119, "quick"), (105, "middling"), (101, "middling"), (96, "lean")])
def test_reserved_bytes_are_those_of_each_cut(limit: int, expected: str) -> None:
    """Of three cuts, the best first: bytes that are counted, and those besides."""
    cuts = {"quick": (90, 29), "middling": (80, 21), "lean": (79, 17)}
    places: dict[tuple[int, ...], str] = {(number,): cut for number, cut in enumerate(cuts)}

    def find(reserved: Sequence[int]) -> Cut:
        more = max(reserved, default=0)
        fitting = [place for place, cut in places.items() if cuts[cut][0] + more <= limit]
        place = fitting[0] if fitting else (2,)
        return Cut(place, (), 0, 0, "", [cuts[places[place]][0]], overflow="" if fitting else "none fits")

    def finish(found: Cut) -> Any:
        counted, more = cuts[places[found.positions]]
        memory = [counted + more]
        return SimpleNamespace(simulate=lambda cluster: SimpleNamespace(memory_bytes=memory))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        positions, _ = fit_program(find, finish, with_memory(limit))
    assert places[positions] == expected


def test_a_program_that_does_not_fit_is_warned_of() -> None:
    cluster = with_memory(5e6)
    with pytest.warns(UserWarning, match="does not fit laptop CPU: pipeline rank ") as said:
        program = compile_heavy(cluster, 1)
    memory = program.simulate(cluster).memory_bytes
    text, held = str(said[0].message), max(memory)
    assert f"rank {memory.index(held)} holds {held:,} bytes, {held - 5_000_000:,} more than a device's 5,0" in text
    assert said[0].filename == __file__


def test_auto_takes_the_first_plan_whose_program_fits() -> None:
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=4096, block_size=128, n_layer=8, n_head=4, n_embd=64))
    size: Any = {"world_size": 4, "global_batch": 8, "cluster": with_memory(14e6)}
    best = next(plan for plan in autoptd.plan(model, **size) if plan.simulated)
    program = autoptd.compile(model, "auto", **size)
    assert program.simulate(size["cluster"]).fits
    assert program.mesh == best.mesh
