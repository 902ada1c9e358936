"""Sequence parallelism: tokens divided between the divided regions, from placements and never from names."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor, nn
from torch.nn import functional

import autoptd
from autoptd.compiled import CompiledProgram
from autoptd.passes.cost.cluster import Cluster
from autoptd.passes.cost.saved_tensors import Ledger
from autoptd.passes.cost.work import backward_work, forward_work
from autoptd.passes.ir.nodes import info
from autoptd.passes.tensor_parallel.symbols import symbol
from autoptd.runtime import collectives
from samples.attention_coverage import CLASSES, make_inputs, make_model, randomize
from samples.benchmarks.activation_memory import PaperGPT, Sizes, make_batch
from samples.gpt import GPT, GPTConfig
from tests.marks import slow
from tests.models import MIDDLE, make_gpt
from tests.parity import compare, train_compiled, train_plain
from tests.ranks import run_ranks

CONFIG = GPTConfig(vocab_size=66, block_size=16, n_layer=2, n_head=4, n_embd=32, dropout=0.1)
LARGE = GPTConfig(vocab_size=512, block_size=4096, n_layer=4, n_head=16, n_embd=4096, dropout=0.1)
MOST_ERROR = 1e-12


def compile_gpt(mesh: tuple[int, int, int], config: GPTConfig = CONFIG, **options: Any) -> CompiledProgram:
    given: dict[str, Any] = {
        "microbatch_size": 2,
        "num_microbatches": 2 * mesh[1],
        "sequence_parallel": True,
        **options,
    }
    return autoptd.compile(make_gpt(config), mesh, **given)


def verify(program: CompiledProgram) -> None:
    report = program.verify()
    assert max(report.errors.values()) < MOST_ERROR


def log_of(program: CompiledProgram) -> str:
    return next(entry for entry in program.log if entry.startswith("shard_tensors"))


def targets(program: CompiledProgram) -> list[Any]:
    return [node.target for stage in program.stages for node in stage.graph.nodes]


WAYS: list[dict[str, Any]] = [
    {}, {"layout": "bsh"}, {"recompute": "full"}, {"recompute": "selective"}, {"fuse": False}, {"microbatch_size": 1},
]  # fmt: skip


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        *(((2, 2, 1), way) for way in WAYS),
        *(slow(mesh, way) for mesh in [(2, 1, 1), (4, 1, 1), (2, 2, 2), (2, 3, 1)] for way in WAYS),
    ],
    ids=str,
)
def test_a_gpt_is_the_plain_one(mesh: tuple[int, int, int], options: dict[str, Any]) -> None:
    program = compile_gpt(mesh, **options)
    made = targets(program)
    assert made.count(collectives.reduce_scatter) == 5
    assert collectives.reduce_from_tensor not in made
    verify(program)


def test_without_it_the_tokens_stay_whole() -> None:
    made = targets(compile_gpt((2, 1, 1), sequence_parallel=False))
    assert made.count(collectives.reduce_from_tensor) == 5
    assert collectives.reduce_scatter not in made


class Masked(nn.Module):
    """A dropout `way` between two linears that are divided, in one of several shapes, and random numbers."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.table, self.norm = way, nn.Embedding(32, 16), nn.LayerNorm(16)
        self.inner = nn.ModuleList(nn.Linear(16, 32) for _ in range(2))
        self.outer = nn.ModuleList(nn.Linear(32, 16) for _ in range(2))

    def draw(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        if self.way == "merged":
            return functional.dropout(x.reshape(b * s, h), 0.4, self.training).view(b, s, h)
        if self.way == "turned":
            turned = x.transpose(0, 1).reshape(s * b, h)
            return functional.dropout(turned, 0.4, self.training).view(s, b, h).transpose(0, 1)
        if self.way == "parts":
            return functional.dropout(x.view(b, s, 4, 4), 0.4, self.training).flatten(2)
        return functional.dropout(x, 0.4, self.training) + torch.rand_like(x[..., :1])

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.table(ids)
        for inner, outer in zip(self.inner, self.outer, strict=True):
            x = x + self.draw(outer(torch.tanh(inner(self.norm(x)))))
        return functional.cross_entropy((x @ self.table.weight.t()).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("layout", ["sbh", slow("bsh")])
@pytest.mark.parametrize("way", ["plain", "merged", slow("turned"), slow("parts")])
def test_masks_are_those_of_one_device(way: str, layout: str) -> None:
    """Loss and the norms' gradients in training mode, on real ranks, to the last bits of float64."""
    torch.manual_seed(0)
    model, names = Masked(way).double(), ("ids", "labels")
    inputs, batch = ({name: torch.randint(0, 32, (rows, 8)) for name in names} for rows in (2, 4))

    def train(mesh: tuple[int, int, int]) -> Tensor:
        options: dict[str, Any] = {"num_microbatches": 2, "layout": layout, "sequence_parallel": mesh[0] > 1}
        program = autoptd.compile(model, mesh, example_inputs=inputs, **options)
        assert (collectives.reduce_scatter in targets(program)) == (mesh[0] > 1)

        def work(rank: int) -> Tensor:
            parallel = program.bind()
            loss = parallel(**batch)
            loss.backward()
            gradients = [p.grad for name, p in parallel.named_parameters() if "norm" in name and p.grad is not None]
            return torch.cat([loss.detach().view(1), *gradients])

        found: list[Tensor] = run_ranks(work, program.mesh.size)
        first, *others = found
        assert all(torch.equal(first, other) for other in others)
        return first

    torch.testing.assert_close(train((2, 1, 1)), train((1, 1, 1)), rtol=1e-12, atol=1e-14)


def test_sequences_that_do_not_divide_are_left_alone() -> None:
    config = GPTConfig(vocab_size=64, block_size=15, n_layer=2, n_head=4, n_embd=32)
    program = compile_gpt((2, 1, 1), config)
    assert "behind 5 sums tokens stay whole, as tensor=2 divides no dimension of theirs" in log_of(program)
    assert collectives.reduce_scatter not in targets(program)
    verify(program)


def test_boundaries_carry_a_share_without_a_gather() -> None:
    """Stages cut between layers send what each rank has."""
    program = compile_gpt((2, 2, 1), GPTConfig(64, 16, 4, 4, 32))
    streams = [b for stage in program.manifest.stages for b in stage.sends if b.shape[-1] == 32]
    assert streams
    for boundary in streams:
        assert boundary.placement["tensor"].dim == 0
        assert boundary.shape == (8, 2, 32)


def test_each_term_of_the_activations_is_a_share() -> None:
    """Of a layer's saved tensors a rank has exactly 1/t, to the byte (Korthikanti et al. 2022, table 2)."""

    def saved(mesh: tuple[int, int, int], **options: Any) -> dict[str, list[int]]:
        program = compile_gpt(mesh, **options)
        (stage,) = program.stages
        found: dict[str, list[int]] = {}
        for node, storages in Ledger(stage, program.mesh).first_kept():
            if info(node).path.startswith("h."):
                found.setdefault(info(node).path, []).extend(storage.nbytes() for storage in storages)
        return {path: sorted(sizes) for path, sizes in found.items()}

    whole = saved((1, 1, 1), sequence_parallel=None)
    assert saved((2, 1, 1)) == {path: [size // 2 for size in sizes] for path, sizes in whole.items()}
    assert saved((4, 1, 1)) == {path: [size // 4 for size in sizes] for path, sizes in whole.items()}


@pytest.mark.parametrize("tensor", [2, slow(4)])
@pytest.mark.parametrize(("recompute", "scores"), [("none", 1), ("selective", 0)])
def test_the_papers_formula_has_every_term_over_t(recompute: str, scores: int, tensor: int) -> None:
    """sbh/t (34 + 5as/h) of Korthikanti et al. 2022 (§4.2.3), and 34 sbh/t selective.

    Of these, masks of dropout, 2 sbh + as²b, are drawn again here; the statistics of norms, 16 sb, they leave out.
    """
    sizes = Sizes(16, 2, 64, 8, layers=4)
    model, options = PaperGPT(sizes).to(torch.bfloat16), {"example_inputs": make_batch(sizes), "recompute": recompute}
    cost = autoptd.compile(model, (tensor, 1, 1), sequence_parallel=True, **options).cost  # type: ignore[arg-type]
    a, b, f, h, s, t, layer = map(symbol, "abfhstl")
    paper = s * b * h * (34 + scores * 5 * a * s / h) / t
    ours = paper - (2 * s * b * h + scores * a * s**2 * b - 16 * s * b) / t
    assert sympy.expand(cost.layers[layer].saved.subs(f, 4 * h) - ours) == 0
    # Two gathers and two scatters of 2 bytes in each direction, and two gathers again for the weights' gradients.
    assert sympy.expand(cost.layers[layer].communicated - 2 * (4 + 4 + 2) * s * b * h * (t - 1) / t) == 0


def test_linears_keep_a_scattered_input_and_gather_it_again() -> None:
    text = compile_gpt((2, 1, 1)).texts[0]
    call = re.search(r"h0_mlp_c_fc = collectives.copied_linear\(.*?\n    \).*?\n", text, re.DOTALL)
    assert call is not None
    assert "all-gather, 4.1 kB over tensor" in call[0]
    assert "gathered=True" in call[0]
    assert "backward: all-gather and reduce-scatter, each 4.1 kB over tensor, beside the weight's gradient" in call[0]


class Sums(nn.Module):
    """Regions that qualify, and what needs all tokens between them: a cumulative sum, a shift, a mean over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32, 16)
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(4))
        self.inner = nn.ModuleList(nn.Linear(16, 32) for _ in range(3))
        self.outer = nn.ModuleList(nn.Linear(32, 16) for _ in range(3))
        self.scale = nn.Parameter(torch.randn(8, 1))

    def mlp(self, number: int, x: Tensor) -> Tensor:
        made: Tensor = self.outer[number](torch.tanh(self.inner[number](x)))
        return made

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.table(ids)
        x = x + self.mlp(0, self.norms[0](x)) * self.scale  # one number for each position
        x = x + torch.cumsum(self.norms[1](x), dim=1)
        (x,) = (x + self.mlp(1, x)).unsqueeze(0).unbind()  # its only part
        before = functional.pad(x[:, :-1], (0, 0, 1, 0))
        x = self.norms[2](x) + before - x.mean(1, keepdim=True)
        halves = x.view(len(x), 2, 4, 16).transpose(1, 2).reshape(x.shape)  # a rank has one of two
        x = self.norms[3](halves + self.mlp(2, x))
        return functional.cross_entropy((x @ self.table.weight.t()).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("mesh", [(2, 1, 1), (4, 1, 1), slow((2, 2, 1))], ids=str)
def test_only_what_treats_tokens_one_by_one_is_divided(mesh: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    inputs = {name: torch.randint(0, 32, (2, 8)) for name in ("ids", "labels")}
    program = autoptd.compile(Sums(), mesh, example_inputs=inputs, num_microbatches=2, sequence_parallel=True)
    made = targets(program)
    assert collectives.reduce_scatter in made
    assert collectives.all_gather in made  # for what needs all tokens, and has a whole gradient
    assert collectives.take_own in made  # the numbers of this rank's positions
    verify(program)


QUICK = ("GPTNeoXForCausalLM", "OPTForCausalLM", "T5ForConditionalGeneration", "Olmo2ForCausalLM")


@pytest.mark.parametrize("mesh", [(2, 1, 1), slow((2, 2, 1))], ids=str)
@pytest.mark.parametrize("name", [*QUICK, *(slow(name) for name in CLASSES if name not in QUICK)])
def test_classes_of_transformers(name: str, mesh: tuple[int, int, int]) -> None:
    model = make_model(name, "sdpa") or make_model(name, "eager")
    assert model is not None
    options: dict[str, Any] = {"example_inputs": make_inputs(name), "num_microbatches": 2}
    program = autoptd.compile(randomize(model), mesh, sequence_parallel=True, **options)
    assert collectives.reduce_scatter in targets(program)
    verify(program)


# In pieces

SELENE = Cluster.load("dgx-a100")
# Messages and products that take long, and launches that take nothing: pieces pay for the smallest model.
SLOW_DEVICE = replace(
    SELENE.device, peak_flops={"fp32": 1e6, "fp64": 1e6}, launch_seconds=0.0, tile_rows=1, tile_columns=1
)
SLOW = replace(SELENE, device=SLOW_DEVICE, node=replace(SELENE.node, bandwidth=1e5, latency_seconds=0.0))


@pytest.mark.parametrize(
    ("mesh", "options"), [((2, 1, 1), {}), ((2, 2, 1), WAYS[3]), slow((4, 1, 1), WAYS[2]), slow((2, 1, 2), WAYS[5])],
    ids=str,
)  # fmt: skip
def test_gathers_and_scatters_in_pieces(mesh: tuple[int, int, int], options: dict[str, Any]) -> None:
    """Of all but the embedding's sum and what is read by other than linears; on real ranks, beside the plain model."""
    model = make_gpt(replace(CONFIG, dropout=0.0), torch.float64)
    given: dict[str, Any] = {"microbatch_size": 2, "num_microbatches": 2, "sequence_parallel": True, **options}
    program = autoptd.compile(model, mesh, cluster=SLOW, **given)
    assert any(entry.endswith("9 gathers and scatters in pieces") for entry in program.log)
    nodes = [node for stage in program.stages for node in stage.graph.nodes]
    assert [node.kwargs["gathered"] for node in nodes if "gathered" in node.kwargs] == ["in pieces"] * 5
    assert sum(node.target is collectives.scattered_linear for node in nodes) == 4
    assert "reduce-scatter" in program.texts[0]
    rows = given["microbatch_size"] * 2 * mesh[2]
    batch = {name: torch.randint(0, 66, (rows, 16)) for name in ("idx", "targets")}
    (found,), (expected,) = (
        train_compiled(program, [batch]).steps, train_plain(model, [batch], 2 * mesh[2]).steps
    )  # fmt: skip
    compare(found, expected)
    verify(program)  # last: its threads, as they end, may hold a lock that a forked rank would wait for


class OneRegion(nn.Module):
    """The only sum of which runs in pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32, bias=False)
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 66)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        x = self.norm(x + self.down(self.up(x).tanh()))
        return functional.cross_entropy(self.head(x).flatten(0, 1), targets.t().flatten())


def test_what_pieces_save_is_in_every_prediction(tmp_path: Path) -> None:
    """Of the program, and of the settings beside its own; of one that was read back, too."""
    torch.manual_seed(0)
    model = OneRegion().double()
    given: Any = {"x": torch.randn(2, 16, 32, dtype=torch.float64), "targets": torch.randint(66, (2, 16))}
    options: dict[str, Any] = {"microbatch_size": 2, "num_microbatches": 2, "cluster": SLOW}
    divided, whole = (
        autoptd.compile(model, (2, 1, 1), example_inputs=given, sequence_parallel=way, **options)
        for way in (True, False)
    )
    assert collectives.reduce_scatter not in {node.target for node in divided.stages[0].graph.nodes}
    assert "2 gathers and scatters in pieces" in str(divided)
    verify(divided)
    divided.save(tmp_path)
    for program in (divided, autoptd.load(tmp_path, model)):
        assert not program.check()
        step = program.simulate(SLOW).step_seconds
        assert step == divided.simulate(SLOW).step_seconds
        (change,) = (c for c in program.explain(SLOW).changes if "tokens between divided regions" in c.what)
        assert change.what.startswith("whole tokens")
        assert change.seconds_per_sequence == pytest.approx(whole.simulate(SLOW).step_seconds / step, rel=1e-6)


@pytest.mark.parametrize("mesh", [(2, 1, 1), (4, 1, 1)])
def test_pieces_have_the_products_and_the_messages_of_the_whole(
    mesh: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And take less time, though they read a weight once for each."""

    def measure() -> tuple[float, int, int]:
        program = compile_gpt(mesh, cluster=SLOW)
        nodes = [node for stage in program.stages for node in stage.graph.nodes]
        works = [work(node) for node in nodes for work in (forward_work, backward_work)]
        step = program.simulate(SLOW).step_seconds
        return step, sum(work.flops for work in works), sum(work.exchanged for work in works)

    seconds, *amounts = measure()
    monkeypatch.setattr("autoptd.passes.tensor_parallel.overlap.LEAST_GAIN", 0.0)
    whole_seconds, *whole_amounts = measure()
    assert amounts == whole_amounts
    assert seconds < 0.95 * whole_seconds


def test_pieces_are_chosen_by_the_cost_model() -> None:
    """A device of one core computes nothing beside its messages, and small products gain less than launches take."""
    core = replace(SLOW, device=replace(SLOW.device, multiprocessors=1))
    for cluster in (core, SELENE, None):
        assert "pieces" not in compile_gpt((2, 1, 1), cluster=cluster).log[-1]
    assert "pieces" not in compile_gpt((2, 1, 1), cluster=SLOW, overlap=False).log[-1]


# By default


def test_by_default_where_it_pays() -> None:
    """A rank of a small model waits longer for the messages than it saves."""
    large = autoptd.compile(make_gpt(LARGE, torch.bfloat16, device="meta"), (8, 1, 1))
    assert "tokens divided between 9 reduce-scatters and 9 all-gathers forward" in log_of(large)
    small = compile_gpt((2, 1, 1), MIDDLE, sequence_parallel=None)
    assert "tokens stay whole, as they are few for DGX A100 (Selene)" in log_of(small)


@pytest.mark.parametrize(
    ("hidden", "tensor", "options"),
    [
        (1024, 4, {}),
        (2048, 4, {"recompute": "full"}),
        (4096, 8, {"recompute": "full", "microbatch_size": 2}),
        slow(12288, 8, {"recompute": "selective"}),
    ],
)
def test_the_choice_is_that_of_the_simulator(hidden: int, tensor: int, options: dict[str, Any]) -> None:
    config = GPTConfig(vocab_size=512, block_size=2048, n_layer=2, n_head=16, n_embd=hidden, dropout=0.1)
    model = make_gpt(config, torch.bfloat16, device="meta")
    ways = (None, False, True)
    programs = [
        autoptd.compile(model, (tensor, 1, 1), num_microbatches=2, sequence_parallel=way, **options) for way in ways
    ]
    chosen, *both = (program.simulate("dgx-a100").step_seconds for program in programs)
    assert chosen == min(both)


def test_tokens_are_divided_where_the_program_fits_only_so() -> None:
    """If nobody decided that; the log says so."""
    model = make_gpt(replace(MIDDLE, n_layer=4), torch.bfloat16, device="meta")
    given: Any = {"num_microbatches": 2, "microbatch_size": 4}
    divided, whole = (
        max(autoptd.compile(model, (4, 1, 1), sequence_parallel=way, **given).simulate(SELENE).memory_bytes)
        for way in (True, False)
    )
    assert divided < whole
    device = replace(SELENE.device, memory_bytes=(divided + whole) / 2, reserved_bytes=0.0)
    cluster = replace(SELENE, device=device)
    program = autoptd.compile(model, (4, 1, 1), cluster=cluster, **given)
    assert program.simulate(cluster).fits
    why = "tokens divided: with whole ones a rank holds [0-9,]* bytes more than DGX A100 \\(Selene\\) has"
    assert any(re.fullmatch(why, entry) for entry in program.log)
    with pytest.warns(UserWarning, match="does not fit DGX A100"):
        kept = autoptd.compile(model, (4, 1, 1), cluster=cluster, sequence_parallel=False, **given)
    assert collectives.reduce_scatter not in targets(kept)


def test_several_input_shapes_divide_tokens_only_if_asked() -> None:
    """Of which t may divide one and not another, whose norms would then be summed otherwise."""
    model = make_gpt(LARGE, torch.bfloat16, device="meta")
    shapes = [{name: torch.zeros(1, n, dtype=torch.long) for name in ("idx", "targets")} for n in (4096, 4095)]
    assert "tokens" not in log_of(autoptd.compile(model, (8, 1, 1), example_inputs=shapes))
    with pytest.raises(ValueError, match="all shapes train the same parameters: compile this one alone"):
        autoptd.compile(model, (8, 1, 1), example_inputs=shapes, sequence_parallel=True)


def test_another_value_is_refused() -> None:
    with pytest.raises(ValueError, match="sequence_parallel is 'yes'; expected True or False"):
        autoptd.compile(GPT(CONFIG), (2, 1, 1), sequence_parallel="yes")  # type: ignore[arg-type]
