"""Gradients of half-precision weights, added to their float32 sums by the products that make them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from autoptd.runtime import collectives, kernels
from autoptd.runtime.comm.rank import Rank
from autoptd.runtime.optimizer import gradient_sums
from autoptd.runtime.optimizer.gradient_sums import WideSum
from autoptd.runtime.program.mesh import Mesh

RANK = Rank.local(Mesh(1, 1, 1))


def add_plainly(self: WideSum, left: Tensor, right: Tensor) -> None:
    """What the product means, which a CPU has no operator for."""
    product = left.float() @ right.float()
    self.sum = product if self.sum is None else self.sum + product


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if request.param == "cpu":
        monkeypatch.setattr(gradient_sums, "product_devices", {"cpu"})
        monkeypatch.setattr(WideSum, "add_product", add_plainly)
    return str(request.param)


def sum_gradients(way: str, xs: list[Tensor], weight: Tensor, sums: bool) -> tuple[Tensor, list[Tensor]]:
    """The sum of the weight's gradients over the microbatches `xs`, and the gradients of these."""
    leaf = weight.detach().requires_grad_()
    own = WideSum(leaf) if sums else None
    of_x = []
    for x in xs:
        x = x.detach().requires_grad_()
        if way == "linear":
            y = kernels.linear(x, leaf)
        elif way == "copied":
            y = collectives.copied_linear(RANK, x, leaf)
        elif way == "copied, transposed":
            y = collectives.copied_linear(RANK, x, leaf, transposed=True)
        else:
            y = functional.linear(x, leaf)
        y.float().square().sum().backward()
        assert x.grad is not None
        of_x.append(x.grad)
    found = leaf.grad if own is None else own.sum
    assert found is not None
    assert own is None or leaf.grad is None
    return found, of_x


@pytest.mark.parametrize("way", ["linear", "copied", "copied, transposed"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_sum_in_the_product_is_not_rounded_in_between(device: str, way: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(24, 16, generator=generator).mul_(0.1).to(device, dtype)
    weight = weight.t().contiguous() if way.endswith("transposed") else weight
    xs = [torch.randn(4, 8, 16, generator=generator).to(device, dtype) for _ in range(4)]
    exact = torch.zeros(weight.shape, dtype=torch.float64, device=device)
    for x in xs:
        rows = x.reshape(-1, 16)
        y = functional.linear(x, weight.t() if way.endswith("transposed") else weight)
        gradient = (2 * y.float()).to(dtype).reshape(-1, 24)
        left, right = (rows, gradient) if way.endswith("transposed") else (gradient, rows)
        exact += left.double().t() @ right.double()
    found, of_x = sum_gradients(way, xs, weight, sums=True)
    assert found.dtype == torch.float32
    error = float((found.double() - exact).norm() / exact.norm())
    assert error < 5e-6
    if way == "linear":  # rounded to half precision before each addition, as it was
        rounded, same = sum_gradients("torch", xs, weight, sums=False)
        assert float((rounded.double() - exact).norm() / exact.norm()) > 20 * error
        for one, other in zip(of_x, same, strict=True):
            torch.testing.assert_close(one, other, rtol=2 * torch.finfo(dtype).eps, atol=1e-3)


def test_without_a_sum_it_is_torchs_linear() -> None:
    x, weight, bias = torch.randn(3, 16), torch.randn(24, 16, requires_grad=True), torch.randn(24)
    assert torch.equal(kernels.linear(x, weight, bias), functional.linear(x, weight, bias))
