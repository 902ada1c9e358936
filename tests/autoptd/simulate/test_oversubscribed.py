"""Devices that share cores: by hand, and as if they did not where there are cores for all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import autoptd
from autoptd import Cluster
from autoptd.passes.cost.schedule_times import ActionTimes, walk, walking_order
from autoptd.runtime.program.mesh import Mesh
from autoptd.runtime.program.schedule import make_schedule
from autoptd.simulate.oversubscribed import Spell, share_cores, walk_shared
from samples.gpt import GPT, GPTConfig

LAPTOP = Cluster.load("laptop-cpu")


def with_cores(cores: int, per_node: int = 8) -> Cluster:
    return replace(LAPTOP, devices_per_node=per_node, devices_at_once=cores)


def spans(
    name: str,
    mesh: Mesh,
    m: int,
    v: int,
    times: ActionTimes,
    cluster: Cluster,
    waiting: ActionTimes | None = None,
) -> dict[str, tuple[float, float]]:
    schedule = make_schedule(name, mesh.pipeline, m, v)
    none = take(0, 0, 0, mesh.pipeline * v)
    walked = walk_shared(schedule, times, waiting or none, mesh, cluster)
    return {str(action): (start, end) for _, action, start, end in walked}


def take(forward: float, backward: float, message: float, stages: int, blocking: bool = False) -> ActionTimes:
    messages = {(stage, kind): message for stage in range(stages) for kind in ("SEND_F", "SEND_B")}
    return ActionTimes([forward] * stages, [backward] * stages, messages, blocking)


def test_two_ranks_on_one_core_by_hand() -> None:
    """Rank 0 does F0 F1 B0 B1, rank 1 F0 B0 F1 B1; who works beside the other has half the core."""
    found = spans("1f1b", Mesh(1, 2, 1), 2, 1, take(1, 2, 0, 2), with_cores(1))
    computed = {name: span for name, span in found.items() if "SEND" not in name}
    assert computed == {
        "0F0": (0, 1), "0F1": (1, 3), "1F0": (1, 3), "1B0": (3, 5), "1F1": (5, 7), "0B0": (5, 9),
        "1B1": (7, 10), "0B1": (10, 12),
    }  # fmt: skip


def test_a_message_takes_a_core_of_who_computes() -> None:
    """0SEND_F0, one second, beside 0F1, four: two seconds at half the core each; 1F0 then takes the other half."""
    found = spans("gpipe", Mesh(1, 2, 1), 2, 1, take(4, 4, 1, 2), with_cores(1))
    assert found["0F0"] == (0, 4)
    assert found["0SEND_F0"] == (4, 6)
    assert found["0F1"] == (4, 4 + 2 + 6)
    assert found["1F0"][0] == 6


def test_peers_share_by_node() -> None:
    """Four replicas on a node of two cores take twice as long; two on each of two nodes do not."""
    times = take(1, 2, 0, 1)
    assert spans("1f1b", Mesh(1, 1, 4), 1, 1, times, with_cores(2))["0B0"] == (2, 6)
    assert spans("1f1b", Mesh(1, 1, 4), 1, 1, times, with_cores(2, per_node=2))["0B0"] == (1, 3)


def test_who_waits_to_be_woken_leaves_the_core_to_others() -> None:
    """A forward of 1 on the core and 3 of latency, a backward of 2 and 2: on one core, two replicas at work half the
    time or less do not meet; of four, whose backwards want two cores, the latency passes while others work."""
    times, waiting = take(4, 4, 0, 1), take(3, 2, 0, 1)

    def run(replicas: int) -> dict[str, tuple[float, float]]:
        return spans("1f1b", Mesh(1, 1, replicas), 1, 1, times, with_cores(1), waiting)

    assert run(1) == run(2) == {"0F0": (0, 4), "0B0": (4, 8)}
    assert run(4)["0F0"] == (0, 4)
    assert run(4)["0B0"] == pytest.approx((4, 4 + 4 * 2))
    assert run(8)["0F0"] == pytest.approx((0, 8 * 1))


def test_who_waits_less_is_held_up_more() -> None:
    """On one core 1 s of work alone, and 1 s of it with 1 s of latency. With a share s of the core whenever they want
    it they take 1/s and 1/s + 1, and both together the whole core: s + 1 / (1/s + 1) = 1, s = (sqrt(5) - 1) / 2."""
    share = share_cores([(1, Spell(1, 0)), (1, Spell(1, 1))], 1)
    assert share == pytest.approx((5**0.5 - 1) / 2)
    assert share_cores([(1, Spell(1, 0)), (1, Spell(1, 1)), (3, Spell(0, 1))], 2) == 1
    assert share_cores([(2, Spell(1, 0)), (2, Spell(5, 0))], 1) == 1 / 4


def test_latency_is_not_computed_by_anybody(program: autoptd.CompiledProgram) -> None:
    """Eight ranks on one core: a latency that takes no core is lost in the crowd, and one that does is paid by all."""
    crowd = with_cores(1)
    step = program.simulate(crowd).step_seconds
    slow = replace(crowd.node, latency_seconds=2 * crowd.node.latency_seconds)
    assert program.simulate(replace(crowd, node=slow)).step_seconds == pytest.approx(step, rel=0.02)
    busy = replace(slow, core_seconds=slow.latency_seconds, crowded_seconds=slow.latency_seconds)
    assert program.simulate(replace(crowd, node=busy)).step_seconds > 1.2 * step


def test_who_takes_turns_finds_cold_caches(program: autoptd.CompiledProgram) -> None:
    """Work and waking take longer where cores are shared, and only there."""
    crowd, node = with_cores(2), LAPTOP.node
    cold = replace(
        crowd,
        device=replace(crowd.device, crowded_efficiency=0.8),
        node=replace(node, crowded_seconds=5 * node.core_seconds),
    )
    assert cold.shared_by(2) is cold
    shared = cold.shared_by(8)
    assert shared.device.peak_flops == crowd.device.peak_flops
    assert shared.device.launch_seconds == crowd.device.launch_seconds / 0.8
    assert shared.node.core_seconds == shared.node.latency_seconds == 5 * node.core_seconds
    assert shared.shared_by(8) == shared
    warm, found = program.simulate(crowd), program.simulate(cold)
    assert found.step_seconds > warm.step_seconds / 0.8
    assert found.cluster is cold
    alone = replace(cold, devices_at_once=8)
    assert program.simulate(alone).step_seconds == program.simulate(LAPTOP).step_seconds


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize(
    ("name", "p", "m", "v"), [("gpipe", 3, 5, 1), ("1f1b", 4, 6, 1), ("interleaved_1f1b", 3, 6, 2)]
)
def test_with_a_core_for_every_job_nobody_waits(name: str, p: int, m: int, v: int, blocking: bool) -> None:
    schedule = make_schedule(name, p, m, v)
    times = take(1, 2, 0.25, p * v, blocking)
    plenty = replace(LAPTOP, devices_per_node=8, devices_at_once=1000)
    waiting = take(0.5, 1, 0.125, p * v)
    shared = sorted(walk_shared(schedule, times, waiting, Mesh(1, p, 1), plenty))
    assert shared == sorted(walk(walking_order(schedule), p, times))


@pytest.fixture(scope="module")
def program() -> autoptd.CompiledProgram:
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=256, block_size=32, n_layer=4, n_head=4, n_embd=64))
    return autoptd.compile(model, mesh=(2, 2, 2), num_microbatches=4, num_model_chunks=2)


def test_fewer_cores_take_longer(program: autoptd.CompiledProgram) -> None:
    """As many cores as ranks are as good as a node of chips; one core does everybody's work, one after the other."""
    steps = {cores: program.simulate(with_cores(cores)) for cores in (1, 2, 4, 8)}
    assert steps[8] == replace(program.simulate(LAPTOP), cluster=steps[8].cluster)
    assert steps[1].step_seconds > steps[2].step_seconds > steps[4].step_seconds > steps[8].step_seconds
    assert "sharing" not in steps[8].breakdown
    jobs = sum(entry.end - entry.start for row in steps[8].timeline for entry in row)
    assert max(row[-1].end for row in steps[1].timeline) == pytest.approx(4 * jobs)  # tensor and data peers


def test_the_parts_add_up_to_the_step(program: autoptd.CompiledProgram) -> None:
    step = program.simulate(with_cores(2))
    assert step.breakdown["sharing"] > 0
    assert sum(step.breakdown.values()) == pytest.approx(step.step_seconds)


def test_more_at_once_than_there_are_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    with_cores(8).save(file, "a test")
    file.write_text(file.read_text().replace("devices_at_once = 8", "devices_at_once = 9"))
    with pytest.raises(ValueError, match="devices_at_once = 9: expected at most devices_per_node, 8"):
        Cluster.load(file)
