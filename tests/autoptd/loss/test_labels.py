"""Labels are known with what their loss leaves out, and only where that is certain."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autoptd
from autoptd.runtime.engine.batch import unequal_counts
from autoptd.runtime.engine.label_weights import count_valid
from samples.attention_coverage import make_model
from tests.marks import slow

VOCABULARY, LENGTH = 12, 6
Loss = Callable[[Tensor, Tensor], Tensor]


class Small(nn.Module):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.table, self.head, self.loss = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY), loss

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.head(self.table(ids)), labels)


def mean(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), **options)


def each(logits: Tensor, labels: Tensor) -> Tensor:
    """Every label's cross-entropy."""
    return functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")


def write_out(logits: Tensor, labels: Tensor) -> Tensor:
    chosen = logits.log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return -(chosen * (labels != -100)).sum() / (labels != -100).sum()


def mean_of_samples(logits: Tensor, labels: Tensor) -> Tensor:
    """Which counts samples alike, however many labels each has."""
    return (each(logits, labels).sum(1) / (labels != -100).sum(1).clamp(min=1)).mean()


LOSSES: dict[str, tuple[Loss, tuple[int | None, int]]] = {
    "plain": (mean, (-100, 0)),
    "padding": (lambda x, y: mean(x, y, ignore_index=3), (3, 0)),
    "shifted": (lambda x, y: mean(x[:, :-1], y[:, 1:], ignore_index=-1), (-1, 1)),
    "padded": (lambda x, y: mean(x, functional.pad(y, (0, 1), value=-100)[:, 1:]), (-100, 1)),
    "sum": (lambda x, y: mean(x, y, reduction="sum"), (None, 0)),
    "weighted": (lambda x, y: mean(x, y, weight=torch.linspace(0.5, 1, VOCABULARY)), (None, 0)),
    "changed": (lambda x, y: mean(x, torch.where(y == 5, -100, y)), (None, 0)),
    "twice": (lambda x, y: mean(x, y) + mean(x, y, ignore_index=2), (None, 0)),
    "two tokens": (lambda x, y: mean(x, y) + mean(x[:, :-1], y[:, 1:]), (-100, 0)),
    "likelihood": (lambda x, y: functional.nll_loss(x.log_softmax(-1).transpose(1, 2), y), (-100, 0)),
    "written out": (write_out, (None, 0)),
    "sum by its count": (lambda x, y: mean(x, y, reduction="sum") / (y != -100).sum(), (None, 0)),
    "sum by at least one": (lambda x, y: mean(x, y, reduction="sum") / (y > 0).sum().clamp(min=1), (None, 0)),
    "sum times one by its count": (lambda x, y: mean(x, y, reduction="sum") * (1 / (y != -100).sum()), (None, 0)),
    "of samples' means": (mean_of_samples, (None, 0)),
    "of all elements": (lambda x, y: x.square().sum(), (None, 0)),
    "of all labels": (lambda x, y: mean(x, y, reduction="none").sum(), (None, 0)),
    "likelihood's sum": (lambda x, y: -x.log_softmax(-1).gather(-1, y.unsqueeze(-1)).sum(), (None, 0)),
    "sum by the size": (lambda x, y: mean(x, y, reduction="sum") / y.numel(), (None, 0)),
    "of two means": (lambda x, y: torch.stack([mean(x, y), x.square().mean()]).sum(), (-100, 0)),
    "sum and mean": (lambda x, y: mean(x, y) + 0.01 * x.square().sum(), (-100, 0)),
}


def compile_small(loss: Loss, mesh: tuple[int, int, int] = (1, 1, 1)) -> autoptd.CompiledProgram:
    example = {name: torch.zeros(1, LENGTH, dtype=torch.long) for name in ("ids", "labels")}
    return autoptd.compile(Small(loss), mesh, example_inputs=example, num_microbatches=2)


UNCOUNTED = (
    *("weighted", "changed", "written out"),
    *("sum by its count", "sum by at least one", "sum times one by its count"),
)
SUMS = ("sum", "of all labels")


