"""The backward of the causal softmax in Triton, whose masks are drawn only as far as a row sees."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autoptd.runtime import kernels
from autoptd.runtime.comm.rank import Rank
from tests.runtime.kernels.elementwise_cases import make_rank
from tests.runtime.kernels.test_rows import error

HEADS = 4


def differentiate(rank: Rank, scores: Tensor, slopes: Tensor) -> Tensor:
    scores = scores.detach().requires_grad_()
    weights = kernels.scaled_softmax(rank, scores, is_causal=True, scale=0.3, p=0.3, operator=6, divided=1)
    (gradient,) = torch.autograd.grad(weights, scores, slopes)
    return gradient


@pytest.mark.parametrize("length", [29, 33, 64, 100, pytest.param(264, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_gradients_are_exact_and_the_same_bits_for_divided_heads(
    length: int, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    torch.manual_seed(length)
    scores, slopes = torch.randn(2, 1, HEADS, length, length).to(kernel_device, dtype)
    whole = differentiate(make_rank(), scores, slopes)
    exact = differentiate(make_rank(), scores.double(), slopes.double())
    assert error(whole, exact) < 0.42 * torch.finfo(dtype).eps + 1e-6
    assert not whole.triu(1).any()
    for index in range(2):
        own = slice(index * HEADS // 2, (index + 1) * HEADS // 2)
        part = differentiate(make_rank(2, index), scores[:, own], slopes[:, own])
        assert torch.equal(part, whole[:, own])
