"""Verification: right programs pass to rounding, edited ones are caught by name, whatever the model's dtype."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autoptd
from autoptd.compiled import CompiledProgram
from autoptd.passes.ir.program import Program
from autoptd.runtime.program.manifest import Input
from autoptd.text.reader import trace_program
from autoptd.verification import step
from autoptd.verification.float64 import Promotion
from autoptd.verification.gradients import StepResult, compare_gradients, compare_outputs, join_gradients
from autoptd.verification.random_inputs import draw_batch, draw_weights
from autoptd.verification.report import Report
from samples.gpt import GPT, GPTConfig
from tests.plain_models import HUGGING_FACE, LENGTH


def gpt(**options: Any) -> GPT:
    torch.manual_seed(0)
    sizes = {"vocab_size": 67, "block_size": 16, "n_layer": 2, "n_head": 4, "n_embd": 32, **options}
    model = GPT(GPTConfig(**sizes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # they start at zero, where a doubled one would not show
                parameter.normal_(std=1e-3)
    return model


def compile_gpt(mesh: tuple[int, int, int], model: nn.Module | None = None) -> CompiledProgram:
    return autoptd.compile(model or gpt(), mesh=mesh, microbatch_size=2, num_microbatches=2 * mesh[1])


@pytest.fixture(scope="module")
def program() -> CompiledProgram:
    return compile_gpt((2, 2, 1))


def edited(program: CompiledProgram, old: str, new: str, rank: int = 0) -> Report:
    assert program.texts[rank].count(old) == 1
    text = program.texts[rank].replace(old, new)
    texts = (*program.texts[:rank], text, *program.texts[rank + 1 :])
    return replace(program, texts=texts).verify()


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_whole_loss_passes(recompute: str) -> None:
    program = autoptd.compile(gpt(), (1, 2, 1), microbatch_size=2, num_microbatches=4, recompute=recompute)
    report = program.verify()
    assert report.passed, report
    assert report.loss_error <= 1e-14
    assert 0 < report.worst[1] <= 1e-12


@pytest.mark.parametrize("mesh", [(2, 2, 1), (1, 2, 2), (2, 2, 2)], ids=str)
def test_right_programs_pass(mesh: tuple[int, int, int]) -> None:
    model = gpt(dropout=0.1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.h[0].eval()
    report = compile_gpt(mesh, model).verify()
    assert report.passed, report
    assert report.loss_error <= 1e-14
    assert report.ranks == mesh[0] * mesh[1] * mesh[2]
    assert report.gradient_errors.keys() == dict(model.named_parameters()).keys()
    assert 0 < report.worst[1] <= 1e-12
    assert "dropout was off in both" in str(report)
    assert model.training
    assert not model.h[0].training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_dropped_all_reduce_of_the_backward_is_caught(program: CompiledProgram) -> None:
    old = re.search(r"collectives\.copied_linear\(([^(]*)rank, h0_ln1,", program.texts[0])
    assert old is not None
    report = edited(program, old[0], f"aten.linear({old[1]} h0_ln1,")
    assert not report.passed
    assert report.loss_error <= 1e-14
    assert report.worst[0] in ("h.0.ln_1.weight", "h.0.ln_1.bias")
    # The tensor ranks' embeddings get different gradients.
    assert any("gradient of wpe.weight on rank 1 differs from that of rank 0" in d for d in report.disagreements)
    assert "verify FAILED: 4 ranks" in str(report)
    assert re.search(
        r"backward goes wrong behind program_00.py:\d+: the gradient of h.0.ln_1.(weight|bias)", report.fault
    )
    assert re.search(r"\d\.\de[+-]\d\d  h\.0\.ln_1\.(weight|bias)\n", str(report))


def test_a_doubled_bias_is_caught(program: CompiledProgram) -> None:
    bias = 'p["h.0.attn.c_proj.bias"]'
    (rank,) = [rank for rank, text in enumerate(program.texts) if bias in text]
    report = edited(program, bias, f"{bias} * 2", rank)
    assert report.loss_error > 1e-12
    name, error = report.worst
    assert name == "h.0.attn.c_proj.bias"
    assert error == pytest.approx(1.0, abs=0.2)


def test_a_scaled_branch_is_caught(program: CompiledProgram) -> None:
    old = re.search(r"collectives\.copied_linear\(([^=]*)c_fc.weight\"\]\s*\)", program.texts[1])
    assert old is not None
    new = f"aten.mul({old[0]}, 1.001)"
    report = edited(program, old[0], new, rank=1)
    assert not report.passed
    line = program.texts[1][: program.texts[1].index(old[0])].count("\n") + 1
    assert f"the first wrong value is made at program_01.py:{line}, after" in report.fault
    assert report.worst[1] > 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_the_model_s_own_dtype_rounding_passes_and_faults_do_not(dtype: torch.dtype) -> None:
    program = compile_gpt((2, 2, 1), gpt().to(dtype))
    report = program.verify(dtype="model")
    assert report.passed, report
    assert report.worst[1] > 1e-12
    (old,) = set(re.findall(r"bias=p\[\"h.0.attn.c_proj.bias\"\]", "".join(program.texts)))
    texts = tuple(text.replace(old, old.replace("c_proj.bias", "c_proj.bias") + " * 3") for text in program.texts)
    faulty = replace(program, texts=texts).verify(dtype="model")
    assert not faulty.passed
    assert "h.0.attn.c_proj.bias" in faulty.wrong


class Satisfied(nn.Module):
    """A model whose margin holds: loss and gradients are zero."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x) - 100).mean()