@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 2, 1)], ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_labels_have_their_losses_ignore_index_and_a_mean_that_cannot_count_them_is_said(
    name: str, mesh: tuple[int, int, int]
) -> None:
    loss, left_out = LOSSES[name]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ids, labels = compile_small(loss, mesh).manifest.inputs
    assert (ids.ignore_index, ids.skipped) == (None, 0)
    assert (labels.ignore_index, labels.skipped) == left_out
    assert all(warning.filename == __file__ for warning in caught)
    said = [str(warning.message) for warning in caught]
    expected = ["labels reaches the loss changed"] * (name in UNCOUNTED)
    expected += ["the loss is a sum over its batch"] * (name in SUMS)
    assert [text.split(",")[0] for text in said] == expected


@pytest.mark.parametrize(
    ("name", "first", "expected"),
    [
        ("padding", [3, 3, 1, 1, 1, 1], [4, 6]),
        ("padding", [-100, 1, 1, 1, 1, 1], [6, 6]),
        ("shifted", [-1, 1, 1, 1, 1, 1], [5, 5]),
        ("shifted", [1, -1, 1, 1, 1, 1], [4, 5]),
    ],
)
def test_label_counts_are_those_of_the_loss(name: str, first: list[int], expected: list[int]) -> None:
    labels = compile_small(LOSSES[name][0]).manifest.weighing_labels
    assert labels is not None
    assert count_valid(labels, torch.tensor([first, [1] * 6])).tolist() == expected


def test_labels_weigh_where_their_mean_is_the_whole_loss() -> None:
    def with_penalty(logits: Tensor, labels: Tensor) -> Tensor:
        return mean(logits, labels) + 0.1 * logits.square().mean()

    def scaled(logits: Tensor, labels: Tensor) -> Tensor:
        return 0.5 * mean(logits, labels) / 3

    assert compile_small(mean).manifest.inputs[1].weighs
    assert compile_small(scaled).manifest.inputs[1].weighs
    for loss in (with_penalty, LOSSES["two tokens"][0]):
        manifest = compile_small(loss).manifest
        assert manifest.inputs[1].ignore_index == -100
        assert manifest.weighing_labels is None
        batch = {"ids": torch.zeros(2, LENGTH), "labels": torch.tensor([[-100, 1, 1, 1, 1, 1], [1] * 6])}
        assert "labels other than -100: 5, 6. The model's loss has other parts" in unequal_counts(manifest, batch)


@pytest.mark.parametrize("name", ["padding", "shifted", "likelihood"])
@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 1, 2)], ids=str)
def test_verify_weighs_as_the_whole_batch_would(name: str, mesh: tuple[int, int, int]) -> None:
    program = compile_small(LOSSES[name][0], mesh)
    ignored = program.manifest.inputs[1].ignore_index
    assert ignored is not None
    generator = torch.Generator().manual_seed(0)
    ids, labels = (torch.randint(0, VOCABULARY, (2 * mesh[2], LENGTH), generator=generator) for _ in range(2))
    labels[0, 1:4] = ignored
    report = program.verify(batch={"ids": ids, "labels": labels})
    assert report.passed, report
    assert program.model is not None
    plain = copy.deepcopy(program.model).double()
    assert report.loss == pytest.approx(plain(ids, labels).item(), rel=1e-6)


@pytest.mark.parametrize("mesh", [(1, 2, 1), (2, 2, 1)], ids=str)
def test_labels_of_transformers_are_shifted(mesh: tuple[int, int, int]) -> None:
    model = make_model("LlamaForCausalLM", "eager")
    assert model is not None
    ids = torch.zeros(1, 8, dtype=torch.long)
    program = autoptd.compile(model, mesh, example_inputs={"input_ids": ids, "labels": ids.clone()})
    assert [(i.ignore_index, i.skipped) for i in program.manifest.inputs] == [(None, 0), (-100, 1)]


