"""The elementwise kernels as operators of torch: registration, what is saved and refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from autoptd.runtime import kernels
from autoptd.runtime.kernels.activation import SQRT_2_OVER_PI
from tests.marks import cover_pairs
from tests.masks import keep_mask
from tests.runtime.kernels.elementwise_cases import CASES, OPERATOR, make_rank
from tests.runtime.kernels.test_rows import differentiate

CPU = torch.device("cpu")
RANK = make_rank()
KEY, MOMENT = [OPERATOR, 1, 2, 24, 1, 1, 0], torch.tensor([7, 2, 3])
some_cases = pytest.mark.parametrize(
    "name", ["bias_gelu rounded", "gated silu", "rotary partial", "dropout", "bias + dropout + residual"]
)


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, dtype=dtype, requires_grad=True)


def calls() -> dict[str, tuple[Any, ...]]:
    """Arguments of every operator."""
    x, other, vector, table = draw(2, 3, 8), draw(2, 3, 8), draw(8), torch.randn(3, 6)
    turned = draw(2, 8, 3).transpose(1, 2)
    return {
        "bias_gelu": (x, vector, "gelu", SQRT_2_OVER_PI),
        "bias_gelu_backward": (x, other, vector, "gelu_tanh", 0.79788456),
        "gated_product": (turned, other, "silu"),
        "gated_product_backward": (turned, other, x, "gelu"),
        "rotary_embedding": (turned, table, table, True, False),
        "bias_dropout_add": (x, vector, turned, 0.5, KEY, MOMENT),
        "bias_dropout_add_backward": (turned, 0.5, KEY, MOMENT, torch.float32, torch.float32),
    }


@pytest.mark.parametrize("name", calls())
def test_operators_are_registered_as_torch_asks(name: str) -> None:
    arguments = calls()[name]
    if name.endswith("backward"):  # no gradient of a gradient
        arguments = tuple(a.detach() if isinstance(a, Tensor) else a for a in arguments)
    torch.library.opcheck(getattr(torch.ops.autoptd, name).default, arguments)


class Listener(TorchDispatchMode):
    """The names of the operators called under it, in their order."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(operator.name().partition(".")[0])
        return operator(*args, **(kwargs or {}))


def listen(kernel: Callable[..., Any], plain: list[Tensor], heard: list[Tensor]) -> list[str]:
    """The operators that a dispatch mode hears of a kernel and its backward, which is the plain call bit for bit.

    The plain call goes past torch's registration, whose nodes have names of their own.
    """
    assert not any("Generated" in str(value.grad_fn) for value in kernel(*plain))
    expected = differentiate(kernel, plain)
    with Listener() as listener:
        found = differentiate(kernel, heard)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    return [name for name in listener.names if name.startswith("autoptd::")]


@some_cases
def test_dispatch_modes_hear_them(name: str) -> None:
    case = CASES[name]
    plain, heard = (case.make((2, 3, 8), torch.float32, CPU) for _ in range(2))
    assert len(listen(lambda *operands: (case.kernel(*operands),), plain, heard)) == 2  # and backward


class Wrapped(nn.Module):
    """What exports a kernel."""

    def __init__(self, kernel: Callable[..., Any]) -> None:
        super().__init__()
        self.kernel = kernel

    def forward(self, *operands: Tensor) -> Any:
        return self.kernel(*operands)


@some_cases
def test_export_takes_them(name: str) -> None:
    case = CASES[name]
    operands = [operand.detach() for operand in case.make((2, 3, 8), torch.float32, CPU)]
    exported = torch.export.export(Wrapped(case.kernel), tuple(operands))
    assert any("autoptd" in str(node.target) for node in exported.graph.nodes)
    assert torch.equal(exported.module()(*operands), case.kernel(*operands))


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch has no rule for them, and loops
@pytest.mark.parametrize("name", ["gated silu", "rotary partial"])
def test_vmap_takes_them(name: str) -> None:
    case = CASES[name]
    operands = case.make((2, 3, 8), torch.float32, CPU)
    batched = [torch.stack([operand, operand + 1]).detach() for operand in operands]
    expected = torch.stack([case.kernel(*alone) for alone in zip(*batched, strict=True)])
    torch.testing.assert_close(torch.func.vmap(case.kernel)(*batched), expected)


