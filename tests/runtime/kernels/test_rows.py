"""The kernels that reduce rows against the chains they stand for: values and gradients in every dtype and layout."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from autoptd.runtime.kernels.operands import HALF
from tests.marks import cover_pairs, slow_rows_but
from tests.runtime.kernels.row_cases import CASES, RowCase

CPU = torch.device("cpu")
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def differentiate(function: Any, operands: list[Tensor]) -> list[Tensor]:
    """The function's values and its gradients with respect to all operands that want one."""
    values = function(*operands)
    slopes = [torch.linspace(-1, 2, x.numel(), dtype=torch.float64).view(x.shape).sin().to(x) for x in values]
    wanted = [operand for operand in operands if operand.requires_grad]
    return [*(x.detach() for x in values), *torch.autograd.grad(values, wanted, slopes)]


def double(operands: list[Tensor]) -> list[Tensor]:
    return [
        operand if operand.dtype == torch.bool else operand.detach().double().requires_grad_() for operand in operands
    ]


def error(found: Tensor, truth: Tensor) -> float:
    """Root mean square of the difference, relative to the truth's."""
    assert found.shape == truth.shape
    scale = truth.double().square().mean().sqrt() + 1e-300
    return float((found.double() - truth).square().mean().sqrt() / scale)


@pytest.mark.parametrize(
    ("name", "shape", "strided"), cover_pairs(CASES, [(4, 5, 7), (2, 3, 4, 9), (2, 2, 1030)], [False, True]), ids=str
)
def test_the_meaning_is_the_chains(name: str, shape: tuple[int, ...], strided: bool) -> None:
    case = CASES[name]
    operands = case.make(shape, torch.float64, CPU, strided=strided)
    expected = differentiate(case.chain, operands)
    for found, wanted in zip(differentiate(case.kernel, operands), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-13)


SMOOTH = {name: case for name, case in CASES.items() if "added" not in name}  # -inf has no neighbours


@pytest.mark.parametrize("case", SMOOTH.values(), ids=SMOOTH)
def test_gradients_are_those_of_finite_differences(case: RowCase) -> None:
    assert torch.autograd.gradcheck(case.kernel, case.make((2, 3, 5), torch.float64, CPU))


TILES = {
    "odd": (torch.float32, (3, 5, 7), False, 4096),
    "odd float16": (torch.float16, (3, 5, 7), True, 4096),
    "wide": (torch.float32, (3, 3, 20), True, 8),
    "wide float16": (torch.float16, (2, 9, 16), False, 8),
    "wide bfloat16": (torch.bfloat16, (3, 3, 21), False, 8),
}


# Each case with two of the tiles, in turn.
QUICK = [
    (name, tile)
    for number, name in enumerate(CASES)
    for place, tile in enumerate(TILES)
    if (place - number) % len(TILES) in (0, 2)
]


@pytest.mark.parametrize(("name", "tile"), slow_rows_but(QUICK, product(CASES, TILES)))
def test_triton_is_no_worse_than_the_chain(
    name: str, tile: str, kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, (dtype, shape, strided, widest) = CASES[name], TILES[tile]
    monkeypatch.setattr("autoptd.runtime.kernels.triton.tiles.TILE", min(widest * 4, 4096))
    operands = case.make(shape, dtype, kernel_device, strided=strided)
    truth = differentiate(case.chain, double(operands))
    of_chain = differentiate(case.chain, operands)
    found = differentiate(case.kernel, operands)
    # The interpreter cuts bfloat16 off where a GPU rounds it: twice the error, and it adds up. In float32 both
    # err by the order in which they sum.
    share = 1.5 if dtype == torch.float32 else 1.05
    share = 3 if dtype == torch.bfloat16 and kernel_device.type == "cpu" else share
    for ours, theirs, exact in zip(found, of_chain, truth, strict=True):
        assert ours.dtype == theirs.dtype
        # Of the sum that is saved, and of the result; each half a bit at most, and of few elements that is all.
        two_roundings = share * (1.0 if exact.count_nonzero() < 100 else 0.42) * torch.finfo(dtype).eps
        assert error(ours, exact) <= max(share * error(theirs, exact), two_roundings) + 4e-7


@every_case
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_the_meaning_in_half_precision_is_no_worse_than_the_chain(case: RowCase, dtype: torch.dtype) -> None:
    operands = case.make((3, 5, 96), dtype, CPU)
    truth = differentiate(case.chain, double(operands))
    of_chain = differentiate(case.chain, operands)
    for ours, theirs, exact in zip(differentiate(case.kernel, operands), of_chain, truth, strict=True):
        assert ours.dtype == theirs.dtype
        assert error(ours, exact) <= max(1.05 * error(theirs, exact), 0.42 * torch.finfo(dtype).eps)
