"""Several input shapes of one model: one set of parameters, and for each shape what a program of it alone computes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autoptd
from autoptd.check.program import ProgramError
from autoptd.cli.main import main
from autoptd.compiled import CompiledProgram
from autoptd.runtime.program.schedule import COMPUTING, Kind
from tests.parity import (
    Batch,
    Run,
    Training,
    compare,
    compare_states,
    loss_of,
    split_batch,
    train_compiled,
    train_plain,
)
from tests.plain_models import HUGGING_FACE, LENGTH, VOCABULARY, PlainGPT
from tests.ranks import run_ranks
from tests.steps import train_step

MICROBATCHES = 2
LONG, SHORT = (1, LENGTH), (2, 10)  # sequences and tokens of a microbatch
MESHES = [(1, 1, 1), (2, 2, 1), (1, 2, 2)]
IGNORED = -1  # PlainGPT's


def make_example(shape: tuple[int, int], names: tuple[str, str] = ("idx", "targets")) -> dict[str, Tensor]:
    return {name: torch.zeros(shape, dtype=torch.long) for name in names}


def make_batch(
    shape: tuple[int, int], replicas: int = 1, seed: int = 0, names: tuple[str, str] = ("idx", "targets")
) -> dict[str, Tensor]:
    """A batch of all replicas."""
    generator = torch.Generator().manual_seed(seed)
    size = (shape[0] * MICROBATCHES * replicas, shape[1])
    return {name: torch.randint(0, VOCABULARY, size, generator=generator) for name in names}


def compile_shapes(model: nn.Module, mesh: tuple[int, int, int], *shapes: tuple[int, int]) -> CompiledProgram:
    examples = [make_example(shape) for shape in shapes]
    return autoptd.compile(model, mesh, example_inputs=examples, num_microbatches=MICROBATCHES, num_model_chunks=1)


def make_model(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return PlainGPT(**options).double()


def evaluator(*batches: Batch) -> Callable[[Any], list[float]]:
    """What gives the losses of `batches` without gradients, on every rank."""

    def evaluate(parallel: Any) -> list[float]:
        replicas, at = parallel._connection.rank.mesh.data, parallel.coordinates.data
        parallel.eval()
        with torch.no_grad():
            return [loss_of(parallel(**split_batch(batch, replicas)[at])).item() for batch in batches]

    return evaluate


def same_bits(found: Run, step: int, expected: Run, other: int) -> bool:
    one, two = found.steps[step], expected.steps[other]
    assert one.gradients.keys() == two.gradients.keys()
    equal = all(torch.equal(gradient, two.gradients[name]) for name, gradient in one.gradients.items())
    return equal and torch.equal(one.loss, two.loss)


@pytest.mark.parametrize("flash", [True, False], ids=["fused", "masks"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_training_on_both_is_the_plain_models(mesh: tuple[int, int, int], flash: bool) -> None:
    """Labels count over the whole step, in either shape; evaluated at both after it."""
    model = make_model(flash=flash)
    program = compile_shapes(model, mesh, LONG, SHORT)
    batches = [make_batch(shape, mesh[2], seed) for seed, shape in enumerate([LONG, SHORT, SHORT, LONG])]
    for batch in batches:
        batch["targets"][0, 2:] = IGNORED
    found = train_compiled(program, batches[:3], Training(lr=0.1), probe=evaluator(batches[1], batches[3]))
    expected = train_plain(model, batches[:3], 1, Training(lr=0.1))
    for own, plain in zip(found.steps, expected.steps, strict=True):
        compare(own, plain, loss_tolerance=1e-12)
    compare_states(found.state, expected.state, 1e-12)
    model.load_state_dict(expected.state)
    with torch.no_grad():
        losses = [loss_of(model(**batch)).item() for batch in (batches[1], batches[3])]
    for own_losses in found.probes:
        assert own_losses == pytest.approx(losses, rel=1e-12)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_shape_has_the_bits_of_its_own_program(mesh: tuple[int, int, int]) -> None:
    model = make_model(dropout=0.1)
    batches = [make_batch(SHORT, mesh[2]), make_batch(LONG, mesh[2])]
    both = compile_shapes(model, mesh, LONG, SHORT)
    alone = compile_shapes(model, mesh, SHORT)
    assert [s.parameters for s in both.manifest.stages] == [s.parameters for s in alone.manifest.stages]
    found = train_compiled(both, batches)
    assert same_bits(found, 0, train_compiled(alone, batches[:1]), 0)
    first = train_compiled(compile_shapes(model, mesh, LONG), [batches[1], batches[1]])
    assert same_bits(found, 1, first, 1)  # the second call of both


def test_dropout_is_the_same_on_every_mesh() -> None:
    model = make_model(dropout=0.1)
    runs = []
    for mesh in [(1, 1, 1), (2, 2, 1)]:
        program = compile_shapes(model, mesh, LONG, SHORT)
        batches = [make_batch(shape, seed=seed) for seed, shape in enumerate([LONG, SHORT, LONG])]
        runs.append(train_compiled(program, batches, Training(lr=0.1)))
    for one, other in zip(runs[0].steps, runs[1].steps, strict=True):
        compare(other, one, loss_tolerance=1e-12)
    plain = train_plain(model.eval(), batches, 1)
    assert runs[0].steps[1].loss.item() != pytest.approx(plain.steps[1].loss.item(), rel=1e-3)


def test_rotary_positions_and_sharded_optimizer() -> None:
    """Llama, whose tables of angles are constants of each length; ZeRO's first stage steps the same bits."""
    torch.manual_seed(0)
    model = HUGGING_FACE["llama"]().double()
    names = ("input_ids", "labels")
    program = autoptd.compile(
        model,
        (1, 2, 2),
        example_inputs=[make_example(shape, names) for shape in (LONG, SHORT)],
        num_microbatches=MICROBATCHES,
    )
    batches = [make_batch(shape, 2, seed, names) for seed, shape in enumerate([SHORT, LONG, SHORT])]

    def work(rank: int, sharded: bool) -> tuple[list[float], dict[str, Tensor]]:
        parallel = program.bind()
        optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.01)
        if sharded:
            parallel.shard_optimizer(optimizer)
        own = [split_batch(batch, 2)[parallel.coordinates.data] for batch in batches]
        losses = [train_step(parallel, batch, optimizer).item() for batch in own]
        return losses, parallel.full_state_dict()

    whole, divided = run_ranks(work, 4, False), run_ranks(work, 4, True)
    assert whole[0][0] == divided[0][0]
    assert all(torch.equal(value, divided[0][1][name]) for name, value in whole[0][1].items())
    report = program.verify()
    assert report.passed, report


