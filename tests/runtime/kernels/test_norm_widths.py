"""The norms in Triton at the widths of models: one block of columns or three, held in registers or read again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.marks import cover_pairs
from tests.runtime.kernels.row_cases import CASES
from tests.runtime.kernels.test_row_operators import differentiate_sum
from tests.runtime.kernels.test_rows import differentiate, double, error

WIDTHS = (2048, 4096, 5120, 8192, 12288)
ODD = (3, 2051, 4097, 6145, 9001)


@pytest.fixture
def plan_backward(kernel_device: torch.device) -> Callable[..., dict[str, Any]]:
    """The plan of an H100, which the interpreter's is."""
    if kernel_device.type == "cuda":
        pytest.skip("another card has another memory")
    from autoptd.runtime.kernels.triton import norm

    return lambda width, item, centers, adds: norm.plan_backward(width, item, centers, adds, kernel_device)


@pytest.mark.parametrize(
    ("width", "centered", "other"),
    [
        (12288, (3, 4096, 1, 16, 1), (3, 4096, 1, 16, 1)),
        (8192, (1, 8192, 1, 8, 3), (1, 8192, 1, 8, 3)),
        (5120, (3, 2048, 1, 8, 3), (3, 2048, 1, 8, 3)),
        (4096, (1, 4096, 2, 8, 3), (1, 4096, 1, 8, 3)),
        (2048, (1, 2048, 4, 8, 3), (1, 2048, 2, 8, 3)),
    ],
)
def test_launch_shapes_are_those_measured(
    width: int, centered: tuple[int, ...], other: tuple[int, ...], plan_backward: Callable[..., dict[str, Any]]
) -> None:
    for centers, wanted in ((True, centered), (False, other)):
        plan = plan_backward(width, 2, centers, not centers)
        names = ("BLOCKS", "COLUMNS", "ROWS", "num_warps", "STAGES")
        assert tuple(plan[name] for name in names) == wanted


def test_what_is_added_changes_the_order_of_no_sum(plan_backward: Callable[..., dict[str, Any]]) -> None:
    for width in (*range(1, 70), *WIDTHS, *ODD, 16384, 25600):
        for item in (2, 4):
            for centers in (True, False):
                alone, beside = (plan_backward(width, item, centers, adds) for adds in (False, True))
                assert {**alone, "STAGES": 0} == {**beside, "STAGES": 0}
                assert alone["BLOCKS"] * alone["COLUMNS"] >= width
                read = 2 * item * alone["ROWS"] * alone["BLOCKS"] * alone["COLUMNS"]
                assert (alone["STAGES"] - 1) * read <= 0.75 * 232_448


@pytest.mark.parametrize(
    ("name", "width", "dtype"),
    cover_pairs(
        ["layer_norm", "rms_norm", "layer, all", "rms, residual"], [*WIDTHS, *ODD], [torch.float32, torch.float16]
    ),
    ids=str,
)
def test_wide_norms(name: str, width: int, dtype: torch.dtype, kernel_device: torch.device) -> None:
    """Of 7 rows a program has several under the interpreter, and one lies partly outside."""
    case = CASES[name]
    operands = case.make((7, width), dtype, kernel_device)
    truth = differentiate(case.chain, double(operands))
    of_chain = differentiate(case.chain, operands)
    for ours, theirs, exact in zip(differentiate(case.kernel, operands), of_chain, truth, strict=True):
        assert ours.dtype == theirs.dtype
        assert error(ours, exact) <= max(1.05 * error(theirs, exact), 0.42 * torch.finfo(dtype).eps) + 4e-7


@pytest.mark.parametrize(
    ("kind", "p", "width", "dtype"),
    cover_pairs(["layer", "rms"], [0.0, 0.3], [2048, 5120, 9001, 12288], [torch.float32, torch.float16]),
    ids=str,
)
def test_a_wide_sum_and_its_norm_have_the_same_bits(
    kind: str, p: float, width: int, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    """But for the gradient of the sum's bias."""
    together, apart = differentiate_sum(kind, p, dtype, kernel_device, width)
    assert all(map(torch.equal, together[:-1], apart[:-1]))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["layer_norm", "rms, residual"])
def test_the_sums_are_the_same_every_time(card: str, name: str) -> None:
    def run() -> list[Tensor]:
        operands = CASES[name].make((3000, 4096), torch.bfloat16, torch.device(card))
        return differentiate(CASES[name].kernel, operands)

    assert all(map(torch.equal, run(), run()))
