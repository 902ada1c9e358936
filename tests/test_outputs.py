"""What a call returns besides its loss: the plain model's values, on demand, and in few numbers."""

from __future__ import annotations

import copy
import pickle
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoptd
from autoptd.check.program import ProgramError
from autoptd.compiled import CompiledProgram
from autoptd.runtime.comm.connection import run_threads
from autoptd.runtime.engine.executor import ShapeFunctions
from autoptd.runtime.engine.lazy_output import LazyOutput
from autoptd.runtime.module.parallel import Parallel
from autoptd.text.reader import read_texts
from autoptd.verification.gradients import compare_outputs
from samples.gpt import GPT, GPTConfig
from samples.huggingface import make_gpt2, make_llama
from tests.counting import elements, sent_elements
from tests.models import SMALL
from tests.ranks import run_ranks
from tests.steps import train_step

ODD = GPTConfig(vocab_size=41, block_size=8, n_layer=4, n_head=2, n_embd=8)
Mesh = tuple[int, int, int]


@dataclass
class Heads:
    """What a model with several heads returns."""

    loss: Tensor
    hidden: list[Tensor]
    positive: Tensor
    balance: Tensor
    none: Tensor | None
    ids: Tensor


class Several(nn.Module):
    """A model that returns values of all kinds, from every layer on."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layers = nn.Embedding(41, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.frozen = nn.Linear(8, 6).requires_grad_(False)

    def forward(self, ids: Tensor) -> Heads:
        x, hidden = self.table(ids), []
        for layer in self.layers:
            x = x + layer(x).tanh()
            hidden.append(x)
        x = x.clone()
        hidden.append(x)
        x += 1  # what was handed out is written later
        logits = x @ self.table.weight.T
        loss = F.cross_entropy(logits.flatten(0, 1), ids.flatten())
        # In another order than stages have them.
        return Heads(loss, hidden[::-1], logits > 0, self.frozen(x).mean(), None, ids)


def make_hugging_face(make: Callable[[GPTConfig], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    model = make(ODD).double()
    model.config.output_hidden_states = True  # type: ignore[union-attr]
    return model


def run_all(program: CompiledProgram, work: Callable[[Parallel], Any]) -> list[Any]:
    """What `work` gives on every rank of the program, a thread each."""
    texts = read_texts(program.texts, program.manifest)
    tensors = {} if program.model is None else {**program.model.state_dict(), **program.buffers}

    def run(connection: Any) -> Any:
        text = texts[connection.rank.coordinates.pipeline]
        parallel = Parallel(connection, ShapeFunctions(program.manifest, text, tensors))
        return work(parallel.eval())

    return run_threads(program.manifest, run)


def count_elements(parallel: Parallel) -> Counter[str]:
    """The elements that this rank has sent, by group and kind."""
    found = sent_elements(parallel)
    for axis in ("tensor", "pipeline", "data"):
        group = parallel._connection.rank.group(axis)
        found.update({f"{axis} {kind}": count for kind, count in elements(group).items()})
    return found


MESHES = [(2, 2, 2), *(pytest.param(m, marks=pytest.mark.slow) for m in [(1, 1, 1), (2, 1, 2), (1, 4, 1)])]


@pytest.mark.parametrize("mesh", MESHES)
def test_outputs_are_the_plain_models(mesh: Mesh, tmp_path: Path) -> None:
    """Of every stage, every rank and every replica, in a saved program too."""
    torch.manual_seed(0)
    model = Several().double()
    example = {"ids": torch.ones(2, 8, dtype=torch.int64)}
    program = autoptd.compile(model, mesh, example_inputs=example, num_microbatches=4, outputs=True)
    report = program.verify()
    assert report.passed
    assert len(report.output_errors) == 8
    assert "8 outputs, worst " in str(report)
    found = [r for stage in program.manifest.stages for r in stage.outputs]
    assert {r.name for r in found if r.batch_dim is None} == {"balance"}
    if mesh[1] > 1:
        assert "hidden.4" not in [result.name for result in program.manifest.stages[-1].outputs]
    program.save(tmp_path)
    loaded = autoptd.load(tmp_path)
    assert loaded.manifest == program.manifest
    assert loaded.verify(model=model).passed


@pytest.mark.parametrize(
    ("make", "mesh", "options"),
    [
        (make_gpt2, (2, 2, 1), {"recompute": "full", "microbatch_size": 2}),
        pytest.param(make_llama, (2, 2, 1), {"microbatch_size": 1}, marks=pytest.mark.slow),
        pytest.param(make_gpt2, (1, 1, 1), {"layout": "bsh"}, marks=pytest.mark.slow),
    ],
)
def test_outputs_of_transformers(make: Any, mesh: Mesh, options: dict[str, Any]) -> None:
    asked = ("logits", "hidden_states")
    model = make_hugging_face(make)
    program = autoptd.compile(model, mesh, outputs=asked, num_microbatches=4, **options)
    report = program.verify()
    assert report.passed
    assert len(report.output_errors) == ODD.n_layer + 2
    assert len(model(torch.ones(1, 8).long()).hidden_states) == ODD.n_layer + 1  # its hooks are as they were


def test_reading_sends_what_is_read() -> None:
    """A call sends nothing of its outputs; log-probabilities are 1/100 of the logits' bytes at most, of GPT-2's."""
    config = GPTConfig(vocab_size=50_257, block_size=4, n_layer=1, n_head=2, n_embd=4)
    torch.manual_seed(0)
    model = GPT(config)
    asked, plain = (
        autoptd.compile(model, (2, 1, 1), microbatch_size=1, num_microbatches=2, outputs=outputs)
        for outputs in (("0",), ())
    )
    ids = torch.randint(0, config.vocab_size, (2, 4))
    logits, expected = model(ids, ids)
    labels = F.pad(ids[:, 1:], (0, 1), value=-100)

    def call(parallel: Parallel) -> Counter[str]:
        with torch.no_grad():
            assert parallel(ids, ids)[0] is None
        return count_elements(parallel)

    def read(parallel: Parallel) -> list[Counter[str]]:
        with torch.no_grad():
            output, loss = parallel(ids, ids)
        counts = [count_elements(parallel)]
        torch.testing.assert_close(loss, expected)
        assert str(output) == "LazyOutput(0, [2, 4, 50257], torch.float32)"
        counts.append(count_elements(parallel))
        found = output.log_prob(labels)
        own = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(2, 4)
        torch.testing.assert_close(found, -own)
        counts.append(count_elements(parallel))
        assert torch.equal(output.argmax(-1), logits.argmax(-1))
        assert torch.equal(torch.argmax(output, dim=2, keepdim=True), logits.argmax(-1, keepdim=True))
        counts.append(count_elements(parallel))
        torch.testing.assert_close(output.full(), logits)
        counts.append(count_elements(parallel))
        torch.testing.assert_close(output.softmax(-1) + 0, logits.softmax(-1))
        assert output[0, 0].tolist() == output.numpy()[0, 0].tolist()
        for whole in (
            copy.deepcopy(output),
            pickle.loads(pickle.dumps(output)),
            torch.utils.dlpack.from_dlpack(output),
        ):
            assert torch.equal(whole, output.full())
        counts.append(count_elements(parallel))
        return counts

    (silent, _), results = run_all(plain, call), run_all(asked, read)
    for called, shown, weighed, chosen, whole, kept in results:
        assert silent == called == shown
        assert (weighed - shown).total() == 3 * labels.numel() <= logits.numel() / 100
        assert (chosen - weighed).total() == 2 * 3 * labels.numel()
        assert (whole - chosen).total() == logits.numel() / 2 + 4  # with the padding
        assert kept == whole


def test_nothing_asked_changes_nothing() -> None:
    """Asked for logits, a stage returns one value more, and sends no other message."""
    model = GPT(SMALL)
    asked, plain = (
        autoptd.compile(model, (2, 2, 1), num_microbatches=4, num_model_chunks=1, outputs=outputs)
        for outputs in (("0",), ())
    )
    first, other = (program.texts[0].partition("SCHEDULE")[2] for program in (asked, plain))
    assert first == other
    assert [s.sends for s in asked.manifest.stages] == [s.sends for s in plain.manifest.stages]
    assert "output" not in plain.texts[1]
    assert not any(stage.outputs for stage in plain.manifest.stages)
    more, less = (program.simulate("dgx-a100").memory_bytes for program in (asked, plain))
    assert [one - other for one, other in zip(more, less, strict=True)] == [0, 4 * 8 * SMALL.vocab_size / 2 * 4]


def test_lists_have_the_models_order() -> None:
    torch.manual_seed(0)
    model, ids = Several().double(), torch.randint(0, 41, (8, 8))
    example = {"ids": torch.ones(2, 8, dtype=torch.int64)}
    program = autoptd.compile(model, (1, 2, 1), example_inputs=example, num_microbatches=4, outputs=True)

    def read(parallel: Parallel) -> list[Tensor]:
        with torch.no_grad():
            return [x.full() for x in parallel(ids=ids).hidden]

    for found in run_all(program, read):
        torch.testing.assert_close(found, [x.detach() for x in model(ids).hidden])


def test_infinite_outputs_are_compared() -> None:
    class Masked(GPT):
        def forward(self, idx: Tensor, targets: Tensor) -> Any:  # type: ignore[override]
            logits, loss = super().forward(idx, targets)
            return loss, logits.masked_fill(idx[..., None] > 5, -torch.inf)

    torch.manual_seed(0)
    program = autoptd.compile(Masked(SMALL), (2, 1, 1), num_microbatches=2, outputs=("1",))
    report = program.verify()
    assert report.passed, report
    wrong = compare_outputs([{("1",): torch.tensor([0.0, -torch.inf])}], [{("1",): torch.tensor([-torch.inf, 1.0])}])
    assert wrong == {"output 1": torch.inf}
    near = compare_outputs([{("1",): torch.tensor([1.5, -torch.inf])}], [{("1",): torch.tensor([1.0, -torch.inf])}])
    assert near == {"output 1": 0.5}


def test_outputs_have_no_gradient_in_silence() -> None:
    torch.manual_seed(0)
    model = GPT(SMALL).double()
    program = autoptd.compile(model, (1, 1, 1), num_microbatches=2, outputs=("0",))
    parallel = program.bind()
    ids = torch.randint(0, SMALL.vocab_size, (2, SMALL.block_size))
    labels = F.pad(ids[:, 1:], (0, 1), value=-100)
    for use in (
        lambda x: x.mean(),
        lambda x: x.full().mean(),
        lambda x: x.log_prob(labels).sum(),
        lambda x: F.cross_entropy(x.flatten(0, 1), ids.flatten()),
    ):
        output, loss = parallel(ids, ids)
        with pytest.raises(RuntimeError, match=r"its gradient ends there: only the loss has one.*loss_fn"):
            (loss + use(output)).backward()
    output, loss = parallel(ids, ids)
    (loss + output.detach().mean() + 0 * (output.argmax(-1) == ids).sum()).backward()
    assert all(p.grad is not None for p in parallel.parameters())
    with torch.no_grad():
        output, _ = parallel(ids, ids)
    assert not output.requires_grad
    with pytest.raises(ValueError, match=r"was given classes \[2, 7\].*expected \[2, 8\] of torch.int64"):
        output.log_prob(ids[:, 1:])


def test_a_loss_of_the_users_own_comes_before_the_models_output() -> None:
    """DPO's log-probabilities, of which the model makes a sequence's, and a reference's from an evaluation."""
    torch.manual_seed(0)
    model = make_hugging_face(make_gpt2)
    model.config.output_hidden_states = False  # type: ignore[union-attr]

    def loss_fn(output: Any, labels: Tensor) -> Tensor:
        return F.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    example = {"input_ids": torch.ones(1, 8).long(), "labels": torch.ones(1, 8).long()}
    given: Any = {"example_inputs": example, "loss_fn": loss_fn, "num_microbatches": 2}
    ids = torch.randint(0, 41, (2, 8))
    parallel = autoptd.compile(model, (1, 1, 1), outputs=("logits",), **given).bind()
    loss, output = parallel(input_ids=ids, labels=ids)
    assert type(output).__name__ == "CausalLMOutputWithCrossAttentions"
    assert isinstance(output.logits, LazyOutput)
    torch.testing.assert_close(output.logits.detach() + 0, model.eval()(ids).logits)
    torch.testing.assert_close(loss, loss_fn(model(ids), ids))
    assert autoptd.compile(model, (1, 1, 1), **given).bind()(input_ids=ids, labels=ids).shape == ()
    stepped = train_step(parallel, {"input_ids": ids, "labels": ids}, torch.optim.SGD(parallel.parameters()))
    torch.testing.assert_close(stepped, loss.detach())

    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.table(x)  # type: ignore[no-any-return]

    bare = Bare()
    tokens = torch.arange(4).view(2, 2)
    own: Any = {"loss_fn": lambda output, scale: (output * scale).mean(), "outputs": True}
    inputs = {"x": tokens, "scale": torch.ones(2, 2, 1)}
    _, values = autoptd.compile(bare, (1, 1, 1), example_inputs=inputs, num_microbatches=1, **own).bind()(**inputs)
    torch.testing.assert_close(values + 0, bare(tokens))


