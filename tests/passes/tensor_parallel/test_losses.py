"""Losses in every written form: the head and the vocabulary are divided, and the gradients are the plain model's."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoptd
from autoptd.passes.cost.work import backward_work, forward_work
from autoptd.passes.ir.program import find_trained

WIDTH, LENGTH = 6, 5
Loss = Callable[["Model", Tensor, Tensor], Tensor]


class Model(nn.Module):
    """A tied embedding and head, which has all products; `loss` reads its hidden states and the labels."""

    weight: Tensor

    def __init__(self, loss: Loss, vocabulary: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(vocabulary, WIDTH)
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("weight", torch.linspace(0.5, 2, vocabulary))
        self.loss = loss

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self, torch.tanh(self.scale * self.embed(ids)), labels)


def on_logits(loss: Callable[[Tensor, Tensor], Tensor]) -> Loss:
    return lambda model, hidden, labels: loss(model.head(hidden), labels)


def masked_mean(losses: Tensor, labels: Tensor) -> Tensor:
    mask = (labels != -100).to(losses)
    return (losses.flatten() * mask.flatten()).sum() / mask.sum()


def gathered(logp: Tensor, labels: Tensor) -> Tensor:
    kept = labels.masked_fill(labels == -100, 0)
    return masked_mean(-logp.gather(-1, kept.unsqueeze(-1)).squeeze(-1), labels)


def smoothed(logits: Tensor, labels: Tensor) -> Tensor:
    """As transformers' LabelSmoother writes it."""
    logp, labels = -F.log_softmax(logits, dim=-1), labels.unsqueeze(-1)
    padding = labels.eq(-100)
    nll = logp.gather(dim=-1, index=labels.clamp(min=0)).masked_fill(padding, 0.0)
    smooth = logp.sum(dim=-1, keepdim=True, dtype=torch.float32).masked_fill(padding, 0.0)
    active = padding.numel() - padding.long().sum()
    return 0.9 * nll.sum() / active + 0.1 * smooth.sum() / (active * logp.shape[-1])


def distilled(model: Model, hidden: Tensor, labels: Tensor) -> Tensor:
    student, teacher = model.head(hidden), model.head(hidden.cos()).detach()
    soft = F.kl_div(F.log_softmax(student / 2, -1), F.softmax(teacher / 2, -1), reduction="batchmean")
    return soft + F.cross_entropy(student.view(-1, student.shape[-1]), labels.view(-1))


def chunked(model: Model, hidden: Tensor, labels: Tensor) -> Tensor:
    """As torchtune computes it: the head, too, chunk by chunk."""
    parts = zip(hidden.chunk(3, dim=1), labels.chunk(3, dim=1), strict=True)
    losses = [F.cross_entropy(model.head(x).flatten(0, 1).float(), y.flatten(), reduction="sum") for x, y in parts]
    return torch.stack(losses).sum() / (labels != -100).sum()


def chunked_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """As litgpt computes it."""
    parts = zip(logits.reshape(-1, logits.shape[-1]).split(4), labels.reshape(-1).split(4), strict=True)
    losses = [F.cross_entropy(x, y, ignore_index=-100, reduction="none") for x, y in parts]
    return torch.cat(losses).sum() / (labels != -100).sum().clamp(min=1)


def by_hand(logits: Tensor, labels: Tensor) -> Tensor:
    shifted = logits - logits.max(-1, keepdim=True)[0]
    return gathered(shifted - shifted.exp().sum(-1, keepdim=True).log(), labels)


