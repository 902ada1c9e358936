"""The kernels that reduce rows as operators of torch: registration, what is saved and refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from autoptd.runtime import kernels
from tests.counting import elements
from tests.masks import keep_mask
from tests.runtime.kernels.elementwise_cases import OPERATOR, make_rank
from tests.runtime.kernels.row_cases import CASES, EPS, RANK
from tests.runtime.kernels.test_operators import Wrapped, listen
from tests.runtime.kernels.test_rows import differentiate, error

CPU = torch.device("cpu")
KEY, MOMENT = [OPERATOR, 1, 2, 24, 1, 1, 0], torch.tensor([7, 2, 3])
some_cases = pytest.mark.parametrize(
    "name", ["rms_norm", "layer, all", "rms, all", "layer, residual", "softmax, causal", "softmax, learnt"]
)


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, dtype=dtype, requires_grad=True)


def calls() -> dict[str, tuple[Any, ...]]:
    """Arguments of every operator, by its name and what stands behind a colon."""
    x, other, vector, scores = draw(2, 3, 8), draw(2, 3, 8), draw(8), draw(2, 3, 8)
    rows, logits, column = torch.rand(6), draw(6, 8), torch.arange(6)
    turned = draw(2, 8, 3).transpose(1, 2)
    statistics = torch.rand(2, 3, 1)
    return {
        "add_norm: layer_norm": (turned, vector, vector, EPS, None, None, 0.0, [], None, True),
        "add_norm: rms_norm": (turned, vector, None, EPS, None, None, 0.0, [], None, False),
        "add_norm: add_rms_norm": (turned, vector, None, EPS, vector, other, 0.5, KEY, MOMENT, False),
        "add_norm: add_layer_norm": (x, vector, vector, EPS, None, turned, 0.0, [], None, True),
        "add_norm_backward": (x, other, other, vector, None, statistics, 0.5, KEY, MOMENT, [True] * 3 + [False, True]),
        "scaled_softmax": (scores, draw(1, 3, 8), False, 0.3, 0.5, KEY, MOMENT),
        "scaled_softmax_backward": (scores, turned.softmax(-1), None, True, 0.3, 0.0, [], None),
        "cross_entropy_statistics": (logits.detach(), 7),
        "cross_entropy_rows": (logits, column, torch.rand(4, 6), 7),
        "cross_entropy_rows_backward": (rows, logits, column, torch.rand(4, 6), 7),
    }


@pytest.mark.parametrize("name", calls())
def test_operators_are_registered_as_torch_asks(name: str) -> None:
    arguments = calls()[name]
    if name.endswith("backward"):  # no gradient of a gradient
        arguments = tuple(a.detach() if isinstance(a, Tensor) else a for a in arguments)
    torch.library.opcheck(getattr(torch.ops.autoptd, name.partition(":")[0]).default, arguments)


@pytest.mark.parametrize("name", ["rms_norm", "layer, all", "rms, all", "softmax, causal", "softmax, learnt"])
def test_dispatch_modes_hear_them(name: str) -> None:
    case = CASES[name]
    plain, heard = (case.make((2, 3, 8), torch.float32, CPU) for _ in range(2))
    assert len(listen(case.kernel, plain, heard)) == 2  # and backward


@some_cases
def test_export_takes_them(name: str) -> None:
    case = CASES[name]
    operands = [operand.detach() for operand in case.make((2, 3, 8), torch.float32, CPU)]
    exported = torch.export.export(Wrapped(case.kernel), tuple(operands))
    for found, expected in zip(exported.module()(*operands), case.kernel(*operands), strict=True):
        assert torch.equal(found, expected)


def test_export_takes_the_loss() -> None:
    def loss(logits: Tensor, target: Tensor) -> Tensor:
        return kernels.cross_entropy(RANK, logits, target, 50)

    logits, target = draw(6, 50).detach(), torch.arange(6)
    exported = torch.export.export(Wrapped(loss), (logits, target))
    assert torch.equal(exported.module()(logits, target), loss(logits, target))


@some_cases
def test_shapes_on_meta_are_those_of_the_cpu(name: str) -> None:
    case = CASES[name]
    operands = case.make((4, 3, 8), torch.bfloat16, CPU, strided=True)
    found = case.kernel(*(operand.to("meta") for operand in operands))
    for one, other in zip(found, case.kernel(*operands), strict=True):
        assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())


def saved(function: Callable[[], Any]) -> list[tuple[torch.dtype, int]]:
    """dtype and elements of every tensor that is kept for backward, each once, parameters left out."""
    kept: dict[int, tuple[torch.dtype, int]] = {}

    def pack(x: Tensor) -> Tensor:
        kept[x.data_ptr()] = (x.dtype, x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        function()
    return sorted(kept.values(), key=lambda pair: (-pair[1], str(pair[0])))


def test_row_kernels_save_these_tensors_for_backward() -> None:
    x, vector = draw(4, 16, dtype=torch.bfloat16), draw(16, dtype=torch.bfloat16)
    scores, logits = draw(2, 16, 16, dtype=torch.bfloat16), draw(4, 64, dtype=torch.bfloat16)
    half, single = torch.bfloat16, torch.float32
    row, whole, weight = (single, 4), (half, 64), (half, 16)
    added: dict[str, Any] = {"bias": vector, "residual": x, "p": 0.5}
    assert saved(lambda: kernels.add_layer_norm(RANK, x, vector, vector, EPS, **added)) == [whole, weight, row, row]
    assert saved(lambda: kernels.add_rms_norm(RANK, x, vector, EPS, **added)) == [whole, weight, row]
    assert saved(lambda: kernels.scaled_softmax(RANK, scores, is_causal=True, p=0.5)) == [(half, 512)]
    assert saved(lambda: kernels.scaled_softmax(RANK, scores)) == [(half, 512)]
    target, counted = torch.arange(4), [(torch.bool, 4), (torch.int64, 4), (torch.int64, 1)]
    of_loss = saved(lambda: kernels.cross_entropy(RANK, logits, target, 64))
    assert of_loss == [(half, 256), (single, 4 * 4), *counted]
    whole_logits = draw(4, 64)
    of_loss = saved(lambda: kernels.cross_entropy(RANK, whole_logits, target, 64))
    assert of_loss == [(single, 256), (single, 4 * 4), *counted]


def test_dtypes_are_those_of_the_chains() -> None:
    half, single = draw(3, 8, dtype=torch.bfloat16), draw(8)
    assert kernels.rms_norm(half, single, EPS).dtype == torch.float32
    added, normed = kernels.add_layer_norm(RANK, half, single, residual=half)
    assert (added.dtype, normed.dtype) == (torch.bfloat16, torch.bfloat16)
    added, normed = kernels.add_layer_norm(RANK, half, single, residual=draw(3, 8))
    assert (added.dtype, normed.dtype) == (torch.float32, torch.float32)
    normed.sum().backward()
    assert half.grad is not None
    assert half.grad.dtype == torch.bfloat16
    assert kernels.scaled_softmax(RANK, half, draw(3, 8)).dtype == torch.bfloat16
    target = torch.arange(3)
    assert kernels.cross_entropy(RANK, half, target, 8).dtype == torch.bfloat16
    assert kernels.cross_entropy(RANK, half, target, 8, dtype=torch.float32).dtype == torch.float32


def test_an_unused_result_has_no_gradient() -> None:
    operands = CASES["layer, all"].make((2, 3, 8), torch.float64, CPU)
    for number in range(2):
        found, wanted = (
            torch.autograd.grad(function(*operands)[number].sum(), operands, allow_unused=True)
            for function in (CASES["layer, all"].kernel, CASES["layer, all"].chain)
        )
        for one, other in zip(found, wanted, strict=True):
            assert (one is None or not one.any()) if other is None else torch.allclose(one, other, 1e-12, 1e-13)


def test_nothing_to_add_is_the_norm_alone() -> None:
    x, weight = draw(3, 8), draw(8)
    same, normed = kernels.add_layer_norm(RANK, x, weight)
    assert same is x
    assert torch.equal(normed, functional.layer_norm(x, (8,), weight))
    same, normed = kernels.add_rms_norm(RANK, x, weight, EPS)
    assert same is x
    assert torch.equal(normed, kernels.rms_norm(x, weight, EPS))


sums_and_norms = pytest.mark.parametrize(
    ("kind", "p", "dtype"),
    [(k, p, d) for k in ("layer", "rms") for p in (0.0, 0.3) for d in (torch.float32, torch.bfloat16, torch.float16)],
    ids=str,
)


def differentiate_sum(
    kind: str, p: float, dtype: torch.dtype, device: torch.device, width: int = 24
) -> list[list[Tensor]]:
    """A sum, its norm, and gradients, x's bias last: of one call, and of the sum and the norm apart."""
    rows, vectors = [draw(2, 5, width) for _ in range(4)], [draw(width) for _ in range(3)]
    found = []
    for together in (True, False):
        x, residual, *outer = (row.detach().to(device, dtype).requires_grad_() for row in rows)
        bias, weight, offset = (vector.detach().to(device, dtype).requires_grad_() for vector in vectors)
        norm: list[Any] = [weight, *[offset] * (kind == "layer"), EPS]
        drawn: dict[str, Any] = {"p": p, "operator": OPERATOR}
        if together:
            joined = getattr(kernels, f"add_{kind}_norm")
            total, normed = joined(RANK, x, *norm, bias=bias, residual=residual, **drawn)
        else:
            total = kernels.bias_dropout_add(RANK, x, bias, residual, **drawn)
            normed = getattr(kernels, f"{kind}_norm")(total, *norm)
        operands = [x, residual, *norm[:-1], bias]
        gradients = torch.autograd.grad([total, normed], operands, [o.detach() for o in outer])
        found.append([total, normed, *gradients])
    return found


