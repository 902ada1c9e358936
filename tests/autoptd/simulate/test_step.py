"""A program's step on a described cluster: times against closed forms, memory against the ledger."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import nn
from torch.nn import functional

import autoptd
from autoptd import Cluster
from autoptd.passes.cost.cluster import Link
from autoptd.passes.cost.durations import Seconds
from autoptd.passes.cost.saved_tensors import Ledger, count_bytes
from autoptd.passes.cost.schedule_times import ActionTimes, walk, walking_order
from autoptd.passes.cost.work import backward_work
from autoptd.passes.ir.program import Stage, find_trained, recomputed_groups
from autoptd.runtime import collectives
from autoptd.runtime.comm.trace import box_colours, write_svg
from autoptd.runtime.program.mesh import Mesh
from autoptd.runtime.program.schedule import COMPUTING, Kind, assign_slots, make_schedule
from autoptd.simulate.stage_times import WorkTimes
from autoptd.simulate.step import Simulation, Training, simulate_program
from autoptd.text.comments import write_bytes
from samples.benchmarks.uniform_cut import uniform_cuts
from samples.gpt import GPT, GPTConfig
from tests.models import MIDDLE, compile_tiny, make_gpt, tiny

LAYERS, HIDDEN, VOCABULARY, LENGTH = MIDDLE.n_layer, MIDDLE.n_embd, MIDDLE.vocab_size, MIDDLE.block_size
B = 2
SELENE = Cluster.load("dgx-a100")
# Messages and all-reduces that take no time, and no launches: only work is left.
FREE = Link(1e30, 1.0, 1.0, 1e-30)
STILL = replace(SELENE, node=FREE, network=FREE, device=replace(SELENE.device, launch_seconds=1e-30, tile_seconds=0.0))


compile_gpt = partial(tiny, config=MIDDLE, dtype=torch.bfloat16, device="meta", microbatch_size=B)


def test_frozen_layers_count_as_what_they_do() -> None:
    """No gradients of weights; beneath the lowest trained one none at all: as `program.cost` has it."""
    model = make_gpt(MIDDLE, torch.bfloat16, device="meta")
    whole = autoptd.compile(model, mesh=(1, 1, 1), microbatch_size=B, num_microbatches=2)
    model.h.requires_grad_(False)
    program = autoptd.compile(model, mesh=(1, 1, 1), microbatch_size=B, num_microbatches=2)
    simulated = program.simulate(SELENE)
    counted = simulated.tflops_per_device * 1e12 * simulated.step_seconds
    assert counted == pytest.approx(program.cost.evaluate(program.cost.flops))
    assert counted < 0.9 * whole.cost.evaluate(whole.cost.flops)


@pytest.mark.parametrize(("t", "recompute"), [(1, "none"), (1, "full"), (2, "full")])
def test_flops_are_equation_3(t: int, recompute: str) -> None:
    """SC21 equation (3), and without recomputation three passes in place of the layers' four."""
    program = compile_gpt((t, 1, 2), num_microbatches=3, recompute=recompute)
    simulated = program.simulate(SELENE)
    batch, s, h, layers = B * 3 * 2, LENGTH, HIDDEN, LAYERS
    model = 72 * batch * s * layers * h**2 * (1 + s / (6 * h) + VOCABULARY / (12 * layers * h))
    again = 24 * batch * s * layers * h**2 * (1 + s / (6 * h))
    whole = 96 * batch * s * layers * h**2 * (1 + s / (6 * h) + VOCABULARY / (16 * layers * h))
    assert model + again == pytest.approx(whole)
    time = simulated.step_seconds * 2 * t
    assert simulated.mfu * 312e12 * time == pytest.approx(model)
    assert simulated.tflops_per_device * 1e12 * time == pytest.approx(whole if recompute == "full" else model)


def test_one_rank_works_through_its_microbatches() -> None:
    one, four = (compile_gpt((1, 1, 1), num_microbatches=m).simulate(SELENE) for m in (1, 4))
    assert four.breakdown["compute"] == pytest.approx(4 * one.breakdown["compute"])
    assert four.bubble_fraction == pytest.approx(0, abs=1e-12)
    assert four.breakdown["optimizer"] == pytest.approx(one.breakdown["optimizer"]) != 0
    assert {four.breakdown[kind] for kind in ("tensor", "pipeline", "data")} == {0}