FORMS: dict[str, Loss] = {
    "cross_entropy": on_logits(lambda x, y: F.cross_entropy(x.view(-1, x.shape[-1]), y.view(-1))),
    "nll of log_softmax": on_logits(lambda x, y: F.nll_loss(F.log_softmax(x, -1).view(-1, x.shape[-1]), y.view(-1))),
    "nll of the logarithm of softmax": on_logits(
        lambda x, y: F.nll_loss(x.softmax(-1).log().flatten(0, 1), y.flatten(), reduction="sum") / y.numel()
    ),
    "log_softmax and gather": on_logits(lambda x, y: gathered(F.log_softmax(x, -1), y)),
    "logsumexp and gather": on_logits(lambda x, y: gathered(x - torch.logsumexp(x, -1, keepdim=True), y)),
    "picked by arange": on_logits(
        lambda x, y: -F.log_softmax(x.flatten(0, 1), 1)[torch.arange(y.numel()), y.flatten().clamp(min=0)].mean()
    ),
    "z-loss": on_logits(
        lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten()) + 1e-2 * torch.logsumexp(x, -1).pow(2).mean()
    ),
    "by hand": on_logits(by_hand),
    "label smoothing": on_logits(lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten(), label_smoothing=0.1)),
    "label smoothing by hand": on_logits(smoothed),
    "class weights": lambda model, hidden, y: F.cross_entropy(
        model.head(hidden).flatten(0, 1), y.flatten(), weight=model.weight
    ),
    "class weights and smoothing": lambda model, hidden, y: F.cross_entropy(
        model.head(hidden).flatten(0, 1), y.flatten(), weight=model.weight, label_smoothing=0.2
    ),
    "nll with class weights": lambda model, hidden, y: F.nll_loss(
        model.head(hidden).log_softmax(-1).flatten(0, 1), y.flatten(), weight=model.weight
    ),
    "reduction none": on_logits(
        lambda x, y: masked_mean(F.cross_entropy(x.flatten(0, 1), y.flatten(), reduction="none"), y)
    ),
    "classes in the middle": on_logits(lambda x, y: F.cross_entropy(x.transpose(1, 2), y)),
    "classes in the middle, of each": on_logits(
        lambda x, y: masked_mean(F.cross_entropy(x.movedim(-1, 1), y, reduction="none"), y)
    ),
    "nll of classes in the middle": on_logits(lambda x, y: F.nll_loss(x.permute(0, 2, 1).log_softmax(1), y)),
    "sequence first": on_logits(
        lambda x, y: F.cross_entropy(x.transpose(0, 1).reshape(-1, x.shape[-1]), y.t().reshape(-1))
    ),
    "head by an einsum": lambda model, hidden, y: F.cross_entropy(
        torch.einsum("bsh,vh->bvs", hidden, model.embed.weight), y
    ),
    "chunked head": chunked,
    "chunked logits": on_logits(chunked_logits),
    "distillation": distilled,
    "probabilities": lambda model, hidden, y: F.cross_entropy(
        model.head(hidden).flatten(0, 1), model.head(hidden.sin()).flatten(0, 1).softmax(-1).detach()
    ),
    "entropy": on_logits(
        lambda x, y: (
            F.cross_entropy(x.flatten(0, 1), y.flatten()) - 0.1 * (x.softmax(-1) * x.log_softmax(-1)).sum(-1).mean()
        )
    ),
    "one-hot": on_logits(
        lambda x, y: -(F.one_hot(y.clamp(min=0), x.shape[-1]).to(x) * x.log_softmax(-1)).sum() / y.numel()
    ),
    "smoothed one-hot": on_logits(
        lambda x, y: F.cross_entropy(x.mT, (F.one_hot(y, x.shape[-1]).to(x) * 0.9 + 0.1 / x.shape[-1]).mT)
    ),
    "smoothing by a mean": on_logits(lambda x, y: gathered(x.log_softmax(-1), y) - x.log_softmax(-1).mean() / 9),
    "weighted by a count": on_logits(
        lambda x, y: (F.cross_entropy(x.mT, y, reduction="none") * (x >= 0).sum(-1)).mean()
    ),
    "focal": on_logits(lambda x, y: gathered(x.log_softmax(-1) * (1 - x.softmax(-1)).square(), y)),
    "accuracy": on_logits(
        lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten()) * (2 - (x.argmax(-1) == y).float().mean())
    ),
}


def measure_share(program: autoptd.CompiledProgram) -> float:
    """Return one rank's FLOPs of products, forward and backward, over those of the plain model."""
    total = 0
    for stage in program.stages:
        trained = find_trained(stage)
        for node in stage.graph.nodes:
            works = forward_work(node), backward_work(node, trained)
            total += sum(product.flops for work in works for product in work.products)
    return total / program.manifest.model_flops


def compile_form(name: str, vocabulary: int, mesh: tuple[int, int, int]) -> autoptd.CompiledProgram:
    torch.manual_seed(0)
    example = {name: torch.randint(0, vocabulary, (2, LENGTH)) for name in ("ids", "labels")}
    return autoptd.compile(Model(FORMS[name], vocabulary).double(), mesh, example_inputs=example)


def check_form(name: str, vocabulary: int, mesh: tuple[int, int, int]) -> autoptd.CompiledProgram:
    program = compile_form(name, vocabulary, mesh)
    assert program.manifest.parameters["embed.weight"].placement["tensor"].dim == 0, program.log
    report = program.verify()
    assert abs(report.loss - report.reference_loss) <= 1e-12 * abs(report.reference_loss)
    assert max(report.gradient_errors.values()) <= 1e-12
    return program