@sums_and_norms
def test_a_sum_and_its_norm_give_the_same_bits_together_and_apart(kind: str, p: float, dtype: torch.dtype) -> None:
    """As they stand where a stage, or a recomputed layer, ends between them."""
    together, apart = differentiate_sum(kind, p, dtype, CPU)
    assert all(map(torch.equal, together, apart))


@sums_and_norms
def test_triton_gives_a_sum_and_its_norm_the_same_bits(
    kind: str, p: float, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    """But for the gradient of the sum's bias, which a fused kernel adds up by rows."""
    if dtype == torch.bfloat16 and kernel_device.type == "cpu":
        pytest.skip("Triton's interpreter cuts bfloat16 off, and autograd's sum of gradients rounds it")
    together, apart = differentiate_sum(kind, p, dtype, kernel_device)
    assert all(map(torch.equal, together[:-1], apart[:-1]))
    torch.testing.assert_close(together[-1], apart[-1], rtol=2 * torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize("sample", [0, 1, None])
@pytest.mark.parametrize("width", [8, 7])
def test_triton_drops_the_same_elements(sample: int | None, width: int, kernel_device: torch.device) -> None:
    rank = make_rank(3, 1)
    shape = (2, 4, 3, width)
    place: dict[str, Any] = {"sample": sample, "divided": 2}
    mask = keep_mask(rank.randomness, 0.5, OPERATOR, shape, CPU, size=3, index=1, **place)
    x = torch.ones(shape, device=kernel_device)
    weights = kernels.scaled_softmax(rank, x, p=0.5, operator=OPERATOR, **place)
    assert torch.equal(weights.cpu() != 0, mask)
    added, _ = kernels.add_layer_norm(rank, x, x[0, 0, 0], p=0.5, operator=OPERATOR, **place)
    assert torch.equal(added.cpu() != 0, mask)


def test_a_causal_row_sees_nothing_of_the_masked(kernel_device: torch.device) -> None:
    scores = torch.randn(2, 21, 21)
    hidden = torch.ones(21, 21, dtype=torch.bool).triu(1)
    poisoned = scores.masked_fill(hidden, torch.nan).to(kernel_device).requires_grad_()
    weights = kernels.scaled_softmax(RANK, poisoned, is_causal=True)
    expected = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    torch.testing.assert_close(weights.cpu(), expected, rtol=1e-5, atol=1e-7)
    weights.square().sum().backward()
    assert poisoned.grad is not None
    assert not poisoned.grad.cpu().isnan().any()
    assert not poisoned.grad.cpu()[hidden.expand(2, -1, -1)].any()


@pytest.mark.parametrize("name", ["layer, all", "softmax, causal"])
def test_offsets_of_64_bits(name: str, kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    narrow = differentiate(case.kernel, case.make((2, 5, 12), torch.float32, kernel_device))
    monkeypatch.setattr("autoptd.runtime.kernels.triton.tiles.WIDE_FROM", 0)
    wide = differentiate(case.kernel, case.make((2, 5, 12), torch.float32, kernel_device))
    for one, other in zip(narrow, wide, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("shape", "widest"), [((5, 37), 4096), ((3, 200), 16)])
def test_cross_entropy_in_triton(
    shape: tuple[int, int],
    widest: int,
    dtype: torch.dtype,
    kernel_device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("autoptd.runtime.kernels.triton.tiles.TILE", widest)
    torch.manual_seed(0)
    storage = (3 * torch.randn(shape[0], shape[1] + 3)).to(kernel_device, dtype)
    target = torch.arange(shape[0], device=kernel_device) * 7
    target[1] = -100
    logits = storage[:, : shape[1]].requires_grad_()  # its rows lie apart
    vocabulary = shape[1] - 2  # and end in padding
    loss = kernels.cross_entropy(RANK, logits, target, vocabulary, dtype=torch.float32)
    plain = logits.detach().double().requires_grad_()
    expected = functional.cross_entropy(plain[:, :vocabulary], target)
    torch.testing.assert_close(loss.double(), expected, rtol=3e-6, atol=0)
    (found,) = torch.autograd.grad(loss, logits)
    (wanted,) = torch.autograd.grad(expected, plain)
    assert found.dtype == dtype
    assert error(found, wanted) < 0.6 * torch.finfo(dtype).eps + 3e-7
    assert not found[:, vocabulary:].any()


def test_cross_entropy_on_one_device_never_communicates_nor_widens() -> None:
    logits, target = draw(300, 4096, dtype=torch.bfloat16), torch.arange(300)
    with torch.profiler.profile(profile_memory=True) as profile:
        kernels.cross_entropy(RANK, logits, target, 4096).backward()
    whole = logits.numel() * 4
    largest = max(event.cpu_memory_usage for event in profile.events())
    assert largest < 0.75 * whole  # its gradient is half of that
    assert not elements(RANK.group("tensor"))


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 4)])
def test_empty_tensors(shape: tuple[int, ...], kernel_device: torch.device) -> None:
    for name in ("layer_norm", "rms_norm", "layer, all", "rms, all", "softmax, causal"):
        values = CASES[name].kernel(*CASES[name].make((1, *shape), torch.float32, kernel_device))
        assert all(value.shape == (1, *shape) for value in values)
        sum(value.sum() for value in values).backward()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda x, v: kernels.rms_norm(x, v[:3], EPS),
            r"rms_norm was given x \[2, 8\] and weight \[3\], expected \[\.\., h\] and \[h\]",
        ),
        (lambda x, v: kernels.rms_norm(x.int(), v, EPS), "rms_norm was given x of torch.int32, expected float64"),
        (lambda x, v: kernels.rms_norm(x, v.to("meta"), EPS), "weight on meta, others are on cpu"),
        (
            lambda x, v: kernels.add_layer_norm(RANK, x, v, residual=v),
            r"x \[2, 8\] and residual \[8\], expected \[\.\., h\] and the same",
        ),
        (lambda x, v: kernels.add_layer_norm(RANK, x, v, v.long()), "norm_bias of torch.int64"),
        (lambda x, v: kernels.add_rms_norm(RANK, x, v, EPS, bias=x), r"bias \[2, 8\], expected \[\.\., h\] and \[h\]"),
        (lambda x, v: kernels.add_rms_norm(RANK, x, v, EPS, p=1.5), "dropout probability is 1.5, expected 0 to 1"),
        (lambda x, v: kernels.layer_norm(x[0, 0], v[0]), r"x \[\] and weight \[\], expected \[\.\., h\]"),
        (lambda x, v: kernels.scaled_softmax(RANK, v), r"scores \[8\] of torch.float32, expected"),
        (lambda x, v: kernels.scaled_softmax(RANK, x, x, True), "a mask and is_causal=True; give one"),
        (lambda x, v: kernels.scaled_softmax(RANK, x, x.int()), r"mask \[2, 8\] of torch.int32 on cpu, expected bool"),
        (
            lambda x, v: kernels.scaled_softmax(RANK, x, x.to("meta")),
            r"scores \[2, 8\] on cpu and a mask \[2, 8\] of torch.float32 on meta",
        ),
        (lambda x, v: kernels.scaled_softmax(RANK, x, x[None]), r"mask \[1, 2, 8\] .* that broadcasts"),
        (lambda x, v: kernels.scaled_softmax(RANK, x, v[:3]), r"scores \[2, 8\] .* mask \[3\] .* that broadcasts"),
        (lambda x, v: kernels.cross_entropy(RANK, x, v[:2], 8), "a target of torch.float32, expected"),
        (lambda x, v: kernels.cross_entropy(RANK, x, v[:2].long().to("meta"), 8), "logits on cpu and a target on"),
    ],
)
def test_row_kernels_refuse_operands_that_do_not_fit(call: Callable[[Tensor, Tensor], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(torch.ones(2, 8), torch.ones(8))