@pytest.mark.parametrize(("mesh", "chunks"), [((1, 1, 1), 1), ((1, 2, 1), 2)], ids=str)
def test_a_device_with_graphs_launches_each_direction_once(mesh: tuple[int, int, int], chunks: int) -> None:
    """And each of its kernels as fast as a graph does."""
    program = compile_gpt(mesh, num_microbatches=4, num_model_chunks=chunks)
    devices = (
        replace(SELENE.device, launch_seconds=1e-6),
        replace(SELENE.device, launch_seconds=3e-3, graphed_launch_seconds=1e-6),
    )
    plain, graphed = (program.simulate(replace(SELENE, device=device)) for device in devices)
    for rows in zip(plain.timeline, graphed.timeline, strict=True):
        alone, whole = (sum(e.end - e.start for e in row if e.action.kind.computes) for row in rows)
        assert whole - alone == pytest.approx(4 * chunks * 2 * 3e-3)
    more = graphed.breakdown["compute"] - plain.breakdown["compute"]
    assert more == pytest.approx(4 * chunks * 2 * 3e-3, rel=0.02)  # the other rank may be the critical one
    idle = WorkTimes(Seconds(1.0), Seconds(), 0.0, 0.0, 0.0)  # of a stage without weights to train
    assert idle.launched_on(devices[1]) == replace(idle, forward=Seconds(1.003))
    assert idle.launched_on(devices[0]) == idle


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ((1, 1, 1), {}),
        ((2, 2, 2), {"num_microbatches": 4, "num_model_chunks": 2}),
        ((1, 4, 1), {"num_microbatches": 4, "num_model_chunks": 1, "recompute": "full"}),
        ((2, 1, 4), {"scatter_gather": False}),
    ],
    ids=str,
)
def test_the_breakdown_is_the_step(mesh: tuple[int, int, int], options: dict[str, Any]) -> None:
    simulated = compile_gpt(mesh, **options).simulate(SELENE)
    assert sum(simulated.breakdown.values()) == pytest.approx(simulated.step_seconds)
    assert min(simulated.breakdown.values()) >= -1e-12
    t, p, d = mesh
    assert (simulated.breakdown["tensor"] > 0) == (t > 1)
    assert (simulated.breakdown["pipeline"] > 0) == (p > 1)
    assert (simulated.breakdown["data"] > 0) == (d > 1 or p > 1)  # the tied table


@pytest.mark.parametrize(("p", "v", "m"), [(2, 1, 8), (4, 1, 8), (2, 2, 8), (4, 2, 16)])
def test_the_bubble_is_the_closed_form_for_even_stages(p: int, v: int, m: int) -> None:
    """(p - 1)/(v m), as far as the stages are even: each rank's time is within 3 % of the mean, and messages
    take none."""
    simulated = compile_gpt((1, p, 1), num_microbatches=m, num_model_chunks=v).simulate(STILL)
    rows = simulated.timeline
    busy = [sum(e.end - e.start for e in row if e.action.kind.computes) for row in rows]
    uneven = max(busy) * p / sum(busy)
    pipelined = max(row[-1].end for row in rows)
    # Equation (1) with the mean rank, and the shortest stage in its bubble, is a lower bound, with the slowest rank an
    # upper one.
    mean = sum(busy) / p / m
    stages = defaultdict[int, float](float)
    for event in (event for row in rows for event in row if event.action.kind.computes):
        stages[event.action.stage] += (event.end - event.start) / m
    assert m * mean + (p - 1) * min(stages.values()) <= pipelined <= (m + (p - 1) / v) * mean * uneven * 1.02
    assert simulated.bubble_fraction == pytest.approx((p - 1) / (v * m), abs=0.5 * (uneven - 1) + 0.02)


def test_a_blocking_sender_waits_for_its_message() -> None:
    """Two ranks, 1F1B: either sends once a microbatch, so the period is tf + tb + the message's time."""
    m, forward, backward, message = 12, 3, 5, 2
    taken = dict(zip(COMPUTING, (forward, backward), strict=True)) | {kind.send: message for kind in COMPUTING}
    order = walking_order(make_schedule("1f1b", 2, m, 1))

    def step(blocking: bool) -> float:
        times = ActionTimes({kind: [time] * 2 for kind, time in taken.items()}, blocking)
        return float(max(end for _, _, _, end in walk(order, 2, times)))

    assert step(True) == (m + 1) * (forward + backward + message)
    assert step(False) < step(True)