class Scaled(nn.Module):
    """Each length has its own constant of a buffer, and a tensor of the forward's code."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)
        self.register_buffer("table", torch.linspace(1, 2, LENGTH).double())

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        length = idx.shape[1]
        scale = self.table[:length].square().unsqueeze(1) + 1
        x = self.wte(idx) * scale + torch.tensor([1.0 / length] * 8, dtype=torch.float64)
        return functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 2, 1)], ids=str)
def test_loaded_buffers_change_the_constants_of_all(mesh: tuple[int, int, int]) -> None:
    model = Scaled().double()
    program = compile_shapes(model, mesh, LONG, SHORT)
    batches = [make_batch(LONG), make_batch(SHORT)]
    other = Scaled().double()
    with torch.no_grad():
        other.table.mul_(-3)

    def evaluate(parallel: Any) -> tuple[list[float], list[float]]:
        before = evaluator(*batches)(parallel)
        parallel.load_full_state_dict(other.state_dict())
        return before, evaluator(*batches)(parallel)

    expected = [[plain(**batch).item() for batch in batches] for plain in (model, other)]
    for found in train_compiled(program, [], probe=evaluate).probes:
        assert found[0] == pytest.approx(expected[0], rel=1e-12)
        assert found[1] == pytest.approx(expected[1], rel=1e-12)


# Saved, loaded, checked


def test_a_saved_program_has_all_shapes(tmp_path: Path) -> None:
    model = make_model(flash=False)
    program = compile_shapes(model, (2, 2, 1), LONG, SHORT)
    assert "2 input shapes, the first here: microbatches of idx [1, 16], targets [1, 16]; or idx [2, 10]" in str(
        program
    )
    program.save(tmp_path)
    assert (tmp_path / "shape_1" / "program_01.py").read_text() == program.shapes[1].rank(2).code
    loaded = autoptd.load(tmp_path)
    assert [other.texts for other in loaded.shapes] == [other.texts for other in program.shapes]
    assert [other.manifest for other in loaded.shapes] == [other.manifest for other in program.shapes]
    report = loaded.verify(model=model)
    assert report.passed, report
    assert [one.shape for one in (report, *report.further)] == [
        "idx [1, 16], targets [1, 16]",
        "idx [2, 10], targets [2, 10]",
    ]
    short = loaded.verify(model=model, batch=make_batch(SHORT))
    assert short.passed
    assert short.further == ()
    assert short.shape.startswith("idx [2, 10]")
    compile_shapes(model, (2, 2, 1), LONG).save(tmp_path)
    assert not (tmp_path / "shape_1").exists()


def test_the_command_verifies_every_shape(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compile_shapes(PlainGPT(), (1, 2, 1), LONG, SHORT).save(tmp_path)
    words = ["verify", str(tmp_path), "--model", "tests.plain_models:PlainGPT"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["passed"]
    assert [one["shape"][:11] for one in (found, *found["further"])] == ["idx [1, 16]", "idx [2, 10]"]
    assert main(words) == 0
    assert capsys.readouterr().out.count("verify passed: 2 ranks") == 2


def test_a_missing_shape_is_refused(tmp_path: Path) -> None:
    compile_shapes(make_model(), (1, 1, 1), LONG, SHORT).save(tmp_path)
    (tmp_path / "shape_1" / "manifest.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"shape_1.manifest\.json"):
        autoptd.load(tmp_path)


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


def test_an_edited_text_of_any_shape_is_judged(tmp_path: Path) -> None:
    model = make_model()
    compile_shapes(model, (2, 1, 1), LONG, SHORT).save(tmp_path)
    text = tmp_path / "shape_1" / "program_00.py"
    edit(text, "kernels.layer_norm(", "kernels.layer_norm( ")  # nothing
    assert autoptd.load(tmp_path).verify(model=model).passed
    saved = text.read_text()
    edit(text, "collectives.reduce_from_tensor(rank, ", "torch.clone(")
    text.write_text("import torch\n" + text.read_text())
    with pytest.raises(
        ProgramError, match=r"^input shape 1 \(idx \[2, 10\], targets \[2, 10\]\): .*shape_1/program_00"
    ):
        autoptd.load(tmp_path)
    text.write_text(saved)
    edit(tmp_path / "shape_1" / "manifest.json", '"num_microbatches": 2', '"num_microbatches": 4')
    edit(text, "0F0 0B0 0F1 0B1", "(0F0 0B0) x4 +1")
    with pytest.raises(ProgramError, match="its num_microbatches is 4, the first shape's 2"):
        autoptd.load(tmp_path)


# What is refused


def test_an_unknown_shape_names_the_known() -> None:
    parallel = compile_shapes(make_model(), (1, 1, 1), LONG, SHORT).bind()
    with pytest.raises(ValueError, match="the batch has") as caught:
        parallel(**make_batch((1, 12)))
    assert str(caught.value) == (
        "the batch has idx [2, 12], targets [2, 12]: the program was compiled for 2 other shapes, idx [2, 16], targets "
        "[2, 16]; idx [4, 10], targets [4, 10]. Give a batch of one of these, or compile for this one too: "
        "example_inputs takes a list of examples, one microbatch each"
    )
    mixed = {"idx": make_batch(LONG)["idx"], "targets": make_batch(SHORT)["targets"]}
    with pytest.raises(ValueError, match=r"the batch has idx \[2, 16\], targets \[4, 10\]: "):
        parallel(**mixed)
    with pytest.raises(ValueError, match=r"idx is torch\.int32, expected torch\.int64"):
        parallel(**{name: value.to(torch.int32) for name, value in make_batch(SHORT).items()})
    with pytest.raises(TypeError, match="argument targets is missing"):
        parallel(make_batch(SHORT)["idx"])


@pytest.mark.parametrize("mesh", [(1, 2, 1), (2, 1, 1), (1, 1, 2)], ids=str)
def test_ranks_with_different_shapes_are_refused_on_all(mesh: tuple[int, int, int]) -> None:
    program = compile_shapes(make_model(), mesh, LONG, SHORT)

    def work(rank: int) -> tuple[str, float]:
        parallel = program.bind()
        with pytest.raises(ValueError, match="batches of one step") as caught:
            parallel(**make_batch(SHORT if rank else LONG))
        return str(caught.value), loss_of(parallel(**make_batch(SHORT))).item()

    (text, loss), other = run_ranks(work, 2)
    assert (text, loss) == other
    assert "rank 1 was given idx [4, 10], targets [4, 10], where most have idx [2, 16], targets [2, 16]" in text


class Sometimes(PlainGPT):
    """Long sequences go through a layer more, in the second half of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(32, VOCABULARY)

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
        logits, loss = super().forward(idx, targets)
        assert loss is not None
        return loss + self.more(logits[..., :32]).square().mean() if idx.shape[1] > 12 else loss


