"""What is recomputed: the texts, the same meaning, groups as they were asked for, and refusals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoptd
from autoptd.passes.cost.saved_tensors import Ledger, count_bytes
from autoptd.passes.ir.nodes import info
from autoptd.passes.ir.program import Program, recomputed_groups, values_given, values_taken
from autoptd.passes.recompute import find_cores, recompute_activations
from autoptd.text.comments import write_bytes
from autoptd.text.reader import trace_program
from samples.gpt import GPT, GPTConfig
from tests.interpret import run_graph
from tests.passes.structure.test_layers import Stack, cut, cut_model, t5
from tests.plain_models import HUGGING_FACE, LENGTH, VOCABULARY


def compile_sample(recompute: str | int, layers: int = 2, mesh: Any = (1, 1, 1), **options: Any) -> Any:
    """The sample GPT, compiled without the passes whose texts are held elsewhere."""
    torch.manual_seed(0)
    config = GPTConfig(VOCABULARY, LENGTH, layers, 4, 32, options.pop("dropout", 0.0))
    inputs = {name: torch.zeros(2, LENGTH, dtype=torch.long) for name in ("idx", "targets")}
    return autoptd.compile(
        GPT(config), mesh, example_inputs=inputs, fuse=False, layout="bsh", recompute=recompute, **options
    )


def list_groups(program: Program | autoptd.CompiledProgram) -> list[list[str]]:
    """The labels of each stage's groups."""
    return [[str(info(group[0]).recompute) for group in recomputed_groups(stage.graph)] for stage in program.stages]


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_golden(recompute: str, golden: Callable[[str, str], None]) -> None:
    program = compile_sample(recompute, mesh=(2, 1, 1), dropout=0.1)
    golden(f"recompute_{recompute}.py", program.texts[0])


def draw(program: Program) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    (stage,) = program.stages
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(p.shape, generator=generator, dtype=p.dtype).mul_(0.3).requires_grad_(p.requires_grad)
        for name, p in stage.parameters.items()
        if p.kind == "parameter"
    }
    ids = torch.randint(0, 32, (2, LENGTH), generator=generator)
    return weights, {i.name: ids for i in program.inputs}


@pytest.mark.parametrize("recompute", ["full", "selective", 2])
@pytest.mark.parametrize("name", ["nanogpt-slow", "gpt2", "gpt-neo", "llama", "gemma2"])
def test_the_graph_means_the_same(name: str, recompute: str | int) -> None:
    """Calls change places only: loss and gradients are the same bits."""
    before = cut_model(name)
    after = recompute_activations(before, recompute=recompute)
    weights, inputs = draw(before)
    trained = [w for w in weights.values() if w.requires_grad]
    found = []
    for program in (before, after):
        loss = run_graph(program, weights, inputs)
        found.append([loss, *torch.autograd.grad(loss, trained, allow_unused=True)])
    for own, other in zip(*found, strict=True):
        assert (own is None and other is None) or torch.equal(own, other)
    after.stages[0].graph.lint()
    assert all(info(node).recompute is None for node in before.stages[0].graph.nodes)


def test_none_is_the_program_itself() -> None:
    program = cut_model("gpt2")
    assert recompute_activations(program, recompute="none") is program


@pytest.mark.parametrize(
    ("recompute", "expected"),
    [
        ("full", [["h0", "h1", "h2", "h3", "h4"]]),
        (2, [["h0_to_h1", "h2_to_h3", "h4"]]),
        (3, [["h0_to_h2", "h3_to_h4"]]),
        (9, [["h0_to_h4"]]),
        ("selective", [[]]),
    ],
)
def test_groups_of_layers(recompute: str | int, expected: list[list[str]]) -> None:
    assert list_groups(compile_sample(recompute, layers=5)) == expected