@pytest.mark.parametrize("dtype", ["float64", "model"])
def test_a_loss_of_zero_is_verified(dtype: str) -> None:
    program = autoptd.compile(Satisfied(), (1, 1, 1), example_inputs={"x": torch.ones(2, 4)}, num_microbatches=1)
    assert program.verify(dtype=dtype).passed


def test_an_assertion_and_an_error_of_the_backward_have_their_line() -> None:
    def refuse(x: Tensor) -> Tensor:
        assert x.dtype is torch.float32, "only in float32"
        return x.mean()

    def overwrite(x: Tensor) -> Tensor:
        y = x.exp()
        return (y if x.dtype is torch.float32 else y.add_(1)).mean()

    ids = torch.randint(0, 67, (2, 8))
    examples: Any = {"example_inputs": {"idx": ids, "targets": ids}, "num_microbatches": 2}
    for loss, found in (
        (refuse, r"AssertionError: only in float32.*, at .*test_step.py:\d+: assert "),
        (overwrite, r"RuntimeError: .* modified by an inplace operation.*, at test_step.py:\d+, in its backward"),
    ):
        program = autoptd.compile(Lost(loss), (1, 1, 1), **examples)
        with pytest.raises(ValueError, match=f"(?s)the plain model fails with {found}"):
            program.verify()


def test_an_edited_schedule_runs(program: CompiledProgram) -> None:
    report = edited(program, "SCHEDULE = ", "# the same\nSCHEDULE = ")
    assert report.passed, report


def test_weights_and_batch_may_be_given(program: CompiledProgram) -> None:
    torch.manual_seed(1)
    other = gpt(bias=True)
    with torch.no_grad():
        other.wte.weight.mul_(3)
    generator = torch.Generator().manual_seed(3)
    shape = (2 * program.manifest.num_microbatches, 16)
    batch = {name: torch.randint(67, shape, generator=generator) for name in ("idx", "targets")}
    report = program.verify(weights=other.state_dict(), batch=batch)
    assert report.passed, report
    with torch.no_grad():
        loss = other.double()(**batch)[1]
    assert report.loss == pytest.approx(float(loss), rel=1e-12)


