"""Experts over data ranks: rows are sent to the rank that has their expert, and a step is that of the plain model."""

from __future__ import annotations

import copy
import math
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW

import autoptd
from autoptd.check.program import ProgramError
from autoptd.compiled import CompiledProgram
from autoptd.passes.cost.cluster import Cluster
from autoptd.runtime import kernels
from autoptd.runtime.comm.groups import ProcessGroup
from autoptd.runtime.module.parallel import Parallel
from autoptd.runtime.program.manifest_json import from_json, to_json
from autoptd.runtime.program.mesh import Mesh
from autoptd.text.recorder import RecordingError
from autoptd.verification import float64
from autoptd.verification.step import widen
from samples.wild.habits import Mixture, vary
from samples.wrong_gradients import rewrite
from tests.parity import GRADIENT_TOLERANCE, Training, compare, compare_states, split_batch, train_compiled, train_plain
from tests.ranks import run_ranks
from tests.test_mixtures import CLASSES, LENGTH, QUICK, SIZES, VOCABULARY, build, compile_tokens, verify_exactly

MESHES = (((1, 1, 2), 2), ((2, 1, 2), 4))
IDS = torch.randint(1, VOCABULARY, (6, 4, LENGTH), generator=torch.Generator().manual_seed(3))


def batches(count: int) -> list[dict[str, Tensor]]:
    return [{"input_ids": x, "labels": x.clone()} for x in IDS[:count]]


def widened(model: nn.Module, mesh: tuple[int, int, int], expert: int | None, **options: Any) -> CompiledProgram:
    """A program of four microbatches a step, in float64."""
    example = {name: x[:1] for name, x in batches(1)[0].items()}
    program = autoptd.compile(
        model, mesh=mesh, expert=expert, example_inputs=example, num_microbatches=4 // mesh[2], **options
    )
    return replace(program, manifest=widen(program.manifest), model=copy.deepcopy(model).double())


def promote() -> None:
    float64.Promotion().__enter__()  # type: ignore[no-untyped-call]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("mesh", "expert"), MESHES)
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in QUICK)) for n in CLASSES])
def test_experts_over_data_ranks_are_exact(name: str, mesh: tuple[int, int, int], expert: int) -> None:
    program = compile_tokens(build(name), mesh, expert=expert)
    parameters = {n: p for n, p in program.manifest.parameters.items() if "experts." in n and "shared" not in n}
    held = {p.placement.axis for p in parameters.values() if p.is_trained}
    assert held == {"expert"}
    verify_exactly(program)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("mesh", "expert", "options"),
    [
        ((1, 1, 4), 2, {}),
        ((1, 2, 2), 2, {"recompute": "full"}),
        ((2, 1, 2), 4, {"sequence_parallel": True}),
        pytest.param((2, 2, 4), 4, {"recompute": "selective", "sequence_parallel": True}, marks=pytest.mark.slow),
    ],
)
def test_with_replicas_pipeline_recomputation_and_divided_tokens(
    mesh: tuple[int, int, int], expert: int, options: dict[str, Any]
) -> None:
    verify_exactly(compile_tokens(build("MixtralForCausalLM"), mesh, expert=expert, **options))


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("name", "mesh", "expert"),
    [
        ("MixtralForCausalLM", (1, 1, 2), 2),
        pytest.param("MixtralForCausalLM", (1, 2, 2), 2, marks=pytest.mark.slow),
        pytest.param("Qwen3MoeForCausalLM", (2, 1, 2), 4, marks=pytest.mark.slow),
        pytest.param("DeepseekV3ForCausalLM", (1, 1, 4), 4, marks=pytest.mark.slow),
    ],
)
def test_steps_on_processes_are_those_of_the_plain_model(name: str, mesh: tuple[int, int, int], expert: int) -> None:
    """Clipped, with the auxiliary loss; the whole state is put together from all ranks."""
    model: Any = build(name)
    model.set_experts_implementation("eager")
    program, given = widened(model, mesh, expert), [batch for _ in range(4) for batch in batches(5)]
    training, double = Training(lr=0.05, max_norm=1.0), copy.deepcopy(model).double()
    with float64.Promotion():
        plain = train_plain(double, given, 4, training)
    found = train_compiled(program, given, training, prepare=promote)
    for own, true in zip(found.steps, plain.steps, strict=True):
        compare(own, true, loss_tolerance=1e-12)
    compare_states(found.state, plain.state, tolerance=GRADIENT_TOLERANCE)


