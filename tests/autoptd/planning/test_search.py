"""Plans: the pruned search against all candidates, estimates against whole programs, and what is refused."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace
from io import StringIO
from math import prod
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import fx, nn

import autoptd
from autoptd import Cluster
from autoptd.capture.example_inputs import read_examples
from autoptd.capture.export import capture
from autoptd.cli.tables import print_plans
from autoptd.passes.cost.schedule_times import walking_order
from autoptd.passes.ir.nodes import where
from autoptd.passes.ir.program import Program
from autoptd.passes.operators.axes import IndivisibleError
from autoptd.passes.operators.axis_map import AxisMap
from autoptd.passes.operators.record import OperatorRules
from autoptd.passes.operators.table import OPERATORS
from autoptd.passes.stages.choice import choose_cut
from autoptd.planning.estimator import Estimator
from autoptd.planning.plan import Candidate, Plan, Space, explain_rank
from autoptd.planning.search import Search
from autoptd.planning.shortened_model import shorten_model
from autoptd.runtime import aten
from autoptd.runtime.program.mesh import Mesh
from autoptd.runtime.program.schedule import make_schedule
from autoptd.simulate.step import Training, simulate_times
from samples.gpt import GPT, GPTConfig
from tests import models
from tests.marks import slow_but
from tests.models import MIDDLE

EXAMPLES = read_examples(GPT(GPTConfig(512, 128, 1, 4, 64)), None, None, 1)
SELENE = Cluster.load("dgx-a100")


def make_gpt(layers: int = 8, dtype: torch.dtype = torch.bfloat16) -> GPT:
    return models.make_gpt(replace(MIDDLE, n_layer=layers), dtype, device="meta")


def with_memory(count: float) -> Cluster:
    return replace(SELENE, device=replace(SELENE.device, memory_bytes=count, reserved_bytes=0.0))


MEGATRON = Training(overlap=False, wide_gradients=False)


@pytest.mark.parametrize(
    ("memory", "training"),
    [
        (36e6, Training()),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [(80e9, Training()), (50e6, Training()), (36e6, Training(zero=1)), (45e6, MEGATRON)]
        ),
    ],
    ids=str,
)
def test_the_search_finds_the_best_of_all_candidates(memory: float, training: Training) -> None:
    cluster = with_memory(memory)
    plans = autoptd.plan(make_gpt(), world_size=4, global_batch=16, cluster=cluster, **asdict(training))
    estimator = Estimator(make_gpt(), cluster, 4, training=training)
    row = estimator.measure(1, 1, "none")
    every = [(estimator.estimate(c), c) for c in Space(4, 16, cluster).candidates(row.layers, row.units)]
    full = (c for e, c in every if c.tensor > 1 and max(e.memory_bytes) > memory)
    every += [(estimator.estimate(c), c) for c in [replace(c, sequence_parallel=True) for c in full]]
    fitting = [(e.step_seconds, c) for e, c in every if max(e.memory_bytes) <= memory]
    assert 0 < len(fitting) < len(every) or memory == 80e9
    seconds, best = min(fitting)
    if best.num_model_chunks > 1:  # it is cut again, as compile cuts it
        seconds = estimator.fit(best, int(memory), search=True).step_seconds
    own = next(own for own in plans if own.mesh == best.mesh)
    assert own.step_seconds == pytest.approx(seconds, rel=1e-9)
    assert plans[0].step_seconds <= own.step_seconds
    assert {name: own.options[name] for name in best.options} == best.options
    for own in (own for own in plans if not own.simulated):  # no bound is above what it bounds
        of_mesh = [seconds for seconds, c in fitting if c.mesh == own.mesh]
        assert own.step_seconds <= min(of_mesh, default=own.step_seconds) * (1 + 1e-9)
    assert {own.mesh for own in plans} == {c.mesh for _, c in every}


def test_the_best_is_found_where_the_last_stage_is_heavy() -> None:
    """It keeps logits, of one microbatch; whatever memory there is, no plan that fits is missed."""
    with torch.device("meta"):
        model = GPT(GPTConfig(16384, 64, 8, 4, 64))
    estimator = Estimator(model, SELENE, 4)
    space = Space(4, 8, SELENE, max_tensor=1, microbatch_size=1, recompute="none")
    row = estimator.measure(1, 1, "none")
    every = [(estimator.estimate(c), c) for c in space.candidates(row.layers, row.units)]
    limits = sorted({max(e.memory_bytes) for e, _ in every})
    assert len(limits) > 5
    for limit in limits:
        plans = Search(estimator, replace(space, cluster=with_memory(limit))).run()
        fitting = [(e.step_seconds, c.mesh) for e, c in every if max(e.memory_bytes) <= limit]
        assert plans[0].step_seconds == pytest.approx(min(fitting)[0], rel=1e-9)
        assert {own.mesh for own in plans if own.fits is not False} >= {mesh for _, mesh in fitting}


@pytest.mark.parametrize(("dropout", "modes"), [(0.0, {"none", "full"}), (0.1, {"none", "selective", "full"})])
def test_selective_recomputation_is_of_attention_that_is_written_out(
    dropout: float, modes: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch.device("meta"):
        model = GPT(GPTConfig(512, 64, 6, 4, 64, dropout))
    listed: list[Candidate] = []
    real = Space.candidates

    def watch(self: Space, *given: Any, **known: Any) -> list[Candidate]:
        listed.extend(real(self, *given, **known))
        return listed

    monkeypatch.setattr(Space, "candidates", watch)
    autoptd.plan(model, world_size=2, global_batch=4, cluster=SELENE)
    assert {str(candidate.recompute) for candidate in listed} == modes


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_model_that_fits_in_another_cut_has_a_plan(recompute: str) -> None:
    """Beside a heavy head the fastest cut of any mesh has a rank that is too full, and a leaner one has not."""
    with torch.device("meta"):
        model = GPT(GPTConfig(2560, 128, 8, 4, 64))
    fixed: Any = {"max_tensor": 1, "microbatch_size": 1, "num_model_chunks": 1, "recompute": recompute}
    space = Space(4, 8, SELENE, **fixed)
    estimator = Estimator(model, SELENE, 4)
    row = estimator.measure(1, 1, recompute)
    every = {c: estimator.estimate(c) for c in space.candidates(row.layers, row.units)}
    cluster = with_memory(0.94 * min(max(e.memory_bytes) for e in every.values()))
    best = autoptd.plan(model, world_size=4, global_batch=8, cluster=cluster, **fixed)[0]
    program = autoptd.compile(model, **best.options).simulate(cluster)
    assert best.fits
    assert program.fits
    assert best.step_seconds == pytest.approx(program.step_seconds, rel=0.05)
    for candidate, estimate in every.items():  # what was tried for one limit is not kept for another
        limit = int(0.98 * max(estimate.memory_bytes))
        assert (max(estimator.fit(candidate, limit).memory_bytes) <= limit) == (candidate.pipeline > 1)
        assert estimator.estimate(candidate) == estimate


def test_tokens_are_divided_where_whole_ones_do_not_fit() -> None:
    """With them a faster plan fits, and compiling gives it; who decided otherwise has what was decided."""
    model = models.make_gpt(GPTConfig(512, 2048, 8, 16, 1024, 0.1), torch.bfloat16, device="meta")
    size: Any = {"world_size": 8, "global_batch": 8, "microbatch_size": 2}
    cluster = with_memory(1.2e9)
    best, whole = (autoptd.plan(model, cluster=cluster, sequence_parallel=way, **size)[0] for way in (None, False))
    assert best.options["sequence_parallel"]
    assert "tokens divided" in str(best)
    assert best.step_seconds < 0.95 * whole.step_seconds
    assert not whole.options["sequence_parallel"]
    program = autoptd.compile(model, **best.options)
    assert any("tokens divided between" in entry for entry in program.log)
    step = program.simulate(cluster)
    assert step.fits
    assert step.step_seconds == pytest.approx(best.step_seconds, rel=0.03)
    assert max(step.memory_bytes) == pytest.approx(best.memory_bytes, rel=0.03)
    free = autoptd.plan(model, cluster=SELENE, **size)[0]
    assert free.tensor == 1 or not free.options["sequence_parallel"]
    for own in (best, whole):
        print_plans(Console(file=(screen := StringIO()), width=200), [own], 1, [])
        assert (f"{own.tensor} sp" in screen.getvalue()) == (own is best)


@pytest.mark.parametrize("asked", [None, True])
def test_plans_for_several_input_shapes_divide_tokens_only_if_asked(asked: bool | None) -> None:
    """As `compile` does, since t may divide some of them alone."""
    shapes = [
        {name: torch.zeros(1, length, dtype=torch.long) for name in ("idx", "targets")} for length in (2048, 1024)
    ]
    model = models.make_gpt(GPTConfig(512, 2048, 8, 16, 1024, 0.1), torch.bfloat16, device="meta")
    given: Any = {"example_inputs": shapes, "sequence_parallel": asked}
    plans = autoptd.plan(model, world_size=8, global_batch=8, cluster=with_memory(1.2e9), **given)
    assert all(own.options["sequence_parallel"] is bool(asked) for own in plans)


def test_plans_leave_the_reserve_of_a_device_free() -> None:
    """In 36 MB of 40 fits what fits in 36 without a reserve: the same plans, and programs that say so."""
    device = replace(with_memory(40e6).device, reserved_bytes=4e6)
    size: Any = {"world_size": 4, "global_batch": 16}
    best = autoptd.plan(make_gpt(), cluster=(reserving := replace(SELENE, device=device)), **size)[0]
    assert best == autoptd.plan(make_gpt(), cluster=with_memory(36e6), **size)[0]
    assert best.memory_bytes <= 36e6
    step = autoptd.compile(make_gpt(), **best.options).simulate(reserving)
    assert step.fits
    peak = max(step.memory_bytes)
    assert f"{(peak + 4e6) / 1e9:.3g} GB at most with what a process holds besides, within 0.04 GB" in str(step)
    full = replace(reserving, device=replace(device, reserved_bytes=40e6 - peak + 1))
    assert not autoptd.compile(make_gpt(), **best.options).simulate(full).fits
    for name in ("dgx-a100", "dgx-h100", "dgx-h200", "gb200-nvl72", "p4de", "dgx-1-v100"):
        device = Cluster.load(name).device
        assert device.usable_bytes <= 0.941 * device.memory_bytes


def test_a_cut_is_of_its_ranks() -> None:
    """As many stages on other ranks are another cut, whichever was asked for first."""
    with torch.device("meta"):
        model = GPT(GPTConfig(4096, 128, 8, 4, 64))
    search = "interleaved_1f1b", 8
    first, other = (Estimator(model, SELENE, 4).measure(1, 1, "none") for _ in range(2))
    cuts = [choose_cut(first.pipeline(Mesh(1, p, 1), *search, 8 // p)) for p in (2, 4)]
    assert cuts == [choose_cut(other.pipeline(Mesh(1, p, 1), *search, 8 // p)) for p in (4, 2)][::-1]


def test_several_chunks_are_planned_as_they_are_cut() -> None:
    """On slow links the mesh that an even cut puts second is the faster one."""
    with torch.device("meta"):
        model = GPT(GPTConfig(16000, 256, 16, 8, 512)).bfloat16()
    cluster = replace(SELENE, devices_per_node=1, nics_per_node=1)
    size: Any = {"world_size": 8, "global_batch": 64, "cluster": cluster, "microbatch_size": 4, "recompute": "none"}
    plans = [own for own in autoptd.plan(model, **size) if own.simulated and own.num_model_chunks > 1]
    assert len(plans) > 1
    for own in plans[:2]:
        step = autoptd.compile(model, **own.options).simulate(cluster).step_seconds
        assert own.step_seconds == pytest.approx(step, rel=0.01)


@pytest.mark.parametrize(
    "candidate",
    [
        Candidate(1, 1, 4, 2, 3, 1, "none", "1f1b"),
        Candidate(2, 2, 2, 2, 12, 1, "full", "1f1b"),
        Candidate(2, 4, 1, 1, 16, 2, "full", "interleaved_1f1b"),
        Candidate(1, 8, 1, 2, 20, 1, "none", "1f1b"),
        Candidate(4, 2, 2, 1, 4, 1, "none", "gpipe"),
    ],
    ids=str,
)
def test_an_estimate_is_the_programs_simulation(candidate: Candidate) -> None:
    """Of few layers and few microbatches, against the whole: what differs is what a cut makes of a recomputed layer.

    The planner searches for a cut at its end only: with several chunks a rank the compiler's makes a shorter step.
    """
    estimator = Estimator(make_gpt(), SELENE, candidate.mesh.size)
    estimate, planned = estimator.fit(candidate, None, search=True), estimator.estimate(candidate)
    program = autoptd.compile(make_gpt(), **candidate.options)
    simulated = program.simulate(SELENE)
    assert estimate.step_seconds == pytest.approx(simulated.step_seconds, rel=0.01)
    shorter = 0.95 if candidate.num_model_chunks > 1 else 0.97
    assert shorter * planned.step_seconds <= simulated.step_seconds <= 1.03 * planned.step_seconds
    assert max(estimate.memory_bytes) == pytest.approx(max(simulated.memory_bytes), rel=0.05)
    assert sum(estimate.breakdown.values()) == pytest.approx(estimate.step_seconds)


def test_an_estimate_counts_the_launches_and_slots_of_graphs() -> None:
    """Once for each stage and direction, which here take nearly all the time."""
    device = replace(SELENE.device, launch_seconds=0.1, graphed_launch_seconds=1e-6)
    cluster, candidate = replace(SELENE, device=device), Candidate(1, 2, 1, 2, 4, 1, "none", "1f1b")
    estimate = Estimator(make_gpt(), cluster, 2).estimate(candidate)
    simulated = autoptd.compile(make_gpt(), **candidate.options).simulate(cluster)
    assert estimate.step_seconds == pytest.approx(simulated.step_seconds, rel=1e-3)
    assert simulated.step_seconds == pytest.approx((4 + 1) * 2 * 0.1, rel=0.01)
    assert estimate.memory_bytes == pytest.approx(simulated.memory_bytes, rel=0.05)
    unlike = Estimator(make_gpt(), SELENE, 2).estimate(candidate).memory_bytes
    assert estimate.memory_bytes[0] > unlike[0]


class Idle(nn.Module):
    """A GPT with parameters that no gradient reaches: those of `unused` are not even read."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = GPT(GPTConfig(512, 128, 4, 4, 256))
        self.unused = nn.Linear(256, 1024)
        self.detached = nn.Linear(256, 512, bias=False)

    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.gpt(idx, targets)[1]
        idle: torch.Tensor = self.detached(self.gpt.wpe.weight).detach().mean()
        return loss + idle