def test_a_group_takes_one_value_and_gives_one() -> None:
    for stage in compile_sample(2, layers=4, dropout=0.1).stages:
        for group in recomputed_groups(stage.graph):
            assert len(values_taken(group)) == len(values_given(group)) == 1


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("frozen", [range(2), range(4), (0, 1, 4, 5)], ids=str)
def test_trained_layers_behind_frozen_ones_are_a_stack(tensor: int, frozen: Sequence[int]) -> None:
    """Into the lowest of them comes what needs no gradient, and no copy of it for the tensor ranks."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(VOCABULARY, LENGTH, 6, 4, 32, tie_weights=False))
    for part in (model.wte, model.wpe, *(model.h[index] for index in frozen)):
        part.requires_grad_(False)
    program = autoptd.compile(model, mesh=(tensor, 1, 1), num_microbatches=1, recompute="full")
    (groups,) = list_groups(program)
    lowest = next(index for index in range(6) if index not in frozen)
    assert groups == [f"h{index}" for index in range(lowest, 6)]
    report = program.verify()
    assert report.passed, report
    assert max(report.gradient_errors.values()) < 1e-12


def test_a_stage_has_its_part_of_a_layer() -> None:
    """Three layers on four stages: what is whole is grouped by two, the rest is alone."""
    program = compile_sample(2, layers=3, mesh=(1, 2, 1), num_model_chunks=2)
    labels = list_groups(program)
    assert {label for stage in labels for label in stage} <= {"h0", "h1", "h2", "h0_to_h1", "h1_to_h2"}
    assert sum(map(len, labels)) >= 4
    for stage in program.stages:
        ledger = Ledger(stage, program.mesh)
        alone = [n for n in ledger.nodes if n.name.startswith("h") and info(n).recompute is None]
        saved, taken = ledger.saved(alone), ledger.storages(values_taken(alone))
        assert count_bytes(saved - taken) <= count_bytes(taken - saved)  # recomputed it would save nothing


def test_a_part_that_would_save_nothing_is_kept() -> None:
    """A cut right before the residual sum leaves it to the next stage, which needs both of its terms anyway."""
    program = recompute_activations(cut_model("opt", 2, 4), recompute="full")
    for stage in program.stages:
        ledger = Ledger(stage, program.mesh)
        for group in recomputed_groups(stage.graph):
            saved, taken = ledger.saved(group), ledger.storages(values_taken(group))
            assert count_bytes(saved - taken) > count_bytes(taken - saved)


@pytest.mark.parametrize(("layers", "size"), [(2, 1), (12, 1), pytest.param(40, 2, marks=pytest.mark.slow)])
def test_optimal_is_the_papers(layers: int, size: int) -> None:
    """c * A_in + (l / c) * A_int, in whole numbers, by the bytes of the ledger."""
    program = compile_sample("optimal", layers=layers)
    plain = compile_sample("none", layers=layers)
    (stage,) = plain.stages
    ledger = Ledger(stage, plain.mesh)
    layer = [n for n in ledger.nodes if (str(info(n).path) + ".").startswith("h.1.")]
    a_int, a_in = count_bytes(ledger.saved(layer)), 2 * LENGTH * 32 * 4
    best = min(range(1, layers + 1), key=lambda k: -(-layers // k) * a_in + k * a_int)
    assert best == size
    assert f"up to {best} in a group" in program.log[-1]
    assert abs(best - max(1.0, (layers * a_in / a_int) ** 0.5)) <= 1


def test_values_shared_by_recomputed_layers_are_passed_once() -> None:
    """T5's first layer makes the table that its other layers are given; the decoder's get the encoder's output."""
    program = recompute_activations(cut(t5(3), ["input_ids", "decoder_input_ids", "labels"]), recompute="full")
    groups = recomputed_groups(program.stages[0].graph)
    assert [len(values_taken(group)) for group in groups] == [1, 2, 2, 2, 3, 3]
    assert [len(values_given(group)) for group in groups] == [2, 1, 1, 2, 1, 1]
    labels = list_groups(program)[0]
    assert len(set(labels)) == 6
    assert labels[:4] == ["block0", "block1", "block2", "block0_again1"]


