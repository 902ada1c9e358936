"""A packed projection whose parts lie one behind the other: the same numbers as ``linear``, then split."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from autoptd.runtime import kernels


def make(transposed: bool, bias: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 2, 8, generator=generator, dtype=torch.float64)
    weight = torch.randn(12, 8, generator=generator, dtype=torch.float64)
    given = torch.randn(12, generator=generator, dtype=torch.float64) if bias else None
    return x, weight.t().contiguous() if transposed else weight, given


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("strided", [False, True])
def test_a_packed_linear_is_a_linear_in_parts(transposed: bool, bias: bool, strided: bool) -> None:
    x, weight, given = make(transposed, bias)
    x = x.transpose(0, 1) if strided else x
    tensors = [t.clone(memory_format=torch.preserve_format).requires_grad_() for t in (x, weight)]
    biases = None if given is None else given.clone().requires_grad_()
    found = kernels.split_linear(tensors[0], tensors[1], biases, 3, transposed)
    assert found.shape == (3, *x.shape[:-1], 4)
    assert all(part.is_contiguous() for part in found.unbind())
    others = [t.clone(memory_format=torch.preserve_format).requires_grad_() for t in (x, weight)]
    plain = None if given is None else given.clone().requires_grad_()
    matrix = others[1].t() if transposed else others[1]
    expected = torch.stack(functional.linear(others[0], matrix, plain).split(4, -1))
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-14)
    torch.manual_seed(1)
    direction = torch.randn_like(expected)
    (found * direction).sum().backward()
    (expected * direction).sum().backward()
    for mine, reference in zip([*tensors, biases], [*others, plain], strict=True):
        if mine is not None and reference is not None:
            torch.testing.assert_close(mine.grad, reference.grad, rtol=1e-13, atol=1e-13)


def test_only_what_is_asked_for_gets_a_gradient() -> None:
    x, weight, bias = make(False, True)
    assert bias is not None
    kernels.split_linear(x, weight, bias.requires_grad_(), 3).sum().backward()
    assert bias.grad is not None
    assert torch.equal(bias.grad, torch.full((12,), 10.0, dtype=torch.float64))


@pytest.mark.parametrize(
    ("shapes", "sections", "words"),
    [
        (((5, 8), (12, 8), (12,)), 5, r"\[5, -1, 8\]' is invalid for input of size 96"),
        (((5, 6), (12, 8), (12,)), 3, r"cannot be multiplied \(5x6 and 8x4\)"),
        (((5, 8), (12, 8), (8,)), 3, r"\[3, 1, 4\]' is invalid for input of size 8"),
    ],
)
def test_torch_refuses(shapes: tuple[tuple[int, ...], ...], sections: int, words: str) -> None:
    x, weight, bias = (torch.zeros(shape) for shape in shapes)
    with pytest.raises(RuntimeError, match=words):
        kernels.split_linear(x, weight, bias, sections)
