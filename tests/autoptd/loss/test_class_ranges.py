"""Row numbers of tables and losses: found in the graph, and refused in a batch before the step."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoptd
from samples.gpt import GPTConfig
from tests.models import tiny

SIZES = GPTConfig(40, 8, 2, 2, 8)


class Shifted(nn.Module):
    """Numbers that are computed with on their way to the table, and labels that are moved only."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 8)
        self.head = nn.Linear(8, 7)

    def forward(self, numbers: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.table(numbers % 10))
        return F.cross_entropy(logits[:, :-1].reshape(-1, 7), labels[:, 1:].reshape(-1))


compile_gpt = partial(tiny, config=SIZES, num_microbatches=2, microbatch_size=1)


@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 1, 1), (1, 2, 1)], ids=str)
def test_tables_and_losses_count_their_rows(mesh: tuple[int, int, int]) -> None:
    assert {i.name: i.rows for i in compile_gpt(mesh).manifest.inputs} == {"idx": 40, "targets": 40}


def test_inputs_used_in_arithmetic_have_no_class_range() -> None:
    example = {"numbers": torch.zeros(1, 6, dtype=torch.long), "labels": torch.ones(1, 6, dtype=torch.long)}
    program = autoptd.compile(Shifted(), (1, 1, 1), example_inputs=example, num_microbatches=2)
    assert {i.name: i.rows for i in program.manifest.inputs} == {"numbers": None, "labels": 7}
    numbers, labels = torch.full((2, 6), 99), torch.full((2, 6), 6)
    assert program.bind()(numbers=numbers, labels=labels).isfinite()


@pytest.mark.parametrize(("name", "number"), [("idx", 40), ("idx", -1), ("targets", 41), ("targets", -7)])
def test_a_number_outside_is_refused(name: str, number: int) -> None:
    batch = {"idx": torch.ones(2, 8, dtype=torch.long), "targets": torch.ones(2, 8, dtype=torch.long)}
    batch[name][1, 3] = number
    with pytest.raises(ValueError, match=rf"argument {name} has {number} at \[1, 3\]") as caught:
        compile_gpt((1, 1, 1)).bind()(**batch)
    assert f"its largest number outside is {number}: expected numbers from 0 to 39" in str(caught.value)


def test_ignored_labels_are_no_rows() -> None:
    batch = {"idx": torch.ones(2, 8, dtype=torch.long), "targets": torch.ones(2, 8, dtype=torch.long)}
    batch["targets"][:, :3] = -100
    assert compile_gpt((1, 1, 1)).bind()(**batch)[1].isfinite()


@pytest.mark.parametrize("tensor", [1, 2])
def test_labels_that_a_sum_leaves_out_are_no_rows(tensor: int) -> None:
    """Whatever the loss does with the others."""

    class Summed(Shifted):
        def forward(self, numbers: Tensor, labels: Tensor) -> Tensor:
            logits = self.head(self.table(numbers)).view(-1, 7)
            return F.cross_entropy(logits, labels.view(-1), reduction="sum", ignore_index=-1)

    example = {name: torch.ones(1, 6, dtype=torch.long) for name in ("numbers", "labels")}
    program = autoptd.compile(Summed(), (tensor, 1, 1), example_inputs=example, num_microbatches=1)
    assert {i.name: i.exempt for i in program.manifest.inputs} == {"numbers": None, "labels": -1}
    batch = {"numbers": torch.ones(1, 6, dtype=torch.long), "labels": torch.tensor([[-1, 0, 1, 2, 3, -1]])}
    bound = autoptd.compile(Summed(), (1, 1, 1), example_inputs=example, num_microbatches=1).bind()
    assert bound(**batch).isfinite()
    batch["labels"][0, 0] = -100
    with pytest.raises(ValueError, match=r"argument labels has -100 at \[0, 0\]"):
        bound(**batch)


@pytest.mark.parametrize("ignored", [-1, -100])
def test_labels_are_exempt_where_all_losses_leave_them_out(ignored: int) -> None:
    class Twice(Shifted):
        def forward(self, numbers: Tensor, labels: Tensor) -> Tensor:
            logits, flat = self.head(self.table(numbers)).view(-1, 7), labels.view(-1)
            return F.cross_entropy(logits, flat) + F.cross_entropy(logits, flat, ignore_index=ignored)

    class Read(Shifted):
        def forward(self, numbers: Tensor, labels: Tensor) -> Tensor:
            logits = self.head(self.table(numbers) + self.table(labels)).view(-1, 7)
            return F.cross_entropy(logits, labels.view(-1))

    example = {name: torch.ones(1, 6, dtype=torch.long) for name in ("numbers", "labels")}
    found = [
        autoptd.compile(model, (1, 1, 1), example_inputs=example, num_microbatches=1).manifest.inputs[1]
        for model in (Twice(), Read())
    ]
    assert [(i.name, i.rows) for i in found] == [("labels", 7), ("labels", 7)]
    assert [i.exempt for i in found] == [-100 if ignored == -100 else None, None]