@pytest.mark.parametrize("tensor", [1, 2])
def test_parameters_without_gradient_take_no_adam_state(tensor: int) -> None:
    """As in training: without a gradient Adam makes no state."""
    idx = torch.zeros(2, 128, dtype=torch.long)
    given: Any = {"idx": idx, "targets": idx}
    with torch.device("meta"):
        model = Idle()
    estimate = Estimator(model, SELENE, tensor, example_inputs=given).estimate(
        Candidate(tensor, 1, 1, 2, 1, 1, "none", "1f1b")
    )
    program = autoptd.compile(model, mesh=(tensor, 1, 1), num_microbatches=1, example_inputs=given)
    simulated = program.simulate(SELENE)
    assert estimate.memory_bytes == simulated.memory_bytes
    held = {
        name: p.dtype.itemsize * prod(p.placement["tensor"].local_shape(p.shape, tensor))
        for name, p in program.manifest.parameters.items()
    }
    trained = sum(held[name] for name, _ in model.named_parameters() if name.startswith("gpt"))
    assert simulated.held_bytes["gradients"] == trained
    assert simulated.held_bytes["optimizer"] == 2 * trained
    assert simulated.held_bytes["parameters"] == sum(held.values())
    whole = sum(p.numel() for p in model.parameters())
    assert program.cost.evaluate(program.cost.parameters) == whole