@some_cases
def test_shapes_on_meta_are_those_of_the_cpu(name: str) -> None:
    case = CASES[name]
    operands = case.make((4, 3, 8), torch.bfloat16, CPU, strided=True)
    found = case.kernel(*(operand.to("meta") for operand in operands))
    expected = case.kernel(*operands)
    assert (found.shape, found.dtype, found.stride()) == (expected.shape, expected.dtype, expected.stride())


@pytest.mark.parametrize(
    ("shape", "sample", "p", "part"),
    cover_pairs([(2, 3, 5), (2, 5, 3, 4), (3, 2, 40)], [0, 1, None], [0.1, 0.9, 1.0], [(1, 0), (3, 0), (3, 1), (3, 2)]),
    ids=str,
)
def test_triton_draws_the_same_bits(
    shape: tuple[int, ...], sample: int | None, p: float, part: tuple[int, int], kernel_device: torch.device
) -> None:
    size, index = part
    rank, divided = make_rank(size, index), len(shape) - 1 if index < 2 else 2 if sample != 2 else 1
    dropped = kernels.dropout(rank, torch.ones(shape, device=kernel_device), p, OPERATOR, sample, divided)
    mask = keep_mask(rank.randomness, p, OPERATOR, shape, CPU, sample=sample, divided=divided, size=size, index=index)
    assert torch.equal(dropped.cpu() != 0, mask)
    assert torch.equal(dropped.cpu()[mask], torch.full((int(mask.sum()),), 1 / (1 - p) if p < 1 else 0.0))


def saved_bytes(function: Callable[[], Tensor]) -> int:
    storages: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        function()
    return sum(storages.values())


def test_no_mask_is_stored(kernel_device: torch.device) -> None:
    x, bias, residual = (operand.to(kernel_device) for operand in (draw(4, 64), draw(64), draw(4, 64)))
    assert saved_bytes(lambda: kernels.bias_dropout_add(RANK, x, bias, residual, 0.5, 1)) == 0


def test_dtypes_are_promoted_as_torch_does() -> None:
    half, single = draw(3, 8, dtype=torch.bfloat16), draw(8)
    value = kernels.bias_gelu(half, single)
    torch.testing.assert_close(value, functional.gelu(half + single))
    value.sum().backward()
    assert half.grad is not None
    assert half.grad.dtype == torch.bfloat16
    summed = kernels.bias_dropout_add(RANK, half, None, draw(3, 8), 0.5, 1)
    assert summed.dtype == torch.float32
    summed.sum().backward()
    assert kernels.gated_product(half, draw(3, 8)).dtype == torch.float32
    assert kernels.rotary_embedding(half, torch.ones(3, 8), torch.ones(3, 8)).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_grouped_attention_is_that_of_repeated_heads(dtype: torch.dtype, kernel_device: torch.device) -> None:
    q, k, v = (torch.randn(2, heads, 5, 16, dtype=dtype, device=kernel_device) for heads in (6, 2, 2))
    found = kernels.grouped_attention(q, k, v, is_causal=True, scale=0.3)
    k, v = (x.repeat_interleave(3, 1) for x in (k, v))
    wanted = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)
    torch.testing.assert_close(found, wanted)