@pytest.mark.parametrize("weights", [None, "random"])
def test_a_model_of_another_size_is_refused(program: CompiledProgram, weights: str | None) -> None:
    message = r"wte.weight has shape \[50, 32\] in the model .*, \[67, 32\] in the program: verify with the compiled"
    with pytest.raises(ValueError, match=message):
        program.verify(model=gpt(vocab_size=50), weights=weights)


def test_a_batch_of_another_size_is_refused(program: CompiledProgram) -> None:
    batch = {name: torch.zeros(3, 16, dtype=torch.long) for name in ("idx", "targets")}
    message = r"batch: idx is torch.int64\[3, 16\]; expected torch.int64\[8, 16\], the sequences of all 1 replicas x 4"
    with pytest.raises(ValueError, match=message):
        program.verify(batch=batch)


class Offset(nn.Module):
    """Ids are moved before they are looked up, as in transformers' OPT, by `distance` or through a table of numbers."""

    numbers: Tensor

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.table, self.head = nn.Embedding(67, 16), nn.Linear(16, 67)
        self.register_buffer("numbers", torch.arange(50))

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        if self.how == "moved":
            idx = idx + 3
        elif self.how == "indexed":
            idx = self.numbers[idx]
        else:
            idx = self.numbers.gather(0, idx.flatten()).view_as(idx)
        return functional.cross_entropy(self.head(self.table(idx)).flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 1, 1)], ids=str)
@pytest.mark.parametrize("how", ["moved", "indexed", "gathered"])
def test_a_drawn_batch_that_the_model_refuses_is_said(how: str, mesh: tuple[int, int, int]) -> None:
    ids = torch.zeros(1, 64, dtype=torch.long)
    program = autoptd.compile(Offset(how), mesh=mesh, example_inputs={"idx": ids, "targets": ids}, num_microbatches=2)
    message = (
        r"verify: the plain model looks up a row that does not exist: index .*, at .*test_step.py:\d+: .* "
        r"The batch holds idx from \d+ to 6\d, targets from \d+ to 6\d; pass batch= with values that it accepts"
    )
    with pytest.raises(ValueError, match=message):
        program.verify()
    legal = torch.randint(40, (2, 64))
    report = program.verify(batch={"idx": legal, "targets": legal})
    assert report.passed, report


@pytest.mark.parametrize(
    ("mesh", "old", "new"),
    [
        ((1, 1, 1), 'p["wte.weight"], idx', 'p["wte.weight"].narrow(0, 0, 40), idx'),
        ((1, 1, 1), 'p["wpe.weight"], ', 'p["wpe.weight"][:8], '),
        ((2, 1, 1), "idx_sb, vocabulary=67", "idx_sb, vocabulary=40"),
    ],
)
def test_a_text_with_a_smaller_table_is_refused(mesh: tuple[int, int, int], old: str, new: str) -> None:
    message = (
        r"verify: the program looks up a row that does not exist: index out of range in self, at program_00.py:\d+: "
        r".*embedding.*The batch holds idx from \d+ to 66, .*; the plain model accepts it: correct the lookup"
    )
    with pytest.raises(ValueError, match=message):
        edited(compile_gpt(mesh), old, new)


class Weighted(nn.Module):
    """A loss that owns a buffer."""

    weight: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.linspace(0.5, 1.5, 67))

    def forward(self, output: tuple[Tensor, None], targets: Tensor) -> Tensor:
        return functional.cross_entropy(output[0].flatten(0, 1), targets.flatten(), self.weight)


def test_a_loss_functions_buffers_are_promoted() -> None:
    program = autoptd.compile(gpt(), mesh=(2, 1, 1), loss_fn=Weighted(), microbatch_size=2, num_microbatches=2)
    report = program.verify()
    assert report.passed, report


def test_a_traced_graph_is_verified() -> None:
    traced = torch.fx.symbolic_trace(Scaled())
    program = autoptd.compile(traced, mesh=(2, 2, 1), example_inputs=example(), num_microbatches=2)
    report = program.verify()
    assert report.passed, report


# Meta models