class Tables(nn.Module):
    """A GPT with buffers of whole numbers, bits and reals, the first read through a constant that is made of it."""

    order: torch.Tensor
    mask: torch.Tensor
    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.gpt = GPT(GPTConfig(512, 128, 4, 4, 256))
        self.register_buffer("order", torch.arange(512 * 512).view(512, 512) % 128)
        self.register_buffer("mask", torch.ones(128, 256, dtype=torch.bool))
        self.register_buffer("scale", torch.ones(128, 256))

    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.gpt(idx, targets)[1]
        masked: torch.Tensor = self.gpt.wpe(self.order[:128, 0]).masked_fill(self.mask, 0.0)
        return loss + (masked * self.scale).sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_buffers_take_their_own_bytes(dtype: torch.dtype) -> None:
    idx = torch.zeros(2, 128, dtype=torch.long)
    given: Any = {"idx": idx, "targets": idx}
    model = Tables().to(dtype)
    model.scale = model.scale.float()
    program = autoptd.compile(model, mesh=(1, 1, 1), num_microbatches=1, example_inputs=given)
    simulated = program.simulate(SELENE)
    held = {name: p.bytes for name, p in program.manifest.parameters.items()}
    assert simulated.held_bytes["parameters"] == sum(held.values())
    assert (held["order"], held["mask"], held["scale"]) == (8 * 512 * 512, 128 * 256, 4 * 128 * 256)
    weights = sum(parameter.numel() for parameter in model.parameters())
    narrow = program.simulate(SELENE, "bf16")
    assert narrow.held_bytes["parameters"] == 2 * weights + sum(held.values()) - dtype.itemsize * weights
    estimate = Estimator(model, SELENE, 1, example_inputs=given).estimate(Candidate(1, 1, 1, 2, 1, 1, "none", "1f1b"))
    assert estimate.memory_bytes == simulated.memory_bytes