class Windowed(PlainGPT):
    """Attention of the last 12 tokens: with fewer it is the causal one."""

    def __init__(self) -> None:
        super().__init__(flash=False)
        for block in self.transformer["h"].children():
            attention = block.get_submodule("attn")
            bias = attention.get_buffer("bias")
            attention.register_buffer("bias", bias * torch.triu(torch.ones_like(bias), -11))


def refused(match: str, model: nn.Module, mesh: tuple[int, int, int], examples: list[Any], **options: Any) -> None:
    with pytest.raises(ValueError, match=match):
        autoptd.compile(model, mesh, example_inputs=examples, num_microbatches=MICROBATCHES, **options)


def test_shapes_that_cannot_share_are_refused() -> None:
    long, short = make_example(LONG), make_example(SHORT)
    two = (1, 2, 1)
    refused(
        r"example_inputs\[1\] \(idx \[1, 16\], targets \[1, 16\]\): its more.weight is in stages \[1\], the first "
        r"shape's in \[0\]; all shapes train the same parameters",
        Sometimes(),
        two,
        [short, long],
        num_model_chunks=1,
    )
    longer = make_example((1, LENGTH + 1))
    masked = make_model(flash=False)
    refused(r"example_inputs\[1\] \(idx \[1, 17\].*cannot be traced", masked, two, [long, longer])
    refused(
        r"\[1\] \(idx \[1, 16\]\): the model returned .* which has no scalar loss",
        make_model(),
        two,
        [long, {"idx": long["idx"]}],
    )
    narrow = {**short, "idx": short["idx"].int()}
    refused("inputs are idx of torch.int32 .* shape's idx of torch.int64", make_model(), two, [long, narrow])
    with pytest.raises(ValueError, match=r"example_inputs\[1\].*example_inputs is a tensor for the inputs"):
        autoptd.compile(make_model(), two, example_inputs=[long, long["idx"]])