class Scaled(nn.Module):
    """A model with a buffer that its code needs, half-precision parameters, and casts inside."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(37, 16)
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 37, bias=False)
        self.register_buffer("scale", torch.full((16,), 0.3), persistent=False)

    def forward(self, ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        x = self.table(ids) * self.scale
        x = self.norm(x.float()).to(self.up.weight.dtype) * attention_mask[..., None]
        x = x + torch.linspace(0, 1, 16)
        x = self.down(functional.gelu(self.up(x)).float().to(self.down.weight.dtype))
        return functional.cross_entropy(x.view(-1, 37).float(), labels.view(-1))


def example(batch: int = 2) -> dict[str, Tensor]:
    ids = torch.zeros(batch, 8, dtype=torch.long)
    return {"ids": ids, "attention_mask": ids.clone(), "labels": ids.clone()}


def test_casts_inside_are_promoted_and_said() -> None:
    torch.manual_seed(0)
    model = Scaled().bfloat16()
    program = autoptd.compile(model, mesh=(2, 1, 2), example_inputs=example(), num_microbatches=2)
    report = program.verify()
    assert report.passed, report
    assert model.table.weight.dtype is torch.bfloat16
    assert re.search(r"promoted to float64: \d+ in the plain model, \d+ in all ranks", str(report))


def test_a_meta_model_takes_random_weights() -> None:
    with torch.device("meta"):
        model = Scaled()
    program = autoptd.compile(model, mesh=(2, 1, 1), example_inputs=example(), num_microbatches=2)
    with pytest.raises(ValueError, match=r"6 tensors are on the meta device.*table.weight.*pass weights='random'"):
        program.verify()
    assert program.verify(weights="random").passed  # the buffer is what the constructor makes
    unknown = replace(program, buffers={})
    with pytest.raises(ValueError, match=r"1 tensors are on the meta device.*\(scale\): pass weights= with them"):
        unknown.verify(weights="random")
    with pytest.raises(ValueError, match="weights='meta' is unknown: expected None, 'random', or tensors by name"):
        program.verify(weights="meta")
    drawn = draw_weights(program.manifest, model, {"scale": torch.ones(16)}, "random", seed=0)
    report = program.verify(weights=drawn)
    assert report.passed, report
    assert all(tensor.is_meta for tensor in model.state_dict().values())

    plain = compile_gpt((2, 2, 1), GPT(GPTConfig(67, 16, 2, 4, 32)).to("meta"))
    report = plain.verify(weights="random", seed=1)
    assert report.passed, report
    assert report.loss == plain.verify(weights="random", seed=1).loss
    assert report.loss != plain.verify(weights="random", seed=2).loss


def test_a_drawn_batch_is_legal_everywhere() -> None:
    with torch.device("meta"):
        model = Scaled()
    program = autoptd.compile(model, mesh=(2, 1, 2), example_inputs=example(), num_microbatches=3)
    traced = trace_program(program.texts, program.manifest, buffers=program.buffers)
    batch = draw_batch(traced, program.manifest, None, seed=0)
    assert {name: tuple(value.shape) for name, value in batch.items()} == dict.fromkeys(batch, (12, 8))
    assert 30 <= int(batch["ids"].max()) < 37
    assert 30 <= int(batch["labels"].max()) < 37
    mask = batch["attention_mask"]
    assert mask.dtype is torch.int64
    assert torch.equal(mask, mask.sort(dim=1, descending=True).values)  # padding is on the right
    assert 4 <= int(mask.sum(1).min()) <= int(mask.sum(1).max()) <= 7
    assert len(set(mask.sum(1).tolist())) > 1
    assert torch.equal(mask, draw_batch(traced, program.manifest, None, seed=0)["attention_mask"])


@pytest.mark.parametrize(("shape", "batch_dim"), [((6, 8), 0), ((8, 6), 1), ((5, 5), None), ((3, 1), 0)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_a_drawn_mask_pads_each_sequence(shape: tuple[int, int], batch_dim: int | None, dtype: torch.dtype) -> None:
    manifest = replace(compile_gpt((1, 1, 1)).manifest, num_microbatches=1)
    manifest = replace(manifest, inputs=(Input("attention_mask", shape, dtype, batch_dim),))
    mask = draw_batch(Program(manifest.mesh, (), manifest.inputs, manifest.output), manifest, None, 0)
    rows = mask["attention_mask"].T if batch_dim else mask["attention_mask"]
    assert (tuple(mask["attention_mask"].shape), rows.dtype) == (shape, dtype)
    assert bool((rows[:, 0] == 1).all())
    assert bool((rows.sum(1) * 2 >= rows.shape[1]).all())
    assert bool((rows[:, 1:] <= rows[:, :-1]).all())
    assert bool((rows[:, -1] == 0).all()) or rows.shape[1] == 1


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_padded_sequences_of_hugging_face_models(name: str) -> None:
    torch.manual_seed(0)
    ids = torch.zeros(2, LENGTH, dtype=torch.long)
    example = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
    program = autoptd.compile(HUGGING_FACE[name](), mesh=(2, 2, 1), example_inputs=example, num_microbatches=2)
    report = program.verify()
    assert report.passed, report
    assert "not split" not in str(report)


class Positioned(nn.Module):
    """Takes its positions as an input that has no batch."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(37, 16), nn.Embedding(8, 16)
        self.head = nn.Linear(16, 37)

    def forward(self, ids: Tensor, places: Tensor, labels: Tensor) -> Tensor:
        x = self.head(self.table(ids) + self.places(places))
        return functional.cross_entropy(x.view(-1, 37), labels.view(-1))