def test_an_estimate_is_of_how_a_step_is_run() -> None:
    """One stage, which no cut divides: the estimate is the simulation, with each way of running it and without."""
    candidate = Candidate(2, 1, 2, 2, 4, 1, "none", "1f1b")
    program = autoptd.compile(make_gpt(), candidate.mesh, microbatch_size=2, num_microbatches=4)
    ways = [Training(), MEGATRON, Training(zero=1), Training(overlap=False)]
    found = [Estimator(make_gpt(), SELENE, 4, training=way).estimate(candidate).step_seconds for way in ways]
    expected = [program.simulate(SELENE, **asdict(way)).step_seconds for way in ways]
    assert found == pytest.approx(expected, rel=1e-3)
    assert len({round(seconds, 9) for seconds in found}) == len(ways)


def test_plans_know_how_a_step_is_run() -> None:
    """What fits only divided among the replicas is planned so, and the program's own simulation says the same."""
    size: Any = {"world_size": 4, "global_batch": 16, "cluster": with_memory(50e6), "max_tensor": 1}
    whole, divided = (autoptd.plan(make_gpt(), **size, zero=zero) for zero in (0, 1))
    assert min(own.mesh.pipeline for own in divided if own.fits is not False) < min(
        own.mesh.pipeline for own in whole if own.fits is not False
    )
    best = autoptd.plan(make_gpt(), **{**size, "cluster": SELENE}, zero=1)[0]
    assert (best.options["zero"], best.options["cluster"]) == (1, SELENE)
    simulated = autoptd.compile(make_gpt(), **best.options).simulate(SELENE, zero=1)
    assert simulated.step_seconds == pytest.approx(best.step_seconds, rel=0.01)
    assert max(simulated.memory_bytes) == pytest.approx(best.memory_bytes, rel=0.01)
    with pytest.raises(ValueError, match="zero=2"):
        autoptd.plan(make_gpt(), **size, zero=2)


