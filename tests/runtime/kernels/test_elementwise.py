"""The elementwise kernels against the chains they stand for: values and gradients in every dtype and layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from autoptd.runtime import kernels
from autoptd.runtime.kernels.operands import HALF
from tests.marks import cover_pairs
from tests.masks import keep_mask
from tests.runtime.kernels.elementwise_cases import CASES, OPERATOR, Case, make_rank, scatter

CPU = torch.device("cpu")
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def differentiate(function: Any, operands: list[Tensor], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """The function's value and its gradients with respect to all operands that want one.

    The gradient of the value is rounded to `dtype`, so that float64 begins with the same numbers as lower precision.
    """
    value = function(*operands)
    slope = torch.linspace(-1, 2, value.numel(), dtype=torch.float64).view(value.shape).to(dtype)
    wanted = [operand for operand in operands if operand.requires_grad]
    return [value.detach(), *torch.autograd.grad(value, wanted, slope.to(value.device, value.dtype))]


def double(operands: list[Tensor]) -> list[Tensor]:
    return [operand.detach().double().requires_grad_(operand.requires_grad) for operand in operands]


def error(found: Tensor, truth: Tensor) -> float:
    """Root mean square of the difference, relative to the truth's."""
    scale = truth.double().square().mean().sqrt() + 1e-300
    return float((found.double() - truth).square().mean().sqrt() / scale)


@pytest.mark.parametrize(
    ("name", "shape", "strided"), cover_pairs(CASES, [(2, 3, 8), (3, 5, 7), (2, 2, 1030)], [False, True]), ids=str
)
def test_the_meaning_is_the_chains(name: str, shape: tuple[int, ...], strided: bool) -> None:
    case = CASES[name]
    operands = case.make(shape, torch.float64, CPU, strided=strided)
    expected = differentiate(case.chain, operands)
    for found, wanted in zip(differentiate(case.kernel, operands), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-13)


@every_case
def test_gradients_are_those_of_finite_differences(case: Case) -> None:
    assert torch.autograd.gradcheck(case.kernel, case.make((2, 3, 6), torch.float64, CPU))


@pytest.mark.parametrize(
    ("name", "shape", "strided", "dtype"),
    cover_pairs(CASES, [(3, 5, 7), (2, 2, 1300), (5, 3, 16)], [False, True], [torch.float32, *HALF]),
    ids=str,
)
def test_triton_is_no_worse_than_the_chain(
    name: str, shape: tuple[int, ...], strided: bool, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    case = CASES[name]
    operands = case.make(shape, dtype, kernel_device, strided=strided)
    truth = differentiate(case.chain, double(operands), dtype)
    of_chain = differentiate(case.chain, operands, dtype)
    found = differentiate(case.kernel, operands, dtype)
    if kernel_device.type == "cuda" and case.by_sigmoid is not None:
        # The card's float32 sigmoid is off by a unit in the last place, which 1 - sigmoid keeps where it is small.
        of_card = differentiate(case.by_sigmoid, operands, dtype)
        of_chain = [
            max(pair, key=lambda x: error(x, exact)) for *pair, exact in zip(of_chain, of_card, truth, strict=True)
        ]
    # The interpreter cuts bfloat16 off where a GPU rounds it: twice the error.
    cut = dtype == torch.bfloat16 and kernel_device.type == "cpu"
    share = 2.05 if cut else 1.02
    for ours, theirs, exact in zip(found, of_chain, truth, strict=True):
        assert ours.dtype == theirs.dtype
        # The root mean square of a uniform error; of few elements, as a bias's gradient, it may be half a unit.
        one_rounding = (0.6 if cut else 0.5 if exact.numel() < 100 else 0.3) * torch.finfo(dtype).eps
        assert error(ours, exact) <= max(share * error(theirs, exact), one_rounding) + 4e-7


@every_case
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
def test_the_meaning_in_half_precision_is_no_worse_than_the_chain(case: Case, dtype: torch.dtype) -> None:
    operands = case.make((3, 5, 96), dtype, CPU)
    truth = differentiate(case.chain, double(operands))
    of_chain = differentiate(case.chain, operands)
    for ours, theirs, exact in zip(differentiate(case.kernel, operands), of_chain, truth, strict=True):
        assert ours.dtype == theirs.dtype
        assert error(ours, exact) <= 1.02 * error(theirs, exact) + 1e-7


@pytest.mark.parametrize("name", ["gated silu", "gated gelu", "gated gelu_tanh"])
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("other", [0, 1])
def test_a_gate_may_lie_otherwise_than_what_it_gates(name: str, dtype: torch.dtype, other: int) -> None:
    """Beside float64, which oneDNN does not take: of a GELU it writes as the argument lies, not the result."""
    operands = CASES[name].make((3, 5, 16), dtype, CPU)
    operands[other] = scatter(operands[other].detach(), 0).requires_grad_()
    assert operands[other].stride() != operands[1 - other].stride()
    truth = differentiate(CASES[name].chain, double(operands))
    for found, exact in zip(differentiate(CASES[name].kernel, operands), truth, strict=True):
        assert error(found, exact) <= 2 * torch.finfo(dtype).eps


def test_gelu_cancels_nowhere(kernel_device: torch.device) -> None:
    """float32 has 24 bits, and 1 + erf loses them where x is negative: a fifth of the value at -5."""
    x = torch.linspace(-8, 14, 22001, device=kernel_device).requires_grad_()
    exact = x.detach().double().requires_grad_()
    found = kernels.bias_gelu(x, torch.zeros_like(x))
    truth = exact * torch.special.erfc(-exact / 2**0.5) / 2  # torch's own cancels in float64 too
    assert float(((found - truth) / truth).abs()[x != 0].max()) < 5e-6
    (slope,), (true_slope,) = torch.autograd.grad(found.sum(), x), torch.autograd.grad(truth.sum(), exact)
    assert float((slope - true_slope).abs().max()) < 5e-7


@every_case
def test_triton_counts_in_64_bits_where_it_must(
    case: Case, kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    operands = case.make((3, 5, 7), torch.float32, kernel_device, strided=True)
    narrow = differentiate(case.kernel, operands)
    monkeypatch.setattr("autoptd.runtime.kernels.triton.tiles.WIDE_FROM", 0)
    for wide, expected in zip(differentiate(case.kernel, operands), narrow, strict=True):
        assert torch.equal(wide, expected)


@pytest.mark.parametrize("name", ["bias_gelu", "gated silu", "bias + residual", "no samples"])
def test_a_single_row_has_no_other_dimension(name: str, kernel_device: torch.device) -> None:
    operands = CASES[name].make((9,), torch.float32, kernel_device)
    expected = differentiate(CASES[name].chain, operands)
    for found, wanted in zip(differentiate(CASES[name].kernel, operands), expected, strict=True):
        torch.testing.assert_close(found, wanted)
    plain = [operand.detach().double().requires_grad_() for operand in operands]
    assert torch.autograd.gradcheck(CASES[name].kernel, plain)


def test_a_single_number_is_dropped_or_kept(kernel_device: torch.device) -> None:
    for index in range(8):
        rank = make_rank()
        rank.randomness.sample = index
        x = torch.tensor(2.0, device=kernel_device, requires_grad=True)
        found = kernels.dropout(rank, x, 0.5, OPERATOR, sample=None)
        mask = keep_mask(rank.randomness, 0.5, OPERATOR, (), CPU, sample=None)
        assert found.shape == ()
        assert float(found.detach()) == 4.0 * float(mask)
        found.backward()
        assert float(x.grad) == 2.0 * float(mask)  # type: ignore[arg-type]