def test_a_mask_that_only_long_sequences_need_is_given_first() -> None:
    """Where the first shape's program has it nowhere, the first pipeline rank keeps it, and no other."""
    refused(
        "pipeline rank 1 reads the buffer transformer.h.1.attn.bias.*: give this shape first",
        Windowed(),
        (1, 2, 1),
        [make_example(SHORT), make_example(LONG)],
        num_model_chunks=1,
    )
    model = Windowed().double()
    report = compile_shapes(model, (1, 2, 1), LONG, SHORT).verify()
    assert report.passed, report
    batch = make_batch(LONG)
    (found,) = train_compiled(compile_shapes(model, (1, 1, 1), SHORT, LONG), [batch]).steps
    (plain,) = train_plain(model, [batch], MICROBATCHES).steps
    compare(found, plain, loss_tolerance=1e-12)


def test_values_that_any_shape_was_proved_of_cannot_be_loaded() -> None:
    """The short sequences alone find the window causal."""
    program = compile_shapes(Windowed().double(), (1, 1, 1), LONG, SHORT)
    parallel = program.bind()
    state = {name: value * 2 for name, value in parallel.full_state_dict().items()}
    with pytest.raises(ValueError, match=r"buffer transformer\.h\.0\.attn\.bias is given other values"):
        parallel.load_full_state_dict(state)


# Around it


def test_positions_given_once_stay_whole() -> None:
    """An input of one row, which microbatches of one sequence would divide, is whole in both."""

    class Placed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wte, self.wpe = nn.Embedding(VOCABULARY, 8), nn.Embedding(LENGTH, 8)
            self.head = nn.Linear(8, VOCABULARY)

        def forward(self, idx: Tensor, places: Tensor, targets: Tensor) -> Tensor:
            x = self.head(self.wte(idx) + self.wpe(places))
            return functional.cross_entropy(x.flatten(0, 1), targets.flatten())

    examples = [
        {**make_example(shape), "places": torch.zeros(1, shape[1], dtype=torch.long)} for shape in (SHORT, LONG)
    ]
    program = autoptd.compile(Placed().double(), (1, 1, 1), example_inputs=examples, num_microbatches=2)
    assert [[i.batch_dim for i in one.manifest.inputs] for one in program.shapes] == [[0, None, 0]] * 2
    report = program.verify()
    assert report.passed, report


