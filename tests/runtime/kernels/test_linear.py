"""Gradients of half-precision weights, added to their float32 sums by the operators that make them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import autoptd
from autoptd.runtime import collectives, kernels
from autoptd.runtime.comm.rank import Rank
from autoptd.runtime.kernels.linear import SUM, Linear
from autoptd.runtime.program.mesh import Mesh
from samples.gpt import GPT, GPTConfig

RANK = Rank.local(Mesh(1, 1, 1))
BIAS = torch.linspace(-1, 1, 24)


def add_plainly(own: Tensor, left: Tensor, right: Tensor, scale: float = 1.0) -> None:
    """What the product means, which a CPU has no operator for."""
    own += scale * left.float() @ right.float()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if request.param == "cpu":
        monkeypatch.setattr(sys.modules[Linear.__module__], "add_product", add_plainly)
    return str(request.param)


def bias_of(x: Tensor) -> Tensor:
    return BIAS.to(x)


def total_of(x: Tensor) -> Tensor:
    return bias_of(x).expand(*x.shape[:-1], len(BIAS))


# Each with a weight [out, in] = [24, 16], or [in, out]: ours, whose product adds to the sum, and torch's.
WAYS: dict[str, tuple[Callable[..., Tensor], bool]] = {
    "linear": (lambda x, w: kernels.linear(x, w), False),
    "linear, transposed": (lambda x, w: kernels.linear(x, w, bias_of(x), transposed=True), True),
    "copied": (lambda x, w: collectives.copied_linear(RANK, x, w), False),
    "copied, transposed": (lambda x, w: collectives.copied_linear(RANK, x, w, transposed=True), True),
    "in pieces": (lambda x, w: collectives.copied_linear(RANK, x, w, gathered="in pieces"), False),
    "scattered": (lambda x, w: collectives.scattered_linear(RANK, x, w), False),
    "scattered, transposed": (lambda x, w: collectives.scattered_linear(RANK, x, w, transposed=True), True),
    "added": (lambda x, w: kernels.add_linear(total_of(x), x, w, 0.3), False),
    "added, transposed": (lambda x, w: kernels.add_linear(total_of(x), x, w, transposed=True), True),
}


def sum_gradients(
    call: Callable[..., Tensor], xs: list[Tensor], weight: Tensor, sums: bool
) -> tuple[Tensor, list[Tensor]]:
    """The sum of the weight's gradients over the microbatches `xs`, and the gradients of these."""
    leaf = weight.detach().requires_grad_()
    own = torch.zeros_like(leaf, dtype=torch.float32)
    if sums:
        setattr(leaf, SUM, own)
    of_x = []
    for x in xs:
        if x.is_floating_point():
            x = x.detach().requires_grad_()
        y = call(x, leaf)
        slopes = torch.linspace(0.5, 2, y.numel(), device=y.device).sin().view(y.shape)
        y.backward(slopes.bfloat16().to(y.dtype))  # the same of every dtype
        of_x += [] if x.grad is None else [x.grad]
    assert sums == (leaf.grad is None)
    return own if leaf.grad is None else leaf.grad, of_x


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_sum_in_the_product_is_not_rounded_in_between(device: str, way: str, dtype: torch.dtype) -> None:
    call, transposed = WAYS[way]
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(24, 16, generator=generator).mul_(0.1).to(device, dtype)
    weight = weight.t().contiguous() if transposed else weight
    xs = [torch.randn(4, 8, 16, generator=generator).to(device, dtype) for _ in range(4)]
    found, of_x = sum_gradients(call, xs, weight, sums=True)
    rounded, same = sum_gradients(call, xs, weight, sums=False)
    for one, other in zip(of_x, same, strict=True):
        torch.testing.assert_close(one, other, rtol=2 * torch.finfo(dtype).eps, atol=1e-3)
    exact, _ = sum_gradients(call, [x.double() for x in xs], weight.double(), sums=False)
    assert found.dtype == torch.float32
    assert error(found, exact) < 1e-5
    assert error(rounded, exact) > 20 * error(found, exact)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_an_added_linear_is_the_sum(transposed: bool, scale: float) -> None:
    """Value and gradients, of rows that do not lie in a row as well."""
    generator = torch.Generator().manual_seed(3)
    shapes = (24, 4, 8), (8, 4, 16), (16, 24) if transposed else (24, 16)
    given = [torch.randn(shape, generator=generator).double().requires_grad_() for shape in shapes]

    total, x, weight = given
    made = kernels.add_linear(total.permute(2, 1, 0), x, weight, scale, transposed)
    meant = total.permute(2, 1, 0) + functional.linear(x, weight.t() if transposed else weight) * scale
    torch.testing.assert_close(made, meant, rtol=1e-14, atol=1e-14)
    slopes = torch.randn(made.shape, generator=generator).double()
    pairs = (torch.autograd.grad(y, given, slopes) for y in (made, meant))
    for one, other in zip(*pairs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)
        assert one.shape == other.shape