def test_wrong_names_and_edits_are_refused() -> None:
    model = GPT(SMALL)
    for asked, message in (
        (("logits",), r"outputs= has 'logits', and the model returned tuple of .*expected the name of a field"),
        (("1",), r"outputs= has '1'"),
    ):
        with pytest.raises(ValueError, match=message):
            autoptd.compile(model, (1, 1, 1), outputs=asked)
    with pytest.raises(ValueError, match=r"outputs= has 'l', .*expected the name of a field"):
        autoptd.compile(model, (1, 1, 1), outputs="logits")
    program = autoptd.compile(model, (2, 1, 1), num_microbatches=1, outputs=("0",))
    (name,) = re.findall(r"(\w+), +# f32\[1, 8, 40/2\] +output 0", program.texts[0])
    edited = program.texts[0].replace(f"        {name},", f"        {name} * 2,")
    assert edited != program.texts[0]
    report = replace(program, texts=(edited,)).verify()
    assert not report.passed
    assert report.worst[1] < 1e-12
    assert report.output_errors["output 0"] == pytest.approx(1.0)
    for text, message in (
        (program.texts[0].replace(f"        {name},", f"        {name}[:, 1:],"), r"float32\[1, 7, 20\]; the output 0"),
        (
            program.texts[0].replace(f"        {name},", ""),
            r"returns 1 values .*; expected float32\[\], the output 0 is float32\[1, 8, 20\]",
        ),
        (
            program.texts[0].replace(f"        {name},", f"        {name}, {name},"),
            r"returns 3 values .*; expected float32\[\], the output 0 is",
        ),
    ):
        with pytest.raises(ProgramError, match=message):
            replace(program, texts=(text,)).check()
    (stage,) = program.manifest.stages
    whole = replace(stage.outputs[0], shape=(1, 8, 20), placement=type(stage.outputs[0].placement)())
    manifest = replace(program.manifest, stages=(replace(stage, outputs=(whole,)),))
    with pytest.raises(ProgramError, match=r"is the output 0 and is divided: expected whole, as in the manifest"):
        replace(program, manifest=manifest).check()


def test_replicas_rows_are_joined() -> None:
    program = autoptd.compile(GPT(SMALL), (1, 1, 2), num_microbatches=1, outputs=("0",))

    def work(rank: int) -> list[Any]:
        parallel = program.bind()
        ids = torch.full((1, SMALL.block_size), rank)
        with torch.no_grad():
            output, loss = parallel(ids, ids)
        rows, given, losses = parallel.gather_replicas((output, {"ids": ids}, loss))
        assert torch.equal(rows[rank : rank + 1], output.full())
        return [list(rows.shape), given["ids"][:, 0].tolist(), len(losses)]

    assert run_ranks(work, 2) == [[[2, SMALL.block_size, SMALL.vocab_size], [0, 1], 2]] * 2
