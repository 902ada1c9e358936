"""Launches that go past Triton's own search for a kernel's code: when they may, and what they hand over."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from autoptd.runtime import kernels
from autoptd.runtime.kernels import registration

pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from autoptd.runtime.kernels.triton import elementwise, tiles


class Kernel:
    """A stand-in for a kernel: how it was launched, the ordinary way and as code that is compiled already."""

    arg_names = ("x", "rows", "dropout", "ROWS", "KIND")

    def __init__(self, compiles: bool = True) -> None:
        self.compiles, self.ordinary, self.direct = compiles, list[Any](), list[Any]()

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def launch(*arguments: Any, **constants: Any) -> Any:
            self.ordinary.append((grid, arguments, constants))
            return Code(self.direct) if self.compiles else None

        return launch


class Code:
    def __init__(self, launches: list[Any]) -> None:
        self._launches = launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        return lambda *arguments: self._launches.append((grid, arguments))


CONSTANTS: dict[str, Any] = {"ROWS": 4, "KIND": "gelu", "num_warps": 8}


def test_a_launch_like_an_earlier_one_takes_its_code() -> None:
    kernel, x, other = Kernel(), torch.ones(8), torch.ones(8)
    tiles.launch(kernel, (3,), x, 5, dropout=(0.5, 7), **CONSTANTS)
    tiles.launch(kernel, (2, 6), other, 9, dropout=(0.1, 11), **CONSTANTS)
    assert kernel.ordinary == [((3,), (x, 5, (0.5, 7)), CONSTANTS)]
    ((grid, arguments),) = kernel.direct
    assert grid == (2, 6, 1)
    assert arguments[0] is other
    assert arguments[1:3] == (9, (0.1, 11))
    assert len(arguments) == len(Kernel.arg_names)


@pytest.mark.parametrize(
    ("arguments", "constants"),
    [
        ((torch.ones(9)[1:], 5, None), {}),  # not at a multiple of 16 bytes
        ((torch.ones(8, dtype=torch.bfloat16), 5, None), {}),
        ((torch.ones(8), 1, None), {}),
        ((torch.ones(8), 32, None), {}),
        ((torch.ones(8), 1 << 31 | 1, None), {}),
        ((torch.ones(8), 5, (0.5, 7)), {}),
        ((None, 5, None), {}),
        ((torch.ones(8), 5, None), {"ROWS": 8}),
        ((torch.ones(8), 5, None), {"num_warps": 4}),
    ],
)
def test_another_kind_of_launch_is_triton_s_to_compile(arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
    kernel = Kernel()
    tiles.launch(kernel, (1,), torch.ones(8), 5, dropout=None, **CONSTANTS)
    *others, dropout = arguments
    tiles.launch(kernel, (1,), *others, dropout=dropout, **{**CONSTANTS, **constants})
    assert len(kernel.ordinary) == 2
    assert not kernel.direct


def test_the_interpreter_is_launched_as_triton_does() -> None:
    kernel = Kernel(compiles=False)
    for _ in range(3):
        tiles.launch(kernel, (1,), torch.ones(8), 5, dropout=None, **CONSTANTS)
    assert len(kernel.ordinary) == 3


def take(value):  # type: ignore[no-untyped-def]
    """A kernel of one argument, for Triton's own binder."""


def test_triton_tells_no_more_arguments_apart() -> None:
    """Where two arguments have one kind, Triton compiles the same code for both."""
    kernel = JITFunction(take)
    bind = create_function_from_signature(kernel.signature, kernel.params, make_backend(GPUTarget("cuda", 90, 32)))
    numbers = [0, 1, 2, 15, 16, 17, 48, 2**31 - 1, 2**31, 2**31 + 1, 2**62 + 1, 2**63 - 1, 2**63, 2**63 + 16]
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int64)
    tensors = [torch.ones(40, dtype=dtype)[start:] for dtype, start in product(dtypes, (0, 1, 16))]
    values: list[Any] = [None, 0.0, 1.0, 2.5, True, False, *numbers, *tensors]
    values += [(number, 1) for number in numbers] + [(number, (tensors[0], 2.5)) for number in numbers[:5]]
    found: dict[Any, Any] = {}
    for value in values:
        _, specialization, _ = bind(value)
        assert found.setdefault(tiles._kind(value), specialization) == specialization
    assert len(found) < len(values)


@pytest.mark.gpu
def test_a_launch_goes_to_the_current_stream_and_into_a_graph(card: str) -> None:
    x, weight = torch.randn(64, 256, device=card), torch.ones(256, device=card)
    expected = kernels.rms_norm(x, weight, 1e-5)

    def check(value: Tensor) -> None:
        torch.cuda.synchronize()
        assert torch.equal(value, expected)

    check(kernels.rms_norm(x, weight, 1e-5))
    with torch.cuda.stream(torch.cuda.Stream()):
        check(kernels.rms_norm(x, weight, 1e-5))
    graph, given = torch.cuda.CUDAGraph(), torch.zeros_like(x)
    with torch.cuda.graph(graph):
        captured = kernels.rms_norm(given, weight, 1e-5)
    given.copy_(x)
    graph.replay()
    check(captured)


def count_calls(function: Callable[[], Any]) -> int:
    """The calls of Python functions that a call of `function` makes."""
    count = 0

    def see(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(see)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count - 1


@pytest.mark.parametrize(("trains", "most"), [(False, 29), (True, 32)])
def test_a_call_is_few_calls_of_python(trains: bool, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a kernel's function to Triton's launcher, once it has compiled: checks, dispatch, allocation and launch."""
    monkeypatch.setattr(registration, "kernel_devices", {"cpu"})
    monkeypatch.setattr(elementwise, "_forward", Kernel())
    gate, up = torch.ones(4, 8, 16), torch.ones(4, 8, 16, requires_grad=True)
    with torch.set_grad_enabled(trains):
        kernels.gated_product(gate, up)
        assert count_calls(lambda: kernels.gated_product(gate, up)) <= most
