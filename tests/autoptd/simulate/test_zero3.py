"""ZeRO-3 as a baseline: its traffic and memory by the book."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import autoptd
from autoptd import Cluster
from autoptd.simulate.zero3 import RING_SHARE
from samples.gpt import GPT, GPTConfig

SELENE = Cluster.load("dgx-a100")


def compile_gpt(mesh: tuple[int, int, int], recompute: str) -> autoptd.CompiledProgram:
    with torch.device("meta"):
        model = GPT(GPTConfig(512, 128, 4, 4, 256)).to(torch.bfloat16)
    return autoptd.compile(model, mesh=mesh, microbatch_size=2, num_microbatches=1, recompute=recompute)


def test_traffic_is_three_times_the_parameters() -> None:
    """Gathered forward and backward, gradients scattered: 3 (d - 1)/d of the parameters; recomputed, 4."""
    program = compile_gpt((1, 1, 1), "none")
    parameters = [p for p in program.manifest.parameters.values() if p.kind == "parameter"]
    devices = 64
    bandwidth = 8 * SELENE.network.collective_rate * RING_SHARE
    moved = 3 * 63 / 64 * sum(p.bytes for p in parameters) / bandwidth
    latency = 3 * 63 * len(parameters) * SELENE.network.latency_seconds
    step = program.simulate_zero3(SELENE, devices)
    assert step.breakdown["data"] == pytest.approx(moved + latency)
    again = compile_gpt((1, 1, 1), "full").simulate_zero3(SELENE, devices)
    assert again.breakdown["data"] == pytest.approx(4 / 3 * step.breakdown["data"])
    assert step.step_seconds == pytest.approx(sum(step.breakdown.values()))


def test_states_are_divided_among_all() -> None:
    program = compile_gpt((1, 1, 1), "full")
    few, many = (program.simulate_zero3(SELENE, devices).memory_bytes for devices in (8, 64))
    states = 16 * sum(p.bytes // 2 for p in program.manifest.parameters.values() if p.kind == "parameter")
    assert few - many == pytest.approx(states * (1 / 8 - 1 / 64), rel=0.01)


def test_inside_a_node_no_time_is_negative() -> None:
    step = compile_gpt((1, 1, 1), "none").simulate_zero3(SELENE, 8)
    assert min(step.breakdown.values()) > 0


@pytest.mark.parametrize("devices", [0, -1, 2.5, True])
def test_a_number_of_devices_that_cannot_be_is_refused(devices: Any) -> None:
    with pytest.raises(ValueError, match="expected a whole number above 0"):
        compile_gpt((1, 1, 1), "none").simulate_zero3(SELENE, devices)


def test_a_program_of_several_ranks_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"for a program of mesh \(1, 1, 1\), and this one has mesh tensor=2"
    ):
        compile_gpt((2, 1, 1), "none").simulate_zero3(SELENE, 8)


def test_who_shares_a_device_is_slower_than_its_share() -> None:
    """Two replicas on each device at a time: twice the work, on caches that are cold."""
    program = compile_gpt((1, 1, 1), "none")
    warm = replace(SELENE, devices_at_once=4)
    cold = replace(warm, device=replace(SELENE.device, crowded_efficiency=0.8))
    alone, taking_turns, slower = (program.simulate_zero3(one, 8) for one in (SELENE, warm, cold))
    assert taking_turns.breakdown["compute"] == pytest.approx(2 * alone.breakdown["compute"])
    assert slower.breakdown["compute"] == pytest.approx(taking_turns.breakdown["compute"] / 0.8)