def train(parallel: Parallel, optimizer: AdamW, mesh: Mesh, rank: int, given: list[dict[str, Tensor]]) -> None:
    for batch in given:
        parallel(**split_batch(batch, mesh.data)[mesh.coordinates(rank).data])["loss"].backward()
        nn.utils.clip_grad_norm_(parallel.parameters(), 1.0)  # torch's own knows the parts of all ranks
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.timeout(180)
@pytest.mark.parametrize("sharded", [True, False])
def test_a_checkpoint_goes_on_with_other_expert_ranks(tmp_path: Path, sharded: bool) -> None:
    """From e = 2 of four data ranks to e = 4 of (2, 1, 2), with Adam's states in shards or not, as on one device."""
    model: Any = build("MixtralForCausalLM")
    model.set_experts_implementation("eager")

    def run(program: CompiledProgram, given: list[dict[str, Tensor]], load: bool) -> dict[str, Tensor]:
        def work(rank: int) -> dict[str, Tensor]:
            promote()
            parallel = program.bind()
            optimizer = AdamW(parallel.parameters(), lr=0.01)
            if sharded:
                parallel.shard_optimizer(optimizer)
            if load:
                parallel.load_checkpoint(tmp_path, optimizer)
            train(parallel, optimizer, program.mesh, rank, given)
            parallel.save_checkpoint(tmp_path, optimizer)
            return parallel.full_state_dict()

        state: dict[str, Tensor] = run_ranks(work, program.mesh.size)[0]
        return state

    run(widened(model, (1, 1, 4), 2), batches(6)[:3], load=False)
    found = run(widened(model, (2, 1, 2), 4), batches(6)[3:], load=True)
    plain = copy.deepcopy(model).double()
    optimizer = AdamW(plain.parameters(), lr=0.01)
    with float64.Promotion():
        for batch in batches(6):
            for part in split_batch(batch, 4):
                (plain(**part).loss / 4).backward()
            nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    compare_states(found, {n: x for n, x in plain.state_dict().items() if n in found}, tolerance=1e-11)


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("mesh", [(1, 1, 8), (8, 1, 1)])
@pytest.mark.parametrize("name", ["Mixtral", "DeepseekV3"])
def test_more_than_95_percent_of_a_published_mixture_are_divided(name: str, mesh: tuple[int, int, int]) -> None:
    """Mixtral 8x7B and DeepSeek-V3 671B, the sizes that transformers gives without any."""
    with torch.device("meta"):
        model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(use_cache=False))
    ids = torch.zeros(1, 64, dtype=torch.long)
    program = autoptd.compile(model, mesh, expert=8, example_inputs={"input_ids": ids, "labels": ids})
    elements = {True: 0, False: 0}
    for entry in program.manifest.parameters.values():
        elements[any(own.dim is not None for own in entry.placement.values())] += math.prod(entry.shape)
    assert elements[True] > 0.95 * (elements[True] + elements[False])


def test_weights_are_drawn_the_same_on_any_expert_ranks() -> None:
    """And from files, of which a rank reads its own experts."""
    with torch.device("meta"):
        model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES, num_local_experts=4))

    def work(rank: int) -> dict[str, Tensor]:
        return program.bind().full_state_dict()

    states = []
    for mesh, expert in (((1, 1, 1), None), ((2, 1, 2), 4)):
        program = compile_tokens(model, mesh, expert=expert)
        states.append(run_ranks(work, program.mesh.size)[0])
    assert all(torch.equal(x, states[1][name]) for name, x in states[0].items())