LAPTOP = Cluster.load("laptop-cpu")
MEASURED = replace(LAPTOP, devices_per_node=2, network=LAPTOP.node)  # as `calibrate` describes two cores


@pytest.mark.parametrize(
    ("cluster", "name", "v"),
    [(SELENE, "interleaved_1f1b", 1), (SELENE, "interleaved_1f1b", 2), (SELENE, "gpipe", 1), (LAPTOP, "1f1b", 1)],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_a_long_step_is_the_line_through_two_short_ones(cluster: Cluster, name: str, v: int) -> None:
    candidate = Candidate(1, 4, 1, 1, 640, v, "none", name)
    estimator = Estimator(make_gpt(), cluster, 4)
    estimate, row = estimator.estimate(candidate), estimator.measure(1, 1, "none")
    cut = choose_cut(row.pipeline(candidate.mesh, name, 640, v), search=False)
    manifest, times = row.divide(candidate.mesh, v, True, cut.positions)
    schedule = make_schedule(candidate.schedule, 4, 640, v)
    order = walking_order(schedule)
    manifest = replace(manifest, num_microbatches=640)
    whole = simulate_times(manifest, times, schedule, order, estimator.cluster, row.precision, Training())
    assert estimate.step_seconds == pytest.approx(whole.step_seconds, rel=1e-3)
    assert estimate.memory_bytes == whole.memory_bytes
    for name in ("compute", "data", "optimizer"):
        assert estimate.breakdown[name] == pytest.approx(whole.breakdown[name], rel=1e-6)


def test_more_processes_than_cores_are_refused() -> None:
    message = "4 processes on the 2 cores of laptop CPU: expected at most one process a core; choose a smaller mesh"
    with pytest.raises(ValueError, match=message):
        autoptd.plan(make_gpt(), world_size=4, global_batch=8, cluster=MEASURED)


def test_auto_compiles_the_best_plan() -> None:
    size: Any = {"world_size": 4, "global_batch": 8, "cluster": SELENE, "microbatch_size": 2}
    best = autoptd.plan(make_gpt(), **size)[0]
    program = autoptd.compile(make_gpt(), mesh="auto", **size)
    assert program.mesh == best.mesh
    assert program.manifest.num_microbatches * program.manifest.microbatch_size * program.mesh.data == 8
    assert program.options is not None
    assert program.options.recompute == best.recompute
    names = "mesh", "schedule", "num_model_chunks", "microbatch_size", "num_microbatches"
    assert all(getattr(program.manifest, name) == best.options[name] for name in names)
    fixed = autoptd.compile(make_gpt(), mesh="auto", recompute="full", **size)
    assert fixed.options is not None
    assert (fixed.options.recompute, fixed.manifest.microbatch_size) == ("full", 2)


def test_no_tensor_group_leaves_its_node_unless_asked() -> None:
    cluster = replace(SELENE, devices_per_node=2)
    size: Any = {"world_size": 8, "global_batch": 8, "recompute": "none", "microbatch_size": 1}
    assert {own.mesh.tensor for own in autoptd.plan(make_gpt(), cluster=cluster, **size)} == {1, 2}
    asked = autoptd.plan(make_gpt(), cluster=cluster, max_tensor=4, **size)
    assert {own.mesh.tensor for own in asked} == {1, 2, 4}


def test_what_is_almost_nothing_is_not_said() -> None:
    def make(replicas: int, **spent: float) -> Plan:
        settings: Any = (1, 1, replicas, 1, 1, 1, "none", "1f1b", sum(spent.values()), 0, True, spent)
        return Plan(*settings)

    best, alike = make(1, compute=0.996, data=0.004), make(2, compute=0.996, data=0.0044)
    slower = make(4, compute=0.996, data=0.054)
    assert explain_rank(best, [best, alike, slower]) == "the fastest that fits: compute 100%"
    assert explain_rank(alike, [best, alike, slower]) == "as fast as the best"
    assert explain_rank(slower, [best, slower]) == "5.0% slower: 0.05 s more data communication"
    assert explain_rank(best, [best, slower]) == "the fastest that fits, 5.0% ahead of the next: compute 100%"


@pytest.mark.parametrize("autocast", [False, True])
def test_utilisation_is_that_of_the_compiled_program_whatever_is_computed_again(autocast: bool) -> None:
    size: Any = {"world_size": 4, "global_batch": 8, "cluster": SELENE, "mesh": (2, 2, 1)}
    model = make_gpt(dtype=torch.float32 if autocast else torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        plans = [*autoptd.plan(model, **size), *autoptd.plan(model, **size, recompute="full", microbatch_size=2)]
        step = autoptd.compile(model, **plans[-1].options).simulate(SELENE)
    least = [plan.mfu * plan.step_seconds for plan in plans]  # at the devices' peak
    assert least == pytest.approx(len(plans) * [step.mfu * step.step_seconds], rel=1e-6)


def test_every_plan_says_why() -> None:
    plans = autoptd.plan(make_gpt(), world_size=4, global_batch=8, cluster=with_memory(50e6), top=3)
    assert plans[0].why.startswith("the fastest that fits")
    kinds = [(own.fits is False, not own.simulated) for own in plans]
    assert kinds == sorted(kinds)
    for own in plans:
        assert own.simulated == (own.fits is True)
        if own.fits is False:
            assert own.memory_bytes > 50e6 * 0.95
            assert "does not fit" in own.why
        elif not own.simulated:
            assert re.match(r"not simulated: at (least \S+% slower|best as fast), with", own.why)
            assert "0.0%" not in own.why
    assert sum(own.simulated for own in plans) >= 3
    screen = StringIO()
    shown = [own for own in plans if own.simulated]
    print_plans(Console(file=screen, width=200), shown, len(plans), ["autoptd compile"])
    assert all(own.why in screen.getvalue() for own in shown)
    assert f"{len(plans) - len(shown)} more meshes are slower or do not fit" in screen.getvalue()


def test_one_mesh_is_planned_beside_the_best() -> None:
    size: Any = {"world_size": 4, "global_batch": 8}
    best, asked = autoptd.plan(make_gpt(), cluster=SELENE, mesh=(1, 4, 1), **size)
    plans = autoptd.plan(make_gpt(), cluster=SELENE, **size, top=20)
    assert best.mesh == plans[0].mesh != asked.mesh == Mesh(1, 4, 1)
    assert asked.simulated
    assert asked.step_seconds <= next(own.step_seconds for own in plans if own.mesh == asked.mesh)
    assert "% slower: " in asked.why
    (same,) = autoptd.plan(make_gpt(), cluster=SELENE, mesh=best.mesh, **size)
    assert same.step_seconds == best.step_seconds
    with pytest.raises(ValueError, match="divides into no mesh"):
        autoptd.plan(make_gpt(), cluster=SELENE, mesh=(1, 3, 1), **size)
    with pytest.raises(ValueError, match="no plan fits in memory: mesh tensor=1 pipeline=1 data=4"):
        autoptd.plan(make_gpt(), cluster=with_memory(36e6), mesh=(1, 1, 4), **size)


def test_a_speed_is_of_tokens_and_gives_days_and_their_cost() -> None:
    (best, *_) = autoptd.plan(make_gpt(), world_size=4, global_batch=8, cluster=SELENE)
    assert best.tokens == 8 * MIDDLE.block_size
    speed = best.throughput.describe(1e9, 2.5)
    assert speed["tokens_per_second"] == pytest.approx(best.tokens / best.step_seconds)
    assert speed["tokens_per_second_per_device"] == pytest.approx(speed["tokens_per_second"] / 4)
    assert speed["days"] == pytest.approx(1e9 / speed["tokens_per_second"] / 86400)
    assert speed["cost"] == pytest.approx(speed["days"] * 24 * 4 * 2.5)
    assert best.throughput.describe(1e9).keys() == speed.keys() - {"cost"}
    for wrong in ((0.0, None), (1e9, -1.0)):
        with pytest.raises(ValueError, match="expected positive numbers"):
            best.throughput.describe(*wrong)
    pictures = replace(best, tokens=0).throughput
    assert pictures.describe() == {}
    with pytest.raises(ValueError, match="for a model that takes tokens"):
        pictures.describe(1e9)


@pytest.mark.parametrize("memory", [80e9, 25e6])
def test_no_mesh_is_listed_that_compile_refuses(memory: float) -> None:
    """Neither as too slow to be simulated nor as too large: three tensor ranks do not divide four heads."""
    size: Any = {"world_size": 6, "global_batch": 6, "microbatch_size": 1, "recompute": "full"}
    plans = autoptd.plan(make_gpt(6), cluster=with_memory(memory), **size)
    assert {own.mesh.tensor for own in plans} == {1, 2}
    assert len(plans) == 6


# Refused


@pytest.mark.parametrize("memory", [12e6, 24e6])
def test_one_layer_is_not_planned_with_the_recomputation_of_layers(memory: float) -> None:
    """Which compile refuses: not as a mesh that was not simulated, nor as the leanest of one that does not fit."""
    size: Any = {"world_size": 4, "global_batch": 16, "cluster": with_memory(memory)}
    plans = autoptd.plan(make_gpt(1), **size)
    assert len(plans) == 6
    assert all(plan.options["recompute"] != "full" for plan in plans)
    with pytest.raises(ValueError, match="keeps the inputs of repeated layers"):
        autoptd.plan(make_gpt(1), recompute="full", **size)


def test_a_model_that_fits_nowhere_is_refused_with_the_bytes_that_are_missing() -> None:
    with pytest.raises(ValueError, match="no plan fits in memory") as error:
        autoptd.plan(make_gpt(), world_size=4, global_batch=4, cluster=with_memory(1e6))
    message = str(error.value)
    held, over = (int(word.replace(",", "")) for word in re.findall(r"\d[\d,]{3,}", message)[:2])
    assert "pipeline rank" in message
    assert held - over == 1_000_000
    assert "% are weights, gradients and the optimizer's states; use more devices, or devices with more" in message
    assert message.endswith("have no gradients (there is no division of weights over replicas here)")
    fixed: Any = {"microbatch_size": 2, "recompute": "none", "zero": 1, "cluster": with_memory(1e6)}
    with pytest.raises(ValueError, match=r'devices with more memory, or a smaller microbatch, or recompute="full", or'):
        autoptd.plan(make_gpt(), world_size=4, global_batch=4, **fixed)
    estimator, space = Estimator(make_gpt(), SELENE, 4), Space(4, 4, SELENE)
    row = estimator.measure(1, 1, "none")
    every = [estimator.estimate(c).memory_bytes for c in space.candidates(row.layers, row.units)]
    assert held == min(map(max, every))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"world_size": 7, "global_batch": 8, "microbatch_size": 3},
            ValueError,
            r"world_size=7 divides into no mesh.*; p \* v may be 8 at most, the model's layers",
        ),
        ({"world_size": 0, "global_batch": 8}, ValueError, "world_size is 0"),
        ({"world_size": 2, "global_batch": 8, "cluster": "dgx-a10"}, ValueError, "did you mean dgx-a100"),
        ({"world_size": 2, "global_batch": 8, "recompute": "some"}, ValueError, "recompute"),
    ],
    ids=str,
)
def test_bad_input_is_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        autoptd.plan(make_gpt(), **{"cluster": SELENE, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mesh": "auto"}, 'mesh="auto" needs world_size=, global_batch=, cluster='),
        ({"mesh": "auto", "world_size": 8, "global_batch": 8}, 'mesh="auto" needs cluster='),
        ({"mesh": (1, 1, 1), "world_size": 8}, 'world_size= goes with mesh="auto"'),
        (
            {"mesh": "auto", "world_size": 8, "global_batch": 8, "cluster": SELENE, "num_microbatches": 2},
            'num_microbatches= does not go with mesh="auto"',
        ),
    ],
    ids=["nothing", "cluster", "mesh", "microbatches"],
)
def test_auto_is_refused_without_what_it_needs(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        autoptd.compile(make_gpt(), **options)


# Fewer layers


def test_equal_layers_are_left_out_and_the_model_stays_whole() -> None:
    model = make_gpt(12)
    copied, left_out = shorten_model(model, EXAMPLES)
    short: Any = copied
    assert (left_out, len(short.h), len(model.h)) == (8, 4, 12)
    assert short.lm_head.weight is short.wte.weight


def test_unlike_layers_are_all_measured() -> None:
    model: Any = make_gpt(8)
    model.h[5].mlp.dropout = nn.Dropout(0.5)
    assert shorten_model(model, EXAMPLES) == (model, 0)
    tied: Any = make_gpt(8)
    tied.h[5].mlp.c_fc.weight = tied.h[4].mlp.c_fc.weight
    assert shorten_model(tied, EXAMPLES) == (tied, 0)


@dataclass
class Repeated:
    times: int


class Uneven(GPT):
    """Layers with equal tensors of which forward does not make equal use."""

    def __init__(self, config: GPTConfig, how: str) -> None:
        super().__init__(config)
        self.how = how
        for index, layer in enumerate(self.h):
            setting: Any = Repeated(1 if how != "settings" or index < 4 else 3)
            layer.setting = setting

    def forward(self, idx: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
        assert targets is not None
        x = self.wte(idx) + self.wpe.weight
        layers: Any = [*self.h, *(list(self.h)[6:] if self.how == "slice" else [])]
        for index, layer in enumerate(layers):
            times = 3 if self.how == "number" and index >= 4 else layer.setting.times
            for _ in range(times):
                x = layer(x)
        return nn.functional.cross_entropy(self.lm_head(self.ln_f(x)).flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("how", slow_but(["number", "alike"], ["settings", "slice", "number", "alike"]))
def test_layers_that_forward_uses_unlike_are_all_measured(how: str) -> None:
    with torch.device("meta"):
        model = Uneven(GPTConfig(512, 128, 8, 4, 64), how)
    ids = torch.zeros(1, 128, dtype=torch.long)
    (plan, *_) = autoptd.plan(model, world_size=1, global_batch=2, cluster=SELENE, example_inputs=(ids, ids))
    assert shorten_model(model, EXAMPLES)[1] == (4 if how == "alike" else 0)
    step = autoptd.compile(model, example_inputs=(ids, ids), **plan.options).simulate(SELENE)
    assert plan.step_seconds == pytest.approx(step.step_seconds, rel=1e-6)
    assert plan.memory_bytes == max(step.memory_bytes)


def test_a_forward_that_counts_its_layers_is_measured_whole() -> None:
    class Counting(GPT):
        def forward(self, idx: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
            assert len(self.h) == self.config.n_layer, "all layers are here"
            return super().forward(idx, targets)

    with torch.device("meta"):
        model = Counting(GPTConfig(512, 128, 8, 4, 256)).to(torch.bfloat16)
    candidate = Candidate(1, 2, 1, 1, 4, 1, "none", "1f1b")
    whole, short = (Estimator(m, SELENE, 2).estimate(candidate) for m in (model, make_gpt()))
    assert whole.step_seconds == pytest.approx(short.step_seconds, rel=0.01)
    assert whole.memory_bytes == short.memory_bytes


def test_tensor_ranks_that_do_not_divide_are_refused_by_a_few_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    captured: list[int] = []

    def count(model: GPT, **given: Any) -> Program:
        captured.append(len(model.h))
        return capture(model, **given)

    def refuse(axis_map: AxisMap, node: fx.Node) -> None:
        raise IndivisibleError(f"no sharding rule for it at {where(node)}")

    monkeypatch.setattr("autoptd.planning.estimator.capture", count)
    estimator = Estimator(make_gpt(), SELENE, 8)
    with pytest.raises(ValueError, match=r"4 heads do not divide over tensor=8 at h\.0\.attn \(gpt\.py"):
        estimator.measure(8, 1, "none")
    assert estimator.measure(2, 1, "none").layers == 8
    monkeypatch.setitem(OPERATORS, aten.gelu, OperatorRules(axes=refuse))
    with pytest.raises(ValueError, match=r"no sharding rule for it at h\.0\.mlp"):
        estimator.measure(4, 1, "none")
    assert captured == [4]
