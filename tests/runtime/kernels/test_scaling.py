"""Rows of gradients times the gradient of the loss, by the kernel and by its meaning."""

from __future__ import annotations

import pytest
import torch

from autoptd.runtime.engine.step import scale_rows

SIZES = (1, 4096, 5000)


@pytest.mark.parametrize("factor", [1.0, 0.25, float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_are_multiplied_in_place(kernel_device: torch.device, factor: float, dtype: torch.dtype) -> None:
    rows = [torch.linspace(-3, 5, size, device=kernel_device) for size in SIZES]
    expected = [row * factor for row in rows]
    places = [row.data_ptr() for row in rows]
    scale_rows(rows, torch.tensor(factor, dtype=dtype, device=kernel_device))
    assert all(torch.equal(row, wanted) for row, wanted in zip(rows, expected, strict=True))
    assert [row.data_ptr() for row in rows] == places


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_so_are_those_that_have_no_kernel(kernel_device: torch.device, dtype: torch.dtype) -> None:
    row = torch.linspace(-3, 5, 7, device=kernel_device).to(dtype)
    expected = row * 0.1
    scale_rows([row], torch.tensor(0.1, dtype=torch.float64, device=kernel_device))
    torch.testing.assert_close(row, expected)


def test_a_factor_of_one_writes_nothing() -> None:
    row = torch.ones(3)
    scale_rows([row], torch.ones(()))
    assert row._version == 0