def test_blocking_messages_are_exposed() -> None:
    program = compile_gpt((1, 2, 1), num_microbatches=8)
    overlapped, waiting = (program.simulate(SELENE, overlap=kept) for kept in (True, False))
    assert overlapped.step_seconds < waiting.step_seconds
    assert overlapped.breakdown["pipeline"] < waiting.breakdown["pipeline"]


def test_an_all_reduce_is_exposed_as_far_as_it_is_longer_than_what_is_beside_it() -> None:
    program = compile_gpt((2, 1, 1), num_microbatches=2)
    after, beside = (program.simulate(SELENE, overlap=kept) for kept in (False, True))
    (stage,) = program.stages
    trained = find_trained(stage)
    works = [backward_work(n, trained) for n in stage.graph.nodes if n.target in collectives.COPIED]
    sums = [SELENE.all_reduce_seconds(work.reduced, range(2)) for work in works]
    meanwhile = [SELENE.device.seconds(work.overlapped, "bf16") for work in works if work.overlapped is not None]
    assert len(works) == len(meanwhile) == 2 * LAYERS + 1
    hidden = 2 * sum(map(min, sums, meanwhile))
    assert 0 < hidden < after.breakdown["tensor"]
    assert beside.breakdown["tensor"] == pytest.approx(after.breakdown["tensor"] - hidden)
    assert beside.step_seconds == pytest.approx(after.step_seconds - hidden)
    assert beside.breakdown["compute"] == after.breakdown["compute"]
    # A core sums and copies itself.
    core = replace(SELENE, device=replace(SELENE.device, multiprocessors=1))
    assert program.simulate(core) == program.simulate(core, overlap=False)


def test_scatter_gather_sends_less() -> None:
    def longest(scatter_gather: bool) -> float:
        model = make_gpt(MIDDLE, torch.bfloat16, device="meta")
        program = autoptd.compile(model, (4, 2, 1), microbatch_size=B, scatter_gather=scatter_gather, cluster=slow)
        assert max(len(stage.sends) for stage in program.manifest.stages) == 1
        simulated = program.simulate(nodes_of_four)
        return max(e.end - e.start for row in simulated.timeline for e in row if e.action.kind is Kind.SEND_OUTPUT)

    nodes_of_four = replace(SELENE, devices_per_node=4)
    # Where messages take long, stages end where one value lives.
    slow = replace(nodes_of_four, network=replace(SELENE.network, latency_seconds=1e-3))
    size, latency = 2 * B * LENGTH * HIDDEN, SELENE.network.latency_seconds
    assert longest(False) == pytest.approx(size / SELENE.network.message_rate + latency)
    assert longest(True) == pytest.approx(size / 4 / SELENE.network.message_rate + latency)