def test_an_input_that_is_not_split_is_said() -> None:
    ids = torch.zeros(2, 8, dtype=torch.long)
    inputs = {"ids": ids, "places": torch.arange(8), "labels": ids.clone()}
    report = autoptd.compile(Positioned(), (2, 1, 1), example_inputs=inputs, num_microbatches=2).verify()
    assert report.passed, report
    assert "note: not split over the microbatches, each gets it whole: places" in str(report)


def test_programs_larger_than_free_memory_are_not_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=50_000_000, block_size=16, n_layer=2, n_head=4, n_embd=2048))
    program = autoptd.compile(model, mesh=(2, 2, 1), microbatch_size=1, num_microbatches=2)
    with pytest.raises(ValueError, match=r"verify runs all 4 ranks .* about [\d,]{17} bytes; this machine has"):
        program.verify(weights="random")
    monkeypatch.setattr(step, "available_bytes", lambda: 2**20)
    with pytest.raises(ValueError, match="this machine has 1,048,576 free"):
        compile_gpt((1, 1, 1)).verify()


# The parts


def test_promotion_leaves_whole_numbers_alone() -> None:
    with Promotion() as promotion:
        x = torch.ones(3, dtype=torch.float64)
        assert x.float().dtype is torch.float64
        assert x.to(torch.bfloat16).dtype is torch.float64
        assert x.softmax(0, dtype=torch.float32).dtype is torch.float64
        assert torch.arange(3).dtype is torch.int64
        assert torch.arange(3).float().dtype is torch.float64
        assert torch.zeros(3).dtype is torch.float64
        least = torch.finfo(torch.float64).min  # as a model makes it of its activations' dtype
        assert torch.full((), least).item() == least
        assert torch.linspace(0, 1, 4)[1].item() == torch.linspace(0, 1, 4, dtype=torch.float64)[1].item()
        assert torch.tensor([0.5]).dtype is torch.float64
        assert x.long().dtype is torch.int64
    assert promotion.count == 4
    assert torch.ones(3).dtype is torch.float32