class Weighing(Small):
    """Whose loss reads what labels weigh, too."""

    def forward(self, ids: Tensor, labels: Tensor, w: Tensor) -> Tensor:  # type: ignore[override]
        return self.loss(self.head(self.table(ids)), labels, w)  # type: ignore[call-arg]


ONE, MANY = (1, 1, 1), (2, 2, 1)


def find_warnings(
    loss: Callable[[Tensor, Tensor, Tensor], Tensor], size: int, mesh: tuple[int, int, int] = MANY
) -> list[str]:
    """How compile's warnings begin, of microbatches of `size` samples."""
    example = {name: torch.zeros(size, LENGTH, dtype=torch.long) for name in ("ids", "labels")}
    example["w"] = torch.ones(size, LENGTH)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        autoptd.compile(Weighing(loss), mesh, example_inputs=example, num_microbatches=2)  # type: ignore[arg-type]
    return [str(warning.message).split(",")[0] for warning in caught]


MEANS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "of weights that add up to one": lambda x, y, w: (each(x, y) * (w / w.sum())).sum(),
    "of weights that may": lambda x, y, w: (each(x, y) * w).sum(),
    "of shares": lambda x, y, w: (each(x, y) / y.numel()).sum(),
    "by other names": lambda x, y, w: torch.divide(each(x, y).sum(), y.numel()).multiply(0.5).negative(),
    "of weighted losses": lambda x, y, w: torch.stack([mean(x, y), x.square().mean()]) @ torch.tensor([1, 0.1]),
    "of shares multiplied": lambda x, y, w: (each(x, y) * (1 / y.numel())).sum(),
    "of shares of parts": lambda x, y, w: (each(x, y) * (1 / y.numel() / 15)).sum(),
    "of shares, rounded": lambda x, y, w: (each(x, y) / (y.numel() / 47 * 47)).sum(),
    "of squares' shares": lambda x, y, w: x.square().sum() * (1 / y.numel()),
    "of samples' shares": lambda x, y, w: (each(x, y).mean(-1) / x.shape[0]).sum(),
    "of samples' halves": lambda x, y, w: each(x, y).mean(-1).sum() / (2 * x.shape[0]),
    "of parts": lambda x, y, w: each(x, y).view(x.shape[0], 2, -1).mean((0, 2)).sum(),
    "of the batch": lambda x, y, w: each(x, y).mean(0).sum(),
    "of the batch, in all": lambda x, y, w: each(x, y).mean(0).sum(0) + (0.5 * x.square()).mean(0).sum(),
    "of a sum": lambda x, y, w: mean(x, y, reduction="sum") * (1 / y.numel()),
    "of a sum of some": lambda x, y, w: mean(x[:, :-1], y[:, 1:], reduction="sum") * (1 / y.numel()),
    "of a sum of some by their number": lambda x, y, w: (
        mean(x[:, :-1], y[:, 1:], reduction="sum") * (1 / y[:, 1:].numel())
    ),
    "beside a sum": lambda x, y, w: each(x, y).sum() + x.square().mean(),
    "of one sample": lambda x, y, w: each(x, y)[0].sum(),
    "of clamped shares": lambda x, y, w: (each(x, y) / y.numel()).clamp(max=10).sum(),
    "by a trained sum": lambda x, y, w: (each(x, y) / x.square().sum()).sum(),
    "times one by a trained sum": lambda x, y, w: (each(x, y) * (1 / x.square().sum())).sum(),
    "of a ratio": lambda x, y, w: each(x, y).sum() * (1 / x.square().sum()),
}


@pytest.mark.parametrize(("size", "mesh"), [(1, MANY), (2, ONE), slow(1, ONE), slow(2, MANY)])
@pytest.mark.parametrize("name", MEANS)
def test_a_mean_is_not_taken_for_a_sum(name: str, size: int, mesh: tuple[int, int, int]) -> None:
    assert find_warnings(MEANS[name], size, mesh) == []