@pytest.mark.parametrize("nodes", [3, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mesh", [(2, 2, 2), (4, 1, 2), (2, 1, 4), (1, 2, 4)], ids=str)
def test_the_slowest_of_all_replicas_counts(mesh: tuple[int, int, int], nodes: int) -> None:
    """Where groups part over nodes some do and others not: whichever replica, or tensor rank, is named first."""
    t, p, d = mesh
    cluster = replace(SELENE, devices_per_node=nodes, nics_per_node=1)
    program = compile_gpt(mesh)

    def simulate(on: Cluster, replica: int = 0, tensor: int = 0) -> Simulation:
        places = product(range(d), range(p), range(t))
        ranks = [program.mesh.rank_of((i + replica) % d, j, (k + tensor) % t) for i, j, k in places]
        manifest = replace(program.manifest, mesh=Mesh(**program.mesh.axes, ranks=tuple(ranks)))
        schedule = make_schedule(manifest.schedule, p, manifest.num_microbatches, 1)
        return simulate_program(manifest, program.stages, schedule, on, None, Training(overlap=False))

    step, together = simulate(cluster), simulate(replace(cluster, devices_per_node=8))
    for first in product(range(d), range(t)):
        assert simulate(cluster, *first).breakdown == pytest.approx(step.breakdown)
    parted = {"data": d, "tensor": t, "pipeline": p}
    assert all(step.breakdown[kind] > 1.5 * together.breakdown[kind] for kind, n in parted.items() if n > 1)


@pytest.mark.parametrize("cards", [8, 4, 1])
def test_replicas_of_one_node_share_its_cards(cards: int) -> None:
    """Replicas beside each other, as Megatron-LM places them: eight messages leave a node at once."""
    program = compile_gpt((1, 2, 8), num_microbatches=2, num_model_chunks=1)
    placed = Mesh(1, 2, 8, ranks=tuple(j * 8 + i for i in range(8) for j in range(2)))
    cluster = replace(SELENE, nics_per_node=cards)
    schedule = make_schedule("1f1b", 2, 2, 1)
    given = replace(program.manifest, mesh=placed), program.stages, schedule, cluster, None, Training()
    sent = next(e for e in simulate_program(*given).timeline[0] if e.action.kind is Kind.SEND_OUTPUT)
    (size,) = {boundary.bytes for boundary in program.manifest.stages[0].sends}
    expected = size * 8 / cards / cluster.network.message_rate + cluster.network.latency_seconds
    assert sent.end - sent.start == pytest.approx(expected)


def test_gradients_are_reduced_after_the_step_or_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    program = compile_gpt((1, 1, 16), num_microbatches=2)
    after, beside = (program.simulate(SELENE, overlap=kept) for kept in (False, True))
    elements = sum(p.numel() for p in GPT(GPTConfig(VOCABULARY, LENGTH, LAYERS, 4, HIDDEN)).parameters())
    expected = SELENE.all_reduce_seconds(4 * elements, range(16))  # in float32
    assert after.breakdown["data"] == pytest.approx(expected)
    # One stage and one bucket: nothing is left to run beside the sum of its gradients.
    assert beside.breakdown["data"] == after.breakdown["data"]
    narrow = program.simulate(SELENE, wide_gradients=False)
    assert narrow.breakdown["data"] == pytest.approx(SELENE.all_reduce_seconds(2 * elements, range(16)))
    monkeypatch.setattr("autoptd.simulate.step.BUCKET_BYTES", 4 * elements / 8)
    beside = program.simulate(SELENE)
    backward = beside.timeline[0][-1]
    first = backward.start + (backward.end - backward.start) / 8
    left = max(first + expected, backward.end + expected / 8) - backward.end
    assert beside.breakdown["data"] == pytest.approx(left)
    assert left < expected


def test_gradients_are_reduced_while_other_stages_run_backwards() -> None:
    program = compile_gpt((1, 2, 16), num_microbatches=4, num_model_chunks=2)
    after, beside = (program.simulate(SELENE, overlap=kept) for kept in (False, True))
    assert 0 < beside.breakdown["data"] < after.breakdown["data"]
    core = replace(SELENE, device=replace(SELENE.device, multiprocessors=1))  # sums and copies itself
    alone = compile_gpt((1, 1, 16), num_microbatches=4)
    assert alone.simulate(core) == alone.simulate(core, overlap=False)


def test_more_processes_than_cores_are_refused() -> None:
    laptop = Cluster.load("laptop-cpu")
    measured = replace(laptop, devices_per_node=2, network=laptop.node)  # as `calibrate` describes two cores
    for mesh in ((2, 1, 1), (1, 2, 1)):
        assert compile_gpt(mesh).simulate(measured).step_seconds > 0
    with pytest.raises(ValueError, match="4 processes on the 2 cores of laptop CPU: expected at most one process"):
        compile_gpt((2, 2, 1)).simulate(measured)


def kept(program: autoptd.CompiledProgram) -> list[int]:
    return [count_bytes(Ledger(stage, program.mesh).kept(recomputed_groups(stage.graph))) for stage in program.stages]


def differentiated(program: autoptd.CompiledProgram, index: int) -> list[int]:
    """Bytes of the gradients at each call of a stage."""
    stage = program.stages[index]
    ledger, trained = Ledger(stage, program.mesh), find_trained(stage)
    return [ledger.differentiated(node, trained) for node in ledger.nodes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_live_beside_what_is_kept(dtype: torch.dtype) -> None:
    program = compile_tiny((1, 1, 1), MIDDLE, dtype, "meta", microbatch_size=B)
    item = dtype.itemsize
    logits, table, last = (item * x for x in (B * LENGTH * VOCABULARY, VOCABULARY * HIDDEN, B * LENGTH * HIDDEN))
    *_, head, loss = (size for size in differentiated(program, 0) if size not in (0, last, 2 * last))
    assert loss == logits + item
    assert head == table + last + logits


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_memory_in_flight_is_the_ledgers(schedule: str) -> None:
    """1F1B holds p - r microbatches on rank r, GPipe all m (SC21 §2.2)."""
    p, m = 4, 8
    program = compile_gpt((1, p, 1), num_microbatches=m, num_model_chunks=1, schedule=schedule)
    simulated = program.simulate(SELENE)
    # One microbatch's gradients live beside it.
    beside = [working(program, index) for index in range(p)]
    boundary = 2 * B * LENGTH * HIDDEN
    for rank, own in enumerate(kept(program)):
        owned = [program.manifest.parameters[n] for n in program.manifest.stages[rank].parameters]
        static = sum(p.bytes * (9 if p.kind == "parameter" else 1) for p in owned)
        flying = (p - rank if schedule == "1f1b" else m) * own
        interface, count = program.manifest.stages[rank], flying // own
        received = sum(b.bytes for b in interface.receives)
        static += count * (received + sum(b.bytes for b in interface.sends))  # in slots
        least = static + flying - count * received + beside[rank]
        course = simulated.memory[rank]
        end = simulated.timeline[rank][-1].end
        # Beside it at most the buffers of receives that are posted early.
        assert least <= max(size for at, size in course if at <= end) <= least + 4 * boundary + own * 0.01
        assert simulated.memory_bytes[rank] == max(size for _, size in course)
        assert course[-1][1] == static  # all is freed
        assert all(one[0] <= other[0] for one, other in pairwise(course))


def working(program: autoptd.CompiledProgram, index: int) -> int:
    """The most bytes that the backward of a stage holds besides what is kept."""
    stage = program.stages[index]
    ledger, trained = Ledger(stage, program.mesh), find_trained(stage)
    again = {node: count_bytes(ledger.saved(group)) for group in ledger.groups for node in group}
    return max(ledger.differentiated(node, trained) + again.get(node, 0) for node in ledger.nodes)


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ((1, 1, 1), {"num_microbatches": 2, "recompute": "full"}),
        ((1, 2, 1), {"num_microbatches": 4, "num_model_chunks": 2}),
        ((2, 2, 1), {"num_microbatches": 3, "num_model_chunks": 1, "schedule": "gpipe"}),
    ],
    ids=str,
)
def test_slots_with_graphs_hold_their_memory_all_the_time(mesh: tuple[int, int, int], options: dict[str, Any]) -> None:
    program, p = compile_gpt(mesh, **options), mesh[1]
    device = replace(SELENE.device, graphed_launch_seconds=1e-6)
    plain, graphed = (program.simulate(replace(SELENE, device=one)) for one in (SELENE.device, device))
    pools, buffers = [0] * p, [0] * p
    for index, interface in enumerate(program.manifest.stages):
        count = len({*assign_slots(program.schedule[index % p])[index].values()})
        received = sum(boundary.bytes for boundary in interface.receives)
        pools[index % p] += count * (kept(program)[index] - received + working(program, index))
        buffers[index % p] += count * (received + sum(boundary.bytes for boundary in interface.sends))
    held = program.overview.slot_bytes
    assert held == tuple(map(sum, zip(pools, buffers, strict=True)))
    assert f"hold at most {write_bytes(max(held))} all the time" in str(program)
    assert held[graphed.memory_bytes.index(max(graphed.memory_bytes))] == graphed.held_bytes["slots"]
    assert graphed.held_bytes["activations"] == 0
    for pool, before, course in zip(pools, plain.memory, graphed.memory, strict=True):
        assert min(size for _, size in course) == course[-1][1] == before[-1][1] + pool
        more = max(size for _, size in course) - max(size for _, size in before)
        assert more > 0 if p > 1 else more == 0  # a single slot's backward is all there is


def test_recomputation_holds_one_group_at_a_time() -> None:
    program = compile_gpt((1, 1, 1), dtype=torch.float32, num_microbatches=2, recompute="full")
    largest = working(program, 0)
    assert largest > max(differentiated(program, 0))
    simulated = program.simulate(SELENE)
    assert simulated.held_bytes["activations"] == kept(program)[0] + largest
    assert sum(simulated.held_bytes.values()) == simulated.memory_bytes[0]


@pytest.mark.parametrize(("dtype", "each"), [(torch.bfloat16, 4), (torch.float32, 0)])
def test_an_optimizer_makes_narrow_gradients_wide(dtype: torch.dtype, each: int) -> None:
    program = compile_gpt((1, 1, 2), dtype=dtype)
    trained = sum(p.numel() for p in program.model.parameters()) if program.model else 0
    for zero in (0, 1):
        wide = program.simulate(SELENE, zero=zero)
        assert wide.memory[0][-1][1] >= wide.memory[0][-2][1]  # nothing is copied
        simulated = program.simulate(SELENE, zero=zero, wide_gradients=False)
        (optimizer,) = (phase for phase in simulated.phases if phase.name == "optimizer")
        static = simulated.memory[0][-1][1]
        held = [size for at, size in simulated.memory[0] if at == optimizer.start]
        assert held[-1] == static + each * trained / (2 if zero else 1)


def test_zero_divides_the_optimizers_states() -> None:
    program = compile_gpt((1, 1, 4))
    plain, sharded = program.simulate(SELENE), program.simulate(SELENE, zero=1)
    assert sharded.held_bytes["optimizer"] == plain.held_bytes["optimizer"] / 4
    # A ring's all-reduce is a reduce-scatter, and an all-gather: of weights here, half as wide as the gradients.
    assert sharded.breakdown["data"] == pytest.approx(plain.breakdown["data"] / 2)
    gathered = plain.breakdown["data"] / 4
    assert sharded.breakdown["optimizer"] == pytest.approx(plain.breakdown["optimizer"] / 4 + gathered)


def test_simulations_say_what_does_not_fit_in_memory() -> None:
    program = compile_gpt((1, 1, 1))
    small = replace(SELENE, device=replace(SELENE.device, memory_bytes=1e6, reserved_bytes=0.0))
    assert program.simulate(SELENE).fits
    assert not program.simulate(small).fits
    assert "more than 0.001 GB" in str(program.simulate(small))


def test_another_dtype_than_the_programs() -> None:
    wide, half = (compile_gpt((1, 2, 1), dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    assert wide.simulate(SELENE).dtype == "fp32"
    assert half.simulate(SELENE).dtype == "bf16"
    as_half = wide.simulate(SELENE, "bf16")
    assert as_half.step_seconds == pytest.approx(half.simulate(SELENE).step_seconds, rel=0.1)
    assert wide.simulate(SELENE).step_seconds > 1.5 * as_half.step_seconds


def test_under_autocast_products_are_computed_in_its_dtype() -> None:
    """On as many tensor cores as in a model of bfloat16, with the bytes and casts of float32."""
    wide, half = (compile_gpt((2, 2, 1), dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    with torch.autocast("cpu", torch.bfloat16):
        program = compile_gpt((2, 2, 1), dtype=torch.float32)
    only = replace(STILL, device=replace(STILL.device, memory_bandwidth=1e30, vector_flops=1e30))
    steps = [one.simulate(only) for one in (wide, half, program)]
    assert steps[2].step_seconds == pytest.approx(steps[1].step_seconds, rel=0.1)
    assert steps[2].step_seconds < steps[0].step_seconds / 10
    assert steps[2].mfu == pytest.approx(steps[1].mfu, rel=0.1)
    assert program.simulate(only, "bf16").step_seconds == pytest.approx(steps[2].step_seconds)
    assert half.simulate(only, "fp32").step_seconds == pytest.approx(steps[0].step_seconds, rel=0.1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("dgx-h100", "fp8"), "dtype='fp8': expected one of fp64, fp32, tf32, bf16, fp16, to store weights in"),
        (("dgx-a100", "bf61"), "dtype='bf61': expected one of fp64, fp32"),
        (("dgx-1-v100", "bf16"), "V100-SXM2-32GB has no bf16: expected one of fp16, fp32, fp64"),
        (("dgx-a100", ["bf16"]), "dtype=['bf16']: expected one of fp64, fp32"),
        (("dgx-b100",), "cluster 'dgx-b100' is not shipped"),
    ],
)
def test_impossible_simulations_are_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match="expected") as refusal:
        compile_gpt((1, 1, 1)).simulate(*arguments)
    assert message in str(refusal.value)


@pytest.mark.parametrize("zero", [3, True, 1.0, "1"])
def test_zero_has_one_stage_here(zero: Any) -> None:
    with pytest.raises(ValueError, match=f"zero={zero!r}: expected 0 or 1"):
        Training(zero=zero)


@pytest.mark.parametrize(("name", "value"), [("overlap", "no"), ("wide_gradients", "off")])
def test_how_a_step_is_run_is_true_or_false(name: str, value: Any) -> None:
    """A text is neither, whatever it says."""
    with pytest.raises(ValueError, match=f"{name} is {value!r}; expected True or False"):
        Training(**{name: value})


def test_equal_layers_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ledger is taken once for all equal stages, and says the same for each."""
    with uniform_cuts():
        options = {"microbatch_size": B, "num_microbatches": 4, "num_model_chunks": 2, "recompute": "full"}
        program = compile_tiny((1, 4, 1), MIDDLE, torch.float32, "meta", **options)
    taken = []

    def take(stage: Stage, mesh: Mesh) -> Ledger:
        taken.append(stage)
        return Ledger(stage, mesh)

    monkeypatch.setattr("autoptd.simulate.stage_times.Ledger", take)
    simulated = program.simulate(SELENE)
    assert len(taken) < len(program.stages)
    assert simulated.held_bytes["activations"] >= max(kept(program))


def test_a_traces_events_nest(tmp_path: Path) -> None:
    """What is on one thread of a trace never overlaps; the messages of a rank to both its neighbours may."""
    simulated = compile_gpt((1, 4, 1), num_microbatches=4, num_model_chunks=2).simulate(SELENE)
    simulated.save_trace(tmp_path / "step.json")
    trace = json.loads((tmp_path / "step.json").read_text())
    assert trace["otherData"] == {"step": "predicted", "cluster": SELENE.name, "dtype": "bf16"}
    threads: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":  # microseconds of three decimals: viewers count whole nanoseconds
            begin, length = (round(1000 * event[key]) for key in ("ts", "dur"))
            assert (begin / 1000, length / 1000) == (event["ts"], event["dur"])
            threads.setdefault((event["pid"], event["tid"]), []).append((begin, begin + length))
    named = {(e["pid"], e["tid"]) for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert set(threads) == named
    assert len(threads) == 4 + 2 * 4 + 4 == len({number for _, number in threads})
    assert {(rank, rank) for rank in range(4)} <= named  # as a process's first thread
    for spans in threads.values():
        for before, after in pairwise(sorted(spans)):
            assert after[0] >= before[1]


def test_a_picture_of_a_long_step_has_every_box(tmp_path: Path) -> None:
    step = autoptd.simulate_schedule("gpipe", p=4, m=800, forward_seconds=1.0, backward_seconds=2.0)
    write_svg(tmp_path / "step.svg", step.timeline, ())
    boxes = [e.attrib for e in ElementTree.parse(tmp_path / "step.svg").iter() if e.tag.endswith("rect")]
    assert {box["fill"] for box in boxes} == {fill for fill, _ in box_colours(1)}
    assert len(boxes) == 4 * 800 * 2
    assert sum(float(box["width"]) for box in boxes) == pytest.approx(4 * 1200 * 800 / 803, rel=0.01)


def test_files_to_look_at(tmp_path: Path) -> None:
    program = compile_gpt((1, 2, 2), num_microbatches=4, num_model_chunks=2)
    simulated = program.simulate(SELENE)
    simulated.save_trace(tmp_path / "step.json.gz")
    trace = json.loads(gzip.decompress((tmp_path / "step.json.gz").read_bytes()))["traceEvents"]
    spans = [event for event in trace if event["ph"] == "X"]
    assert {event["pid"] for event in spans} == {0, 1}
    assert max(event["ts"] + event["dur"] for event in spans) == pytest.approx(simulated.step_seconds * 1e6)
    names = [str(action) for row in program.schedule for action in row if action.kind.computes]
    assert sorted(e["name"] for e in spans if e["tid"] == e["pid"]) == sorted(names)
    assert sorted(e["name"] for e in spans if e["tid"] // 2 == 3) == 2 * ["optimizer"] + 2 * ["sums of gradients"]
    simulated.save_svg(tmp_path / "step.svg")
    picture = ElementTree.parse(tmp_path / "step.svg").getroot()
    assert picture.tag.endswith("svg")
    assert {element.text for element in picture.iter() if element.tag.endswith("text")} <= {"0", "1", "2", "3"}
    assert sum(element.tag.endswith("rect") for element in picture.iter()) == len(names) + 4


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_memory_bounds_elementwise_kernels_on_gpus(recompute: str) -> None:
    """What they compute never takes longer than what they move: with no bound on it the step is the same bits.

    With dropout, attention is written out; the exponentials of a fused one take time of their own.
    """
    program = compile_gpt((2, 2, 1), config=replace(MIDDLE, dropout=0.1), num_microbatches=4, recompute=recompute)
    for name in ("dgx-1-v100", "dgx-a100", "p4de", "dgx-h100", "dgx-h200", "gb200-nvl72"):
        cluster, dtype = Cluster.load(name), "fp16" if name == "dgx-1-v100" else "bf16"
        unbound = replace(cluster, device=replace(cluster.device, vector_flops=1e30))
        steps = [program.simulate(found, dtype).step_seconds for found in (cluster, unbound)]
        assert steps[0] == steps[1], name


class EinsumAttention(nn.Module):
    """Attention by weights of three dimensions, as some write it."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.out = nn.Embedding(64, 32), nn.Linear(32, 64)
        self.qkv = nn.ParameterList(nn.Parameter(torch.empty(32, 4, 8)) for _ in range(3))
        self.proj = nn.Parameter(torch.empty(4, 8, 32))

    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.wte(idx)
        q, k, v = (torch.einsum("bsh,had->bsad", x, w).transpose(1, 2) for w in self.qkv)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + torch.einsum("bsad,adh->bsh", attended, self.proj)
        return functional.cross_entropy(self.out(x).flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("name", ["einsum", "gpt", "gpt recomputed"])
def test_model_flops_are_those_of_one_device(name: str) -> None:
    """Also where tensor ranks repeat a product, which is no more of the model's work."""
    config, ids = GPTConfig(64, 16, 2, 4, 32), torch.zeros((2, 16), dtype=torch.long)
    with torch.device("meta"):
        model = EinsumAttention() if name == "einsum" else GPT(config)
    options: Any = {"example_inputs": {"idx": ids, "targets": ids.clone()}, "num_microbatches": 2}
    options["recompute"] = "full" if "recomputed" in name else "none"
    counts, computed = [], []
    for mesh in ((1, 1, 1), (2, 1, 1), (2, 2, 1)):
        program = autoptd.compile(model, mesh=mesh, **options)
        simulated = program.simulate(SELENE, "bf16")
        each = simulated.step_seconds * program.mesh.size
        counts.append(simulated.mfu * 312e12 * each)
        computed.append(simulated.tflops_per_device * 1e12 * each)
    assert counts == pytest.approx([counts[0]] * 3, rel=1e-12)
    assert (counts[0] == pytest.approx(computed[0])) is ("recomputed" not in name)
    assert (computed[1] > 1.1 * computed[0]) is (name == "einsum")


LIBRARY = torch.library.Library("step_test", "FRAGMENT")
LIBRARY.define("mix(Tensor x, Tensor y) -> Tensor")
torch.library.impl(LIBRARY, "mix", "Meta")(lambda x, y: x.new_empty(*x.shape[:-1], y.shape[-1]))
torch.library.impl(LIBRARY, "mix", "CPU")(lambda x, y: x @ y)


class Mixed(torch.nn.Module):
    """A product of which torch's counter sees nothing, before one that is counted."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.wte, self.out = torch.nn.Embedding(64, 32), torch.nn.Linear(32, 64)
        self.mixing = torch.nn.Buffer(torch.ones(32, 32) if width else torch.ones(1))

    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.wte(idx)
        if self.mixing.dim() == 2:
            x = torch.ops.step_test.mix(x.detach(), self.mixing) + x
        return torch.nn.functional.cross_entropy(self.out(x).flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("width", [0, 32])
def test_what_no_rule_counts_is_named_with_its_share(width: int, tmp_path: Path) -> None:
    """By a simulation and its explanation, in a loaded program too, and by a plan."""
    ids = torch.zeros((2, 16), dtype=torch.long)
    given: Any = {"example_inputs": {"idx": ids, "targets": ids}}
    program = autoptd.compile(Mixed(width), (1, 1, 1), **given, num_microbatches=2)
    step = program.simulate(SELENE)
    bound, counted = 3 * 2 * 32 * 32 * 32, 3 * 2 * 32 * 32 * 64
    expected = {"step_test.mix": bound / (bound + counted)} if width else {}
    assert step.uncounted == pytest.approx(expected)
    assert ("not known: no rule counts the products of step_test.mix" in str(step)) is bool(width)
    program.save(tmp_path / "saved")
    assert autoptd.load(tmp_path / "saved").simulate(SELENE).uncounted == step.uncounted
    program.save_report(tmp_path / "page.html", SELENE)
    assert ("not known: no rule counts" in (tmp_path / "page.html").read_text()) is bool(width)
    (best, *_) = autoptd.plan(Mixed(width), world_size=1, global_batch=2, cluster=SELENE, **given)
    assert best.uncounted == step.uncounted
    assert ("not known: no rule counts" in str(best)) is bool(width)