def test_numbers_are_of_the_last_calls_shape() -> None:
    program = compile_shapes(make_model(), (1, 1, 1), LONG, SHORT)
    parallel, plain = program.bind(), program.bind()
    for shape in (LONG, SHORT, LONG):
        batch = make_batch(shape)
        loss = loss_of(parallel(**batch))
        assert torch.equal(loss, loss_of(plain(**batch)))
        step = parallel.last_step
        assert step.loss == loss.item()
        assert step.tokens_per_second is not None
        assert step.tokens_per_second * step.step_seconds == pytest.approx(MICROBATCHES * shape[0] * shape[1])


def test_a_checkpoint_of_one_shape_is_loaded_for_two(tmp_path: Path) -> None:
    model = make_model(dropout=0.1)
    one, two = compile_shapes(model, (1, 2, 1), LONG), compile_shapes(model, (2, 1, 1), SHORT, LONG)
    batches = [make_batch(LONG, seed=seed) for seed in range(3)]

    def train(program: CompiledProgram, load: bool) -> Callable[[int], tuple[float, Mapping[str, Tensor]]]:
        def work(rank: int) -> tuple[float, Mapping[str, Tensor]]:
            parallel = program.bind()
            optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.01)
            if load:
                parallel.load_checkpoint(tmp_path, optimizer)
            for batch in batches[2 * load :]:
                loss = train_step(parallel, batch, optimizer).item()
                if not load and batch is batches[1]:
                    parallel.save_checkpoint(tmp_path, optimizer)
            return loss, parallel.full_state_dict()

        return work

    (loss, state), _ = run_ranks(train(one, False), 2)
    (again, found), _ = run_ranks(train(two, True), 2)
    assert again == pytest.approx(loss, rel=1e-12)
    compare_states(found, state, 1e-11)


def test_a_model_without_weights_begins_alike() -> None:
    with torch.device("meta"):
        model = Scaled().double()
    model.table = torch.linspace(1, 2, LENGTH).double()
    one, two = (compile_shapes(model, (1, 1, 1), *shapes).bind() for shapes in ([LONG], [LONG, SHORT]))
    states = one.full_state_dict(), two.full_state_dict()
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    assert loss_of(two(**make_batch(SHORT))).isfinite()


def test_a_planned_mesh_is_for_all_shapes() -> None:
    options: Any = {"world_size": 2, "global_batch": 4, "cluster": "dgx-a100"}
    examples = [make_example(LONG), make_example(SHORT)]
    program = autoptd.compile(PlainGPT(), "auto", example_inputs=examples, **options)
    assert [one.manifest.inputs[0].shape for one in program.shapes] == [LONG, SHORT]
    (best, *_) = autoptd.plan(PlainGPT(), example_inputs=examples, **options)
    assert best.mesh == program.mesh


def test_a_list_of_tensors_is_one_microbatch() -> None:
    example = list(make_example(LONG).values())
    program = autoptd.compile(make_model(), (1, 1, 1), example_inputs=example, num_microbatches=1)
    assert len(program.shapes) == 1
    assert len(autoptd.compile(make_model(), (1, 1, 1), example_inputs=[tuple(example)]).shapes) == 1


def test_a_step_is_measured_in_its_own_shape() -> None:
    """What a backward hides counts to the step that it is in, whichever shape was bound last."""
    program = compile_shapes(make_model(), (2, 1, 1), LONG, SHORT)

    def work(rank: int) -> list[set[Kind | str]]:
        parallel = program.bind("cpu")
        found = []
        for shape in (LONG, SHORT, LONG):
            loss_of(parallel(**make_batch(shape))).backward()
            found.append({span[0] for span in parallel._runner.shape.measured.spans})
        return found

    for kinds in run_ranks(work, 2):
        assert all({*COMPUTING, "tensor", "products"} <= own for own in kinds)