def test_rows_are_exchanged_twice_in_each_direction() -> None:
    """Of each of a layer's pairs of a token and an expert h elements, as the text says."""
    program = compile_tokens(build("MixtralForCausalLM"), (1, 1, 2), expert=2, num_microbatches=1)
    counted: Counter[str] = Counter()

    def work(rank: int) -> Counter[str]:
        send = ProcessGroup.all_to_all

        def count(group: ProcessGroup, x: Tensor, rows: Any) -> Tensor:
            counted.update(calls=1, elements=x.numel())
            return send(group, x, rows)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ProcessGroup, "all_to_all", count)
            parallel = program.bind()
            parallel(input_ids=IDS[0][:2], labels=IDS[0][:2])["loss"].backward()
        return counted

    layers, pairs = 2, 2 * LENGTH * 2
    found = run_ranks(work, 2)
    assert {own["calls"] for own in found} == {4 * layers}
    # Forward a rank sends its pairs and returns those of its experts, and the same backward.
    assert sum(own["elements"] for own in found) == 4 * layers * 2 * pairs * 32
    bytes_of_pairs = pairs * 32 * 4
    said = re.findall(r"all-to-all, ([\d.]+) kB over experts", program.rank(0).code)
    assert [float(size) for size in said] == [pytest.approx(bytes_of_pairs / 1000, rel=0.01)] * 2 * layers


def test_a_plan_divides_experts_over_data_ranks_where_they_do_not_fit() -> None:
    """And knows the time and the memory of the program that compile makes of it."""
    with torch.device("meta"):
        config = {**SIZES, "num_hidden_layers": 4, "intermediate_size": 4096, "num_local_experts": 4}
        model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**config))
    ids = torch.ones(1, 32, dtype=torch.long)
    cluster = Cluster.load("dgx-a100")
    small = replace(cluster, device=replace(cluster.device, memory_bytes=60e6, reserved_bytes=0.0))
    given: Any = {"example_inputs": {"input_ids": ids, "labels": ids}}
    best, *others = autoptd.plan(model, world_size=4, global_batch=8, max_tensor=1, cluster=small, **given)
    assert (best.data, best.expert) == (4, 4)
    assert not next(own for own in others if own.data == 4 and not own.expert).fits
    program = autoptd.compile(model, **best.options, **given)
    simulated = program.simulate(small)
    assert best.step_seconds == pytest.approx(simulated.step_seconds, rel=0.02)
    assert best.memory_bytes == pytest.approx(max(simulated.memory_bytes), rel=0.05)
    whole = autoptd.compile(model, (1, 1, 4), cluster=small, **given).simulate(small)
    (line,) = (one for one in program.explain(small).changes if "whole on each replica" in one.what)
    assert line.memory_bytes == pytest.approx(max(whole.memory_bytes), rel=0.05)