def look_up(rank: Rank, rows: int, padding_idx: int) -> Callable[..., Tensor]:
    return lambda ids, table: kernels.embedding(rank, table, ids, rows, padding_idx)


@pytest.mark.parametrize("padding_idx", [-1, 2])
@pytest.mark.parametrize("divided", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_of_an_embedding_are_added_in_float32(
    device: str, padding_idx: int, divided: bool, dtype: torch.dtype
) -> None:
    """More of them than 3072, from which on torch takes another kernel on a GPU, and one row very often."""
    mesh = Mesh(2 if divided else 1, 1, 1)
    call = look_up(Rank.local(mesh), 200 if divided else 100, padding_idx)
    table = torch.randn(100, 16).to(device, dtype)
    xs = [torch.randint(200 if divided else 100, (2, 2000), device=device) for _ in range(4)]
    for x in xs:
        x[0, :1500] = 7
    xs.append(torch.tensor([[5, 3, 5, 2]], device=device, dtype=torch.int32))
    xs.append(torch.tensor(5, device=device))
    found, _ = sum_gradients(call, xs, table, sums=True)
    rounded, _ = sum_gradients(call, xs, table, sums=False)
    exact, _ = sum_gradients(call, xs, table.double(), sums=False)
    assert error(found, exact) < 1e-5
    assert error(rounded, exact) > 20 * error(found, exact)
    assert padding_idx < 0 or not found[padding_idx].any()
    for _ in range(5):
        again, _ = sum_gradients(call, xs, table, sums=True)
        assert torch.equal(again, found)


@pytest.mark.parametrize("way", [*WAYS, "embedding"])
def test_what_is_recomputed_adds_the_same(device: str, way: str) -> None:
    """A checkpoint hands the backward a weight that it saved itself, which is not the leaf."""
    call, transposed = WAYS.get(way) or (look_up(RANK, 24, -1), False)
    weight = torch.randn((16, 24) if transposed else (24, 16)).to(device, torch.bfloat16)
    xs = [torch.randn(4, 8, 16).to(device, torch.bfloat16), torch.randn(3, 16).to(device, torch.bfloat16)]
    xs = [torch.randint(24, (4, 8), device=device)] if way == "embedding" else xs
    kept, _ = sum_gradients(call, xs, weight, sums=True)
    recomputed, _ = sum_gradients(partial(checkpoint, call, use_reentrant=False), xs, weight, sums=True)
    assert torch.equal(recomputed, kept)


def test_a_step_leaves_to_autograd_what_no_product_adds(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a matrix nothing is left; the step's gradients are those of a step whose products add to no sum."""
    torch.manual_seed(0)
    sizes = GPTConfig(vocab_size=64, block_size=16, n_layer=2, n_head=4, n_embd=32)
    model = GPT(sizes).bfloat16()
    batch = {name: torch.randint(64, (4, 16)).to(device) for name in ("idx", "targets")}
    program = autoptd.compile(model, (1, 1, 1), microbatch_size=1, num_microbatches=4)
    found = []
    for devices in ({device}, set[str]()):
        monkeypatch.setattr("autoptd.runtime.optimizer.gradient_memory.product_devices", devices)
        parallel = program.bind(device)
        parallel(**batch)[1].backward()
        found.append({name: p.grad for name, p in parallel.named_parameters() if p.grad is not None})
    added, rounded = found
    assert added.keys() == rounded.keys() == dict(model.named_parameters()).keys()
    for name, gradient in added.items():
        assert error(gradient, rounded[name]) < 0.01, name
        assert gradient.dim() == 1 or name == "wpe.weight" or not torch.equal(gradient, rounded[name]), name


def test_without_a_sum_they_are_torchs() -> None:
    x, weight, bias = torch.randn(3, 16), torch.randn(24, 16, requires_grad=True), torch.randn(24)
    assert torch.equal(kernels.linear(x, weight, bias), functional.linear(x, weight, bias))
    matrix = weight.detach().t().contiguous()
    assert torch.equal(kernels.linear(x, matrix, bias, transposed=True), torch.addmm(bias, x, matrix))
    ids = torch.tensor([3, 5])
    assert torch.equal(kernels.lookup(weight, ids), functional.embedding(ids, weight))


@pytest.mark.gpu
def test_what_adds_to_a_sum_is_captured(card: str) -> None:
    leaf = torch.randn(96, 64, device=card).bfloat16().requires_grad_()
    setattr(leaf, SUM, torch.zeros_like(leaf, dtype=torch.float32))
    x = torch.randn(32, 64, device=card, dtype=torch.bfloat16)
    ids = torch.randint(96, (4000,), device=card)

    def step() -> None:
        torch.autograd.backward([kernels.linear(x, leaf).sum(), kernels.lookup(leaf, ids).sum()])

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    own = getattr(leaf, SUM)
    once = own.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
    own.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(own, once)