def test_a_group_does_not_reach_from_one_stack_into_another() -> None:
    """Between T5's encoder and decoder are a norm and an embedding."""
    program = cut(t5(3), ["input_ids", "decoder_input_ids", "labels"])
    after = recompute_activations(program, recompute=2)
    labels = [info(group[0]).recompute for group in recomputed_groups(after.stages[0].graph)]
    assert labels == ["block0_to_block1", "block2", "block0_to_block1_again1", "block2_again1"]
    after.stages[0].graph.lint()


def test_the_plan_says_what_is_kept() -> None:
    program = compile_sample("full", mesh=(2, 1, 1))
    (stage,) = program.stages
    kept = count_bytes(Ledger(stage, program.mesh).kept(recomputed_groups(stage.graph)))
    text = " ".join(str(program).split())
    assert f"recomputed in the backward: 2 groups; all stages keep {write_bytes(kept)} of " in text
    assert "recomputed" not in str(compile_sample("none"))


def test_the_module_of_a_rank_is_flat() -> None:
    module = compile_sample("full").rank(0).module()
    labels = [info(node).recompute for node in module.stage_0.graph.nodes]
    assert list(dict.fromkeys(labels)) == [None, "h0", "h1"]


# Selective


def test_selective_takes_the_attention_weights_alone() -> None:
    program = recompute_activations(cut_model("nanogpt-slow"), recompute="selective")
    for group in recomputed_groups(program.stages[0].graph):
        assert group[0].name.endswith("attn_matmul")
        assert group[-1].name.endswith("attn_matmul_1")
        assert any("softmax" in node.name for node in group)
        assert len(values_taken(group)) == 3  # q, k, v; the mask is a constant
        assert len(values_given(group)) == 1


@pytest.mark.parametrize("name", ["nanogpt-slow", "mingpt"])
def test_every_written_attention_is_found(name: str) -> None:
    cores = find_cores(cut_model(name).stages[0].graph)
    assert len(cores) == 2
    for core in cores:
        assert sum("softmax" in str(node.target) for node in core) == 1


ENDS = {
    "gpt-neo": ("matmul", "matmul_1"),
    "gpt-j": ("matmul", "matmul_1"),
    "llama": ("matmul", "matmul_1"),
    "gemma2": ("matmul", "matmul_1"),  # with a soft cap between
    "falcon": ("matmul", "matmul_1"),
    "bloom": ("baddbmm", "bmm"),
}


@pytest.mark.parametrize("name", ENDS)
def test_written_attentions_of_hugging_face(name: str) -> None:
    model = HUGGING_FACE[name]()
    model.config._attn_implementation = "eager"  # type: ignore[union-attr]
    graph = cut(model, ["input_ids", "labels"], tensor=2).stages[0].graph
    cores = find_cores(graph)
    first, last = ENDS[name]
    assert len(cores) == 2
    for core in cores:
        assert core[0].name.endswith(f"_{first}")
        assert core[-1].name.endswith(f"_{last}")
        assert len(core) < 10


def test_attention_with_dropout_of_its_own() -> None:
    program = compile_sample("selective", dropout=0.1)
    groups = recomputed_groups(program.stages[0].graph)
    assert len(groups) == 2
    assert "2 attentions written out, 2 groups" in program.log[-1]


def test_fused_attention_is_left() -> None:
    program = compile_sample("selective")
    assert "0 attentions written out, 2 are fused, 0 groups" in program.log[-1]
    assert "recompute" not in program.texts[0].split('"""', 2)[2]


def test_a_softmax_that_is_no_attention() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.gate, self.head = nn.Embedding(32, 8), nn.Linear(8, 8), nn.Linear(8, 32)

        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            x = self.table(ids)
            x = x * self.gate(x).softmax(-1)
            return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())

    program = recompute_activations(cut(Gated(), ["ids", "labels"]), recompute="selective")
    assert "0 attentions written out, 0 groups" in program.log[-1]