UP = 'p["model.layers.1.mlp.experts.gate_up_proj"]'
FAULTS = {
    # What check says of it.
    "rows are not sent to their experts": (
        *(f"layers1_mlp_experts_sent, {UP}", f"layers1_mlp_experts_dispatch, {UP}"),
        r"layers1_mlp_experts_grouped_linear \(program_00.py:\d+\) reads .* expected all of the same experts",
    ),
    "rows do not come back": (
        *("layers1_mlp_experts_returned, layers1", "layers1_mlp_experts_grouped_linear_1, layers1"),
        r"layers1_mlp_experts_combine \(program_00.py:\d+\) reads .* expected all of the same experts",
    ),
    "one rank's counts are taken for those of all": (
        *(f"{UP}, layers1_mlp_experts_own", f"{UP}, layers1_mlp_experts_counts"),
        r"grouped_linear failed: .*counts \[4\], expected .*\[experts\]",
    ),
    "rows come back that were never sent": (
        *("rank, layers1_mlp_experts_grouped_linear_1, layers1", "rank, layers1_mlp_experts_dispatch, layers1"),
        r"returns layers1_mlp_experts_dispatch, which is whole: expected rows of experts",
    ),
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("fault", FAULTS)
def test_check_finds_faults_of_the_exchange_with_their_line(fault: str) -> None:
    old, new, said = FAULTS[fault]
    program = compile_tokens(build("MixtralForCausalLM"), (1, 1, 2), expert=2)
    with pytest.raises((ProgramError, RecordingError), match=said):
        rewrite((old, new))(program).check()


@pytest.mark.timeout(120)
def test_verify_finds_rows_of_the_neighbours_expert() -> None:
    """Counts in another order name other experts, and check cannot know whose they are."""
    program = compile_tokens(build("MixtralForCausalLM"), (1, 1, 2), expert=2)
    sent = "rank, layers1_mlp_experts_dispatch, layers1_mlp_experts_counts"
    report = rewrite((sent, sent.replace(sent.split()[-1], f"aten.flip({sent.split()[-1]}, [0])")))(program).verify()
    assert not report.passed
    assert "first wrong value is made at program_00.py" in str(report)


def test_the_mesh_of_a_saved_program_has_its_expert_ranks(tmp_path: Path) -> None:
    """And a loaded one takes as long, in as much memory, although its text says arguments in other ways."""
    program = compile_tokens(build("MixtralForCausalLM"), (2, 1, 2), expert=4)
    program.save(tmp_path / "program")
    own, loaded = (one.simulate("dgx-a100") for one in (program, autoptd.load(tmp_path / "program")))
    assert loaded.step_seconds == pytest.approx(own.step_seconds, rel=1e-3)
    assert loaded.memory_bytes == own.memory_bytes
    assert from_json(to_json(program.manifest)).mesh == Mesh(2, 1, 2, expert=4) != Mesh(2, 1, 2)
    assert Mesh(2, 1, 4, expert=4).group("expert", 5) == (4, 6, 5, 7)
    assert Mesh(2, 1, 4, expert=4).group("expert_data", 5) == (1, 5)
    name = "model.layers.0.mlp.experts.down_proj"
    held = [program.rank(rank).parameters[name].slice.rows for rank in range(4)]
    assert [list(rows[0]) for rows in held] == [[0], [2], [1], [3]]


class Regularised(nn.Module):
    """Reads a weight of experts, which a rank has a part of, outside of these."""

    def __init__(self) -> None:
        super().__init__()
        self.model = build("MixtralForCausalLM")

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        weight = self.model.get_parameter("model.layers.0.mlp.experts.down_proj")
        loss: Tensor = self.model(input_ids=idx, labels=targets).loss
        return loss + 0.01 * torch.einsum("eij,eij->", weight, weight)


class Computed(Mixture):
    """Weights that are computed in forward are no parameters that a rank could have a part of."""

    def forward(self, x: Tensor) -> Any:
        rows = x.flatten(0, 1)
        gates, chosen = self.router(rows).softmax(-1).topk(2, dim=-1)
        order, counts = torch.ops.autoptd.route(chosen, 0, len(self.up))
        y = kernels.grouped_linear(kernels.dispatch(rows, order, 2), self.up * 2, counts, None, True)
        y = kernels.grouped_linear(functional.gelu(y), self.down, counts, None, True)
        return kernels.combine(y, gates, order).view(x.shape)


@pytest.mark.parametrize(
    ("model", "mesh", "expert", "said"),
    [
        (lambda: build("MixtralForCausalLM"), (1, 1, 2), 3, r"expert=3 does not fit .* one of 1, 2"),
        (lambda: build("MixtralForCausalLM"), (2, 1, 2), 1, r"expert=1 does not fit .* one of 2, 4"),
        (
            lambda: build("MixtralForCausalLM"),
            (1, 1, 8),
            8,
            r"mlp.experts \(.*its weights have 4 experts, which 8 ranks",
        ),
        (lambda: vary(Mixture)(), (1, 1, 2), 2, r"expert=2: the model has no mixture of stacked experts"),
        (lambda: vary(Computed)(), (1, 1, 2), 2, r"the experts' weight is computed in the model"),
        (Regularised, (1, 1, 2), 2, r"cannot be divided over data ranks, as it is read outside of the experts, too"),
        (lambda: build("MixtralForCausalLM"), (1, 1, 2), True, r"expert is True; expected a positive integer"),
    ],
)
def test_what_cannot_be_divided_is_refused(model: Any, mesh: Any, expert: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        compile_tokens(model(), mesh, expert=expert)