def test_a_gradient_of_rounding_only_is_no_error() -> None:
    expected = {"a": torch.tensor([2.0, 1.0]), "b": torch.tensor([1e-8]), "c": torch.tensor([1e-17])}
    found = {"a": torch.tensor([2.0, 1.5]), "b": torch.tensor([2e-8]), "c": torch.tensor([-3e-17])}
    errors = compare_gradients(found, {**expected, "d": torch.zeros(1)})
    assert errors == pytest.approx({"a": 0.25, "b": 5e-3, "c": 2e-14, "d": 0.0})
    assert compare_gradients({"c": torch.ones(1)}, expected)["c"] == pytest.approx(500)
    assert compare_gradients({}, expected)["a"] == 1.0


def test_a_complex_output_is_compared_with_its_imaginary_part() -> None:
    own, plain = ([{("z",): torch.complex(torch.ones(2), torch.full((2,), y))}] for y in (1.0, 0.0))
    assert compare_outputs(own, plain) == {"output z": 1.0}
    assert compare_outputs(plain, [{("z",): torch.ones(3)}]) == {"output z": float("inf")}


def test_ranks_that_disagree_are_named() -> None:
    program = compile_gpt((1, 2, 2))
    gradient = torch.ones(67, 32, dtype=torch.float64)
    results = [StepResult(1.0, {"wte.weight": gradient.clone()}, 0) for _ in range(4)]
    assert join_gradients(program.manifest, results)[1] == ()
    results[1].gradients["wte.weight"][0, 0] = 2  # pipeline rank 1 of replica 0
    results[2] = StepResult(1.5, results[2].gradients, 0)
    _, disagreements = join_gradients(program.manifest, results)
    assert disagreements == (
        "rank 2 has the loss 1.5, rank 0 1.0",
        "replicas differ: the gradient of wte.weight on rank 3 differs from that of rank 1",
        "ranks differ: the gradient of the tied wte.weight on rank 1 differs from that of rank 0",
    )


def test_a_report_says_what_is_wrong() -> None:
    report = Report(2.0, 2.0, {"a": 1e-15, "b": float("nan"), "c": 0.5}, (), 4, 1.25, ("a note",))
    assert not report.passed
    assert report.worst[0] == "b"
    assert str(report) == (
        "verify FAILED: 4 ranks against the plain model in float64, 1.2 s\n"
        "  loss 2, plain 2, relative error 0.0e+00\n"
        "  3 gradients, worst b: relative error nan\n"
        "         nan  b\n"
        "     5.0e-01  c\n"
        "  note: a note"
    )
    assert Report(2.0, 2.0, {"a": 1e-9}, (), 1, 0.0).ok(tolerance=1e-8)
    assert not Report(2.0, 2.0, {"a": 0.0}, ("ranks differ",), 1, 0.0).passed