# Refusals, and reading back


@pytest.mark.parametrize("recompute", ["full", 2, "optimal"])
def test_a_model_without_layers_is_refused(recompute: str | int) -> None:
    program = cut(Stack([8, 12, 20, 16, 24]), ["ids", "labels"])
    with pytest.raises(
        ValueError,
        match=rf"recompute={recompute!r} keeps the inputs of repeated layers, and the model has none: expected "
        r'two or more .*; otherwise use recompute="none" or recompute="selective"',
    ):
        recompute_activations(program, recompute=recompute)


@pytest.mark.parametrize("recompute", ["full", "selective", 2])
def test_a_saved_program_comes_back(recompute: str | int, tmp_path: Path) -> None:
    program = compile_sample(recompute, layers=3, mesh=(2, 2, 1), dropout=0.1, num_model_chunks=1)
    program.save(tmp_path / "out")
    loaded = autoptd.load(tmp_path / "out")
    assert list_groups(loaded) == list_groups(program)
    for own, other in zip(program.stages, loaded.stages, strict=True):
        calls = [[n for n in s.graph.nodes if n.op == "call_function"] for s in (own, other)]
        assert [n.target for n in calls[0]] == [n.target for n in calls[1]]
        assert [info(n).recompute for n in calls[0]] == [info(n).recompute for n in calls[1]]
    loaded.check()
    tensors = next(line for line in str(program).splitlines() if line.startswith("tensor collectives"))
    assert tensors in str(loaded)


def test_edits_inside_a_function_are_what_runs(tmp_path: Path) -> None:
    program = compile_sample("full")
    program.save(tmp_path / "out")
    file = tmp_path / "out" / "program_00.py"
    text = file.read_text()
    assert text.count('approximate="tanh"') == 2
    file.write_text(text.replace('approximate="tanh"', 'approximate="none"', 1))
    edited = autoptd.load(tmp_path / "out")
    edited.check()
    model = GPT(GPTConfig(VOCABULARY, LENGTH, 2, 4, 32))
    assert not edited.verify(model=model).passed
    assert program.verify(model=model).passed


def test_a_partial_sum_inside_a_function_is_found() -> None:
    program = compile_sample("full", mesh=(2, 1, 1))
    line = next(x for x in program.texts[0].splitlines() if "h0_attn_c_proj_biased = " in x)
    broken = program.texts[0].replace(line, line.replace("h0_attn_c_proj_g", "h0_attn_c_proj"))
    with pytest.raises(autoptd.ProgramError, match=r"h0_attn_c_proj_biased.*program_00\.py"):
        _with_texts(program, (broken,)).check()


def _with_texts(program: autoptd.CompiledProgram, texts: tuple[str, ...]) -> autoptd.CompiledProgram:
    return autoptd.CompiledProgram(program.stages, program.log, texts, program.manifest, program.buffers)


def test_one_function_called_twice_is_two_groups() -> None:
    program = compile_sample("full")
    line = next(x for x in program.texts[0].splitlines() if "= recompute(rank, h0, " in x)
    twice = program.texts[0].replace(line, f"{line}\n    h0_add_1 = recompute(rank, h0, h0_add_1)")
    traced = trace_program((twice,), program.manifest)
    assert list_groups(traced) == [["h0", "h0_again1", "h1"]]


def test_a_call_without_the_rank_is_refused() -> None:
    program = compile_sample("full")
    broken = program.texts[0].replace("recompute(rank, h1, h0_add_1)", "recompute(h1, h0_add_1)")
    with pytest.raises(ValueError, match=r"program_00\.py:\d+: .*expected recompute\(rank, function, \*values\)"):
        _with_texts(program, (broken,)).check()
