"""Models of which autograd leaves several gradients in one memory: sums of views of parameters.

The plain loop that adds up microbatches is wrong there, in place: what they are compared with is one backward over
the whole batch.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autoptd
from tests.parity import compare, train_compiled, train_plain

VOCABULARY, LENGTH, HIDDEN, MICROBATCHES = 32, 8, 16, 4


class Summed(nn.Module):
    """Two tables in one sum, and before each layer one in a sum with what comes from the layer before.

    Where a microbatch is one sequence the gradient of that sum, unchanged, is the table's as well.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY)
        self.first, self.second = (nn.Parameter(torch.randn(LENGTH, HIDDEN)) for _ in range(2))
        self.tables = nn.ParameterList(torch.randn(LENGTH, HIDDEN) for _ in range(4))
        self.layers = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(4))

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(idx) + (self.first.unsqueeze(0) + self.second.unsqueeze(0))
        for table, layer in zip(self.tables, self.layers, strict=True):
            x = x + table.unsqueeze(0)
            x = x + torch.tanh(layer(x))
        return functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class Conjugated(nn.Module):
    """Of the complex parameter, which is read conjugated, autograd leaves a gradient that is a conjugated view."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY)
        self.turn = nn.Parameter(torch.randn(HIDDEN, dtype=torch.complex128))

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(idx)
        x = (torch.complex(x, x) * self.turn.conj()).real
        return functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return Summed().double()


def make_batch(sequences: int) -> dict[str, Tensor]:
    tokens = torch.randint(0, VOCABULARY, (sequences, LENGTH + 1))
    return {"idx": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}


@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (1, 2, 2)])
@pytest.mark.parametrize("sequences", [1, 2])
def test_each_parameter_has_its_own_gradient(mesh: tuple[int, int, int], sequences: int) -> None:
    model = make_model()
    batches = [make_batch(sequences * MICROBATCHES * mesh[2]) for _ in range(2)]
    example = {name: x[:sequences] for name, x in batches[0].items()}
    program = autoptd.compile(model, mesh, example_inputs=example, num_microbatches=MICROBATCHES)
    found, expected = train_compiled(program, batches), train_plain(model, batches, 1)
    for step, plain in zip(found.steps, expected.steps, strict=True):
        compare(step, plain)
    assert program.verify().passed


@pytest.mark.parametrize("mesh", [(1, 1, 1), (1, 1, 2), (1, 2, 2)])
def test_gradients_that_are_conjugated_views_are_summed(mesh: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    model, batch = Conjugated().double(), make_batch(2 * MICROBATCHES * mesh[2])
    example = {name: x[:2] for name, x in batch.items()}
    program = autoptd.compile(model, mesh, example_inputs=example, num_microbatches=MICROBATCHES)
    (found,), (expected,) = train_compiled(program, [batch]).steps, train_plain(model, [batch], 1).steps
    compare(found, expected)


def test_changing_one_gradient_in_place_changes_no_other() -> None:
    """As a loss that is scaled does, and clipping: of one microbatch, to which nothing is added."""
    model, batch = make_model(), make_batch(1)
    (plain,) = train_plain(model, [batch], 1).steps
    parallel = autoptd.compile(model, (1, 1, 1), example_inputs=batch, num_microbatches=1).bind("cpu")
    (3 * parallel(**batch)).backward()
    for name, parameter in parallel.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, 3 * plain.gradients[name], rtol=1e-12, atol=0)
