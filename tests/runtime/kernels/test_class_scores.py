"""Reductions, picks and losses of divided classes against torch's own, on every number of tensor ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from autoptd.runtime import kernels
from autoptd.runtime.comm.rank import Rank
from autoptd.runtime.program.mesh import Mesh
from tests.runtime.kernels.test_kernels import gradient, on_tensor_ranks, own_part

ROWS = 6
LABELS = torch.tensor([0, 4, -100, 2, 3, 1])
INDEX = torch.tensor([[0, 3], [4, 4], [1, 2], [2, 0], [3, 1], [1, 1]])
WEIGHT = torch.linspace(0.5, 2, 5, dtype=torch.float64)
Call = Callable[[Rank, Tensor], Tensor]


def lose(**options: Any) -> tuple[Call, Callable[[Tensor], Tensor]]:
    return (
        lambda rank, x: kernels.cross_entropy(rank, x, LABELS, 5, **options),
        lambda x: functional.cross_entropy(x, LABELS, **options),
    )


CASES: dict[str, tuple[Call, Callable[[Tensor], Tensor]]] = {
    "logsumexp": (lambda rank, x: kernels.logsumexp(rank, x, 1, 5), lambda x: x.logsumexp(1)),
    "logsumexp of a first dimension": (
        lambda rank, x: kernels.logsumexp(rank, x.t(), 0, 5, True),
        lambda x: x.t().logsumexp(0, keepdim=True),
    ),
    "pick": (lambda rank, x: kernels.pick(rank, x, INDEX, 5), lambda x: x.gather(1, INDEX)),
    "pick of a first dimension": (
        lambda rank, x: kernels.pick(rank, x.t(), INDEX.t(), 5, 0),
        lambda x: x.t().gather(0, INDEX.t()),
    ),
    "maximum": (lambda rank, x: kernels.maximum(rank, x, 1, 5)[0], lambda x: x.max(1)[0]),
    "its index": (
        lambda rank, x: x[:1, :1] * 0 + kernels.maximum(rank, x, -1, 5, True)[1],
        lambda x: x[:1, :1] * 0 + x.argmax(-1, keepdim=True),
    ),
    "none": lose(reduction="none"),
    "weighted": lose(weight=WEIGHT),
    "smoothed": lose(label_smoothing=0.2),
    "smoothed sum": lose(label_smoothing=0.2, reduction="sum"),
    "weighted and smoothed": lose(label_smoothing=0.2, weight=WEIGHT),
    "weighted and smoothed, of each": lose(label_smoothing=0.2, weight=WEIGHT, reduction="none"),
    **{
        f"nll_loss, {reduction}": (
            lambda rank, x, how=reduction: kernels.nll_loss(rank, x, LABELS, 5, -100, how, WEIGHT),  # type: ignore[misc]
            lambda x, how=reduction: functional.nll_loss(x, LABELS, WEIGHT, reduction=how),  # type: ignore[misc]
        )
        for reduction in ("mean", "sum", "none")
    },
}


def test_the_maximum_of_what_is_no_number() -> None:
    x = torch.tensor([[1.0, torch.nan, 2.0, 0.0], [0.0, 3.0, 1.0, 2.0]])

    def work(rank: Rank) -> tuple[Tensor, Tensor]:
        return kernels.maximum(rank, own_part(x, 1, 2, rank.group("tensor").index), 1, 4)

    for found in on_tensor_ranks(2, work):
        torch.testing.assert_close(found, tuple(x.max(1)), equal_nan=True)


@pytest.mark.parametrize("tensor", [1, 2, 4])
@pytest.mark.parametrize("name", CASES)
def test_divided_classes(name: str, tensor: int) -> None:
    """Four ranks have two classes each, and the last one has padding only."""
    torch.manual_seed(0)
    ours, torchs = CASES[name]
    scores = 3 * torch.randn(ROWS, 5, dtype=torch.float64)
    scores[1, 3] = scores[1, 1] = 9  # the first of two maxima counts
    plain = scores.clone().requires_grad_()
    expected = torchs(plain)
    slopes = torch.linspace(1, 2, expected.numel(), dtype=torch.float64).view(expected.shape)
    expected.backward(slopes)

    def divided(rank: Rank) -> tuple[Tensor, Tensor]:
        own = own_part(scores, 1, tensor, rank.group("tensor").index)
        value = ours(rank, own)
        value.backward(slopes)
        return value.detach(), gradient(own)

    results = on_tensor_ranks(tensor, divided)
    gradients = torch.cat([of_own for _, of_own in results], 1)
    torch.testing.assert_close(gradients[:, :5], gradient(plain), rtol=1e-13, atol=1e-14)
    assert not gradients[:, 5:].any()
    for value, _ in results:
        torch.testing.assert_close(value, expected.detach(), rtol=1e-13, atol=1e-14)
        assert torch.equal(value, results[0][0])


@pytest.mark.parametrize("illegal", [-1, 5])
def test_numbers_of_no_class_are_torchs_error(illegal: int) -> None:
    scores, index = torch.randn(2, 5), torch.tensor([[0], [illegal]])

    def pick(rank: Rank) -> str:
        own = own_part(scores, 1, 2, rank.group("tensor").index)
        with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
            kernels.pick(rank, own, index, 5)
        with pytest.raises(RuntimeError, match="Class values must be"):
            kernels.one_hot(rank, index, 5)
        return "refused"

    assert on_tensor_ranks(2, pick) == ["refused"] * 2


@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_one_hot(tensor: int) -> None:
    index = torch.tensor([[0, 4], [2, 3]])
    parts = on_tensor_ranks(tensor, lambda rank: kernels.one_hot(rank, index, 5))
    assert torch.equal(torch.cat(parts, -1)[..., :5], functional.one_hot(index, 5))
    assert not torch.cat(parts, -1)[..., 5:].any()


def test_half_precision_is_summed_in_float32() -> None:
    scores = torch.randn(4, 7).bfloat16()
    found = kernels.logsumexp(Rank.local(Mesh(1, 1, 1)), scores, 1, 7)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, scores.float().logsumexp(1))