@pytest.mark.parametrize("values", [0.3, [0.3, 0.7, 0.1, 0.2, 0.6, 0.4, 0.9, 0.8]], ids=["one number", "several"])
@pytest.mark.parametrize("literal", [None, torch.float64], ids=["the activations' dtype", "float64"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_literals_are_the_programs(
    dtype: torch.dtype, literal: torch.dtype | None, values: float | list[float]
) -> None:
    """In float64 the plain model would have one of its activations' dtype exactly; what is meant so stays exact."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            factors = torch.tensor(values, dtype=literal or x.dtype)
            loss: Tensor = (self.linear(x).to(factors.dtype) * factors).square().mean()
            return loss

    torch.manual_seed(0)
    example = {"x": torch.ones(2, 8, dtype=dtype)}
    program = autoptd.compile(Scaled().to(dtype), (1, 1, 1), example_inputs=example, num_microbatches=2)
    assert program.verify().passed


# The loss of several microbatches


class Lost(nn.Module):
    """A loss of the tokens' losses [b, s]."""

    def __init__(self, lose: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.table, self.head, self.lose = nn.Embedding(67, 16), nn.Linear(16, 67), lose

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        logits = self.head(self.table(idx)).transpose(1, 2)
        return self.lose(functional.cross_entropy(logits, targets, reduction="none"))


def fixed(x: Tensor) -> Tensor:
    assert len(x) == 2, "for two"
    return x.mean()


@pytest.mark.parametrize(
    ("lose", "said"),
    [
        (lambda x: x.mean(), ""),
        (lambda x: x.mean(1).amax(0), "two microbatches at once have the loss "),
        (lambda x: x[:1].mean(), "two microbatches at once have the loss "),
        (lambda x: x.mean() * len(x), "two microbatches at once have the loss "),
        (lambda x: x.mean().exp(), "two microbatches at once have the loss "),
        (lambda x: (x.mean(1) * x.mean(1).softmax(0)).sum(), "two microbatches at once have the loss "),
        (lambda x: (x - x.mean(0)).square().mean(), "two microbatches at once have the loss "),
        (fixed, "the plain model does not accept two at once (AssertionError: for two)"),
    ],
    ids=["mean", "largest", "first", "grown", "perplexity", "contrast", "batch statistics", "fixed"],
)
def test_a_loss_that_is_not_the_mean_over_microbatches_is_said(lose: Callable[[Tensor], Tensor], said: str) -> None:
    ids = torch.randint(0, 67, (2, 8))
    examples = {"idx": ids, "targets": ids}
    program = autoptd.compile(Lost(lose), (1, 1, 2), example_inputs=examples, num_microbatches=2)
    report = program.verify()
    assert report.passed, report
    assert [said in note for note in report.notes] == [True] * bool(said)


def test_microbatches_that_labels_weigh_are_joined_as_they_weigh() -> None:
    """Of unequal counts, of which one has none."""
    program = autoptd.compile(gpt(), (1, 1, 1), microbatch_size=2, num_microbatches=4)
    ids = torch.randint(0, 67, (8, 16))
    targets = ids.clone()
    targets[0, :9] = targets[2:4] = -100
    report = program.verify(batch={"idx": ids, "targets": targets})
    assert report.passed, report
    assert report.notes == ()


def test_a_model_that_takes_no_float64_is_named_with_its_line() -> None:
    def lose(x: Tensor) -> Tensor:
        if x.dtype is not torch.float32:
            raise RuntimeError("not in float32")
        return x.mean()

    ids = torch.randint(0, 67, (2, 8))
    examples = {"idx": ids, "targets": ids}
    program = autoptd.compile(Lost(lose), (1, 1, 1), example_inputs=examples, num_microbatches=2)
    with pytest.raises(
        ValueError,
        match=r"the plain model fails with RuntimeError: not in float32, at .*test_step\.py:\d+: .*dtype='model'",
    ):
        program.verify()
    report = program.verify(dtype="model")
    assert report.passed, report
    assert "in its own dtype" in str(report)
    with pytest.raises(ValueError, match="dtype is 'half'; expected 'float64', or 'model'"):
        program.verify(dtype="half")


class Angles(nn.Module):
    """Makes its table anew where the dtype of the activations is another one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.wte = nn.Linear(8, 8), nn.Embedding(16, 8)
        self.table = self.make_table(torch.float32)

    def make_table(self, dtype: torch.dtype) -> Tensor:
        return torch.outer(torch.arange(4, dtype=dtype), 0.3 ** torch.arange(8, dtype=dtype)).cos()

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        x = self.wte(idx)
        if self.table.dtype != x.dtype:
            self.table = self.make_table(x.dtype)
        return functional.cross_entropy((self.inner(x) * self.table).flatten(0, 1), targets.flatten())


def test_a_table_that_the_model_makes_anew_is_named_and_no_fault() -> None:
    ids = torch.randint(0, 8, (1, 4))
    model = Angles()
    program = autoptd.compile(model, (2, 1, 1), example_inputs={"idx": ids, "targets": ids}, num_microbatches=2)
    report = program.verify()
    assert report.passed, report
    assert re.search(r"note: the model makes [\w.]+ anew for this dtype", str(report))
    assert model.table.dtype is torch.float32