def test_dropout_of_nothing_is_nothing() -> None:
    x = draw(3, 8)
    assert kernels.bias_dropout_add(RANK, x) is x
    resting = make_rank()
    resting.randomness.training = False
    assert torch.equal(kernels.bias_dropout_add(resting, x, None, x, 0.5, 1), x + x)


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (2, 0, 4)])
def test_empty_tensors(shape: tuple[int, ...], kernel_device: torch.device) -> None:
    for name in ("bias_gelu", "gated silu", "rotary", "bias + dropout + residual"):
        value = CASES[name].kernel(*CASES[name].make((1, *shape), torch.float32, kernel_device))
        assert value.shape == (1, *shape)
        value.sum().backward()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, v: kernels.bias_gelu(x, v[:3]), r"x \[2, 8\] and bias \[3\], expected \[\.\., h\] and \[h\]"),
        (
            lambda x, v: kernels.grouped_attention(x.view(1, 1, 2, 8), x.view(1, 2, 1, 8), x.view(1, 2, 1, 8)),
            r"q \[1, 1, 2, 8\], k \[1, 2, 1, 8\]",
        ),
        (
            lambda x, v: kernels.grouped_attention(x.view(1, 2, 1, 8), x.view(1, 1, 4, 4), x.view(1, 1, 4, 4)),
            r"q \[1, 2, 1, 8\], k \[1, 1, 4, 4\]",
        ),
        (lambda x, v: kernels.bias_gelu(x, v.long()), "bias of torch.int64, expected float64, float32"),
        (lambda x, v: kernels.bias_gelu(x, v.to("meta")), "bias on meta, others are on cpu"),
        (
            lambda x, v: kernels.bias_gelu(x, v, "erf"),  # type: ignore[arg-type]
            "approximate='erf', expected 'none' or 'tanh'",
        ),
        (
            lambda x, v: kernels.bias_gelu(x, v, coefficient=0.79788456),
            "coefficient=0.79788456, expected approximate='tanh' too",
        ),
        (lambda x, v: kernels.gated_product(x, v), r"gate \[2, 8\] and up \[8\], expected \[\.\., h\] and the same"),
        (
            lambda x, v: kernels.gated_product(x, x, "relu"),  # type: ignore[arg-type]
            "activation='relu', expected 'silu', 'gelu' or",
        ),
        (lambda x, v: kernels.bias_dropout_add(RANK, x, x), r"x \[2, 8\] and bias \[2, 8\], expected"),
        (lambda x, v: kernels.bias_dropout_add(RANK, x, v, v), r"residual \[8\], expected \[\.\., h\] and the same"),
        (lambda x, v: kernels.bias_dropout_add(RANK, x, v, p=-0.1), r"probability is -0\.1, expected 0 to 1"),
        (lambda x, v: kernels.dropout(RANK, x, 0.5, 1, shape=(2, 2, 2)), r"\[2, 8\] cannot be seen as \[2, 2, 2\]"),
        (lambda x, v: kernels.dropout(RANK, x.int(), 0.5, 1), "x of torch.int32"),
        (lambda x, v: kernels.dropout(RANK, x, 0.5, 1, sample=2), r"sample is 2, expected a dimension of \[2, 8\]"),
        (lambda x, v: kernels.dropout(RANK, x, 0.5, 1, divided=-3), r"divided is -3, expected a dimension of"),
        (
            lambda x, v: kernels.grouped_attention(*[x.view(1, 2, 1, 8).int()] * 3),
            "grouped_attention was given q of torch.int32",
        ),
        (lambda x, v: kernels.rotary_embedding(x, v[:3], v[:3]), r"cos \[3\] and sin \[3\], expected"),
        (lambda x, v: kernels.rotary_embedding(x, v, v[:4]), r"cos \[8\] and sin \[4\], expected"),
        (lambda x, v: kernels.rotary_embedding(x, x[None], x[None]), r"cos \[1, 2, 8\]"),
        (lambda x, v: kernels.rotary_embedding(x, torch.ones(3, 8), torch.ones(3, 8)), r"cos \[3, 8\]"),
        (lambda x, v: kernels.rotary_embedding(x, v.requires_grad_(), v), "tables that require a gradient"),
    ],
)
def test_kernels_refuse_operands_that_do_not_fit(call: Callable[[Tensor, Tensor], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(torch.ones(2, 8), torch.ones(8))


def test_triton_may_be_absent_and_nothing_slow_is_imported() -> None:
    code = (
        "import importlib.util, sys, torch\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *other: None if name == 'triton' else find(name, *other)\n"
        "from autoptd.runtime import kernels\n"
        "from autoptd.runtime.kernels import registration\n"
        "registration.kernel_devices = {'cpu'}\n"
        "kernels.bias_gelu(torch.ones(2, 4), torch.ones(4))\n"
        "print([name for name in ('triton', 'torch._dynamo') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    assert run.stdout.strip() == "[]"
