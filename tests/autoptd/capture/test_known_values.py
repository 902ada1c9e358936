"""What a forward reads of its tensors in Python: constants are known, assertions on data are taken to hold."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autoptd
from autoptd.compiled import CompiledProgram

ROWS, LENGTH = 16, 4
Middle = Callable[["Reading", Tensor], Tensor]


class Reading(nn.Module):
    """An embedding and a projection, with something between that reads values."""

    def __init__(self, middle: Middle) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(ROWS, 8), nn.Linear(8, ROWS)
        self.register_buffer("cos", torch.tensor([1.0, 0.5, 0.25]))
        self.register_buffer("other", torch.ones(2), persistent=False)
        self.middle = middle
        self.double()

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        x = self.middle(self, self.table(idx))
        return functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def compile_reading(middle: Middle) -> CompiledProgram:
    example = {name: torch.zeros(2, LENGTH, dtype=torch.long) for name in ("idx", "targets")}
    return autoptd.compile(Reading(middle), (1, 1, 1), example_inputs=example)


def branch(model: Reading, x: Tensor) -> Tensor:
    return 2 * x if model.get_buffer("cos")[0] == 1 else x


def number(model: Reading, x: Tensor) -> Tensor:
    result: Tensor = x * model.get_buffer("cos")[1].item() + sum(model.get_buffer("cos").tolist())
    return result


def written(model: Reading, x: Tensor) -> Tensor:
    """The values at the time of the read, written through views too, and through one piece of several."""
    mask = torch.ones(LENGTH, LENGTH)
    mask[1:].fill_(0)
    mask.chunk(2, dim=1)[1].add_(1)
    mask[0, 0] = model.get_buffer("cos")[1]
    return x * mask.sum().item()


def open_mask(model: Reading, x: Tensor) -> Tensor:
    mask, own = torch.ones_like(x[..., 0], dtype=torch.long), x.new_ones(len(x))
    return x if torch.all(mask == 1) and not torch.equal(own, 2 * own) else x.square()


def without_gradient(model: Reading, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = model.get_buffer("cos").max().item()
    return x * scale


@pytest.mark.parametrize(
    ("middle", "proved"),
    [(branch, ["cos"]), (number, ["cos"]), (written, ["cos"]), (open_mask, []), (without_gradient, ["cos"])],
)
def test_values_of_constants_are_read(middle: Middle, proved: list[str]) -> None:
    """And the program holds for these values of the buffers only."""
    program = compile_reading(middle)
    assert program.verify().passed
    assert not [line for line in program.log if "evaluation" in line]
    assert [*program.manifest.proved] == proved
    assert program.model is not None
    other = program.model.state_dict() | {"cos": torch.zeros(3)}
    if proved:
        with pytest.raises(ValueError, match="the buffer cos is given other values"):
            program.bind(weights=other)
    else:
        program.bind(weights=other)


def noise(model: Reading, x: Tensor) -> Tensor:
    return 2 * x if torch.rand(3).sum() > 1 else x


def weight(model: Reading, x: Tensor) -> Tensor:
    return 2 * x if model.head.bias[0] > 0 else x


def mixed(model: Reading, x: Tensor) -> Tensor:
    mask = torch.ones(LENGTH)
    mask[1:] = x.detach()[0, 0, 0]
    return 2 * x if mask.sum() > 1 else x


@pytest.mark.parametrize("middle", [noise, weight, mixed])
def test_values_that_change_are_not_known(middle: Middle) -> None:
    with pytest.raises(ValueError, match=r"if .*: control flow depends on a tensor's values"):
        compile_reading(middle)


def assert_rows(model: Reading, x: Tensor) -> Tensor:
    rows = x.argmax(-1)
    assert rows.max() < ROWS, "too large"
    assert rows.max().item() < ROWS and not (rows < 0).any()  # noqa: PT018
    return x


def raise_rows(model: Reading, x: Tensor) -> Tensor:
    rows = x.argmax(-1)
    if rows.max() >= ROWS or not (rows >= 0).all():
        raise ValueError("no such row")
    return x


def check_rows(model: Reading, x: Tensor) -> Tensor:
    rows = x.argmax(-1)
    torch._assert(rows.max() < ROWS, "too large")
    torch._check(rows.min().item() >= 0)
    with torch.no_grad():
        assert bool((rows < ROWS).all())
    return x


@pytest.mark.parametrize(("middle", "count"), [(assert_rows, 2), (raise_rows, 1), (check_rows, 3)])
def test_assertions_on_data_are_dropped_and_said(middle: Middle, count: int) -> None:
    program = compile_reading(middle)
    assert program.verify().passed
    said = [line for line in program.log if "is an assertion on data" in line]
    assert len(said) == count
    assert all(re.match(r"test_known_values\.py:\d+: .*ROWS|.*>= 0", line) for line in said), said
    with pytest.raises(ValueError, match="idx"):
        program.bind()(torch.full((16, LENGTH), ROWS), torch.zeros(16, LENGTH, dtype=torch.long))


def test_a_branch_that_does_more_than_raise_is_refused() -> None:
    def choose(model: Reading, x: Tensor) -> Tensor:
        if x.argmax(-1).max() >= ROWS:
            return 2 * x
        return x

    with pytest.raises(ValueError, match=r"if x\.argmax.*: control flow depends on a tensor's values"):
        compile_reading(choose)


def test_an_assertion_whose_error_the_forward_catches_is_a_branch() -> None:
    def catch(model: Reading, x: Tensor) -> Tensor:
        try:
            if x.argmax(-1).max() >= ROWS:
                raise ValueError("too large")
        except ValueError:
            return 2 * x
        return x

    with pytest.raises(ValueError, match="control flow depends on a tensor's values"):
        compile_reading(catch)


def test_a_number_of_the_batch_in_a_new_tensor_is_data() -> None:
    def fill(model: Reading, x: Tensor) -> Tensor:
        limit = x.new_full((2,), x.argmax(-1).max().item())
        return 2 * x if limit[0].item() > ROWS else x

    with pytest.raises(ValueError, match="control flow depends on a tensor's values"):
        compile_reading(fill)
