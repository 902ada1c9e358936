"""ZeRO-3 as a baseline: its traffic and memory by the book."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import autoptd
from autoptd import Cluster
from samples.benchmarks.zero3 import RING_SHARE, simulate_zero3
from tests.models import MIDDLE, tiny

SELENE = Cluster.load("dgx-a100")


def compile_gpt(mesh: tuple[int, int, int], recompute: str) -> autoptd.CompiledProgram:
    sizes = replace(MIDDLE, n_layer=4)
    counts = {"microbatch_size": 2, "num_microbatches": 1}
    return tiny(mesh, sizes, torch.bfloat16, "meta", **counts, recompute=recompute)


def test_traffic_is_three_times_the_parameters() -> None:
    """Gathered forward and backward, gradients scattered: 3 (d - 1)/d of the parameters; recomputed, 4."""
    program = compile_gpt((1, 1, 1), "none")
    parameters = [p for p in program.manifest.parameters.values() if p.kind == "parameter"]
    devices = 64
    bandwidth = 8 * SELENE.network.collective_rate * RING_SHARE
    moved = 3 * 63 / 64 * sum(p.bytes for p in parameters) / bandwidth
    latency = 3 * 63 * len(parameters) * SELENE.network.latency_seconds
    step = simulate_zero3(program, SELENE, devices)
    assert step.breakdown["data"] == pytest.approx(moved + latency)
    again = simulate_zero3(compile_gpt((1, 1, 1), "full"), SELENE, devices)
    assert again.breakdown["data"] == pytest.approx(4 / 3 * step.breakdown["data"])
    assert step.step_seconds == pytest.approx(sum(step.breakdown.values()))


def test_states_are_divided_among_all() -> None:
    program = compile_gpt((1, 1, 1), "full")
    few, many = (simulate_zero3(program, SELENE, devices).memory_bytes for devices in (8, 64))
    states = 16 * sum(p.bytes // 2 for p in program.manifest.parameters.values() if p.kind == "parameter")
    assert few - many == pytest.approx(states * (1 / 8 - 1 / 64), rel=0.01)


def test_inside_a_node_no_time_is_negative() -> None:
    step = simulate_zero3(compile_gpt((1, 1, 1), "none"), SELENE, 8)
    assert min(step.breakdown.values()) > 0