@pytest.mark.parametrize(("size", "mesh"), [(1, MANY), (3, ONE), slow(1, ONE), slow(3, MANY)])
@pytest.mark.parametrize(
    "loss",
    [
        lambda x, y, w: each(x, y).sum(),
        lambda x, y, w: each(x, y).view(-1).sum(),
        lambda x, y, w: each(x, y).sum(0).sum(),
        lambda x, y, w: mean(x, y, reduction="sum"),
        lambda x, y, w: each(x / 2, y).sum(),
    ],
)
def test_a_sum_is_said(loss: Callable[[Tensor, Tensor, Tensor], Tensor], size: int, mesh: tuple[int, int, int]) -> None:
    assert find_warnings(loss, size, mesh) == ["the loss is a sum over its batch"]


def count(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    return (each(x, y) * w).sum()


@pytest.mark.parametrize(
    "loss",
    [
        lambda x, y, w: mean(x * w.mean(), y),
        lambda x, y, w: mean(x * (w.numel() / w.sum()), y),
        lambda x, y, w: mean(x / w.sum(), y),
        lambda x, y, w: (x * (w.numel() / w.sum()) - 1).square().mean(),
        lambda x, y, w: mean(x, y) / w[0, 0],
    ],
)
@pytest.mark.parametrize("mesh", [MANY, slow(ONE)])
def test_a_factor_is_not_taken_for_a_count(
    loss: Callable[[Tensor, Tensor, Tensor], Tensor], mesh: tuple[int, int, int]
) -> None:
    assert find_warnings(loss, 2, mesh) == []


@pytest.mark.parametrize(
    "loss",
    [
        lambda x, y, w: (1 / w.sum()) * count(x, y, w),
        lambda x, y, w: count(x, y, w) * w.sum() ** -1,
        lambda x, y, w: count(x, y, w) * (w.numel() / w.sum().clamp(min=1)) / w.numel(),
        lambda x, y, w: count(x, y, w) / w.sum(),
        lambda x, y, w: (each(x, y) * w / w.sum()).sum(),
        lambda x, y, w: (each(x, y) * w).mean() / w.mean(),
        lambda x, y, w: (count(x, y, w) / w.sum()).view(1).squeeze() + 0.1 * x.square().mean(),
        lambda x, y, w: torch.where(w.sum() > 0, count(x, y, w) / w.sum(), 0.0),
    ],
)
@pytest.mark.parametrize("mesh", [MANY, slow(ONE)])
def test_a_count_is_said(loss: Callable[[Tensor, Tensor, Tensor], Tensor], mesh: tuple[int, int, int]) -> None:
    assert find_warnings(loss, 2, mesh) == ["w reaches the loss changed"]


def sort_back(x: Tensor) -> Tensor:
    """Tokens in another order, as experts take them, and back in their places."""
    flat = x.flatten(0, 1)
    order = flat[:, 0].argsort()
    return flat[order].tanh()[order.argsort()].view_as(x)


def scatter_back(x: Tensor) -> Tensor:
    flat = x.flatten(0, 1)
    order = flat[:, 0].argsort()
    return torch.zeros_like(flat).index_add(0, order, flat[order].tanh()).view_as(x)


@pytest.mark.parametrize("move", [sort_back, scatter_back])
def test_tokens_that_come_back_to_their_places_change_no_mean(move: Callable[[Tensor], Tensor]) -> None:
    assert find_warnings(lambda x, y, w: mean(move(x), y), 2) == []
    assert find_warnings(lambda x, y, w: each(move(x), y).sum(), 2) == ["the loss is a sum over its batch"]


def test_a_cut_that_a_tensor_places_is_refused() -> None:
    def loss(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        return torch.cat([torch.narrow(x, 0, torch.tensor(0), 1), x[1:]]).square().mean()

    with pytest.raises(ValueError, match=r"\(test_labels.py:\d+\): aten.narrow.Tensor begins at a tensor"):
        find_warnings(loss, 2)