every_form = pytest.mark.parametrize("name", FORMS)
pytestmark = pytest.mark.filterwarnings("ignore:.*reach:UserWarning", "ignore:.*is a sum:UserWarning")


@every_form
def test_a_form_divides_the_head(name: str) -> None:
    """13 words are padded to 14."""
    assert measure_share(check_form(name, 13, (2, 1, 1))) <= 7 / 13


@pytest.mark.slow
@every_form
def test_a_form_divides_the_head_in_halves(name: str) -> None:
    assert measure_share(check_form(name, 12, (2, 1, 1))) <= 0.5


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(4, 1, 1), (2, 2, 2)], ids=str)
@every_form
def test_a_form_trains_on_other_meshes(name: str, mesh: tuple[int, int, int]) -> None:
    """Of four ranks the last one has a word and three rows of padding."""
    check_form(name, 13, mesh)


class Extended(nn.Module):
    """Old words and new ones in tables of their own, of which embedding and head read one after the other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.old, self.new = nn.Parameter(torch.randn(8, WIDTH)), nn.Parameter(torch.randn(4, WIDTH))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        table = torch.cat([self.old, self.new])
        logits = torch.tanh(F.embedding(ids, table)) @ table.t()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + 0.1 * gathered(logits, labels)


def test_numbers_of_words_are_not_counted_in_parts() -> None:
    ids = torch.randint(0, 12, (2, LENGTH))
    example = {"ids": ids, "labels": ids}
    report = autoptd.compile(Extended().double(), (2, 1, 1), example_inputs=example).verify()
    assert max(report.gradient_errors.values()) <= 1e-12


class Soft(Model):
    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        labels = labels.abs()
        logits = self.head(torch.tanh(self.scale * self.embed(ids)))
        return F.kl_div(logits.log_softmax(-1), labels, reduction="batchmean") + F.cross_entropy(
            logits.flatten(0, 1), labels.flatten(0, 1), label_smoothing=0.1
        )


@pytest.mark.parametrize("vocabulary", [12, 13])
def test_soft_labels_of_the_batch_are_taken_by_the_ranks(vocabulary: int) -> None:
    example = {"ids": torch.randint(0, 12, (2, LENGTH)), "labels": torch.rand(2, LENGTH, vocabulary).double()}
    program = autoptd.compile(Soft(FORMS["entropy"], vocabulary).double(), (2, 1, 1), example_inputs=example)
    assert program.manifest.parameters["embed.weight"].placement["tensor"].dim == 0, program.log
    assert max(program.verify().gradient_errors.values()) <= 1e-12


@pytest.mark.parametrize(
    ("found", "edited", "message"),
    [
        ("head, dim=-1, vocabulary=13", "head, dim=-1, vocabulary=12", "has vocabulary=12, where head has 13 rows"),
        ("head, dim=-1, vocabulary=13", "tanh, dim=-1, vocabulary=13", "reads tanh, .* divided along dimension 2"),
        (
            "log_softmax_total_f)",
            "log_softmax_total)",
            "log_softmax .* is divided and reads log_softmax_total as it is",
        ),
        ("aten.squeeze(gather, -1)", "aten.squeeze(aten.slice(log_softmax, 2, 0, 1), -1)", "takes rows 0 to 0"),
    ],
)
def test_a_wrong_edit_is_refused(found: str, edited: str, message: str, tmp_path: Path) -> None:
    program = compile_form("log_softmax and gather", 13, (2, 1, 1))
    program.save(tmp_path)
    (text,) = tmp_path.glob("program_*.py")
    assert found in text.read_text()
    text.write_text(text.read_text().replace(found, edited))
    with pytest.raises(autoptd.ProgramError, match=message):
        autoptd.load(tmp_path).check()


def test_what_is_replicated_has_its_operator_and_reason_in_the_log() -> None:
    def loss(model: Model, hidden: Tensor, labels: Tensor) -> Tensor:
        logits: Tensor = model.head(F.layer_norm(hidden, (WIDTH,)))
        return F.cross_entropy(logits.mT, labels) + logits.sort()[0].square().mean()

    model = Model(loss, 12)
    ids = torch.randint(0, 12, (2, LENGTH))
    program = autoptd.compile(model, (2, 1, 1), example_inputs={"ids": ids, "labels": ids})
    (line,) = (line for line in program.log if line.startswith("weight of shape [12, 6]"))
    assert re.search(r"because no rule divides aten.sort \(.*\); aten.layer_norm \(.*: embed.weight", line)
