"""The elementwise kernels, each beside the chain of torch's operators that it stands for."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from autoptd.runtime import kernels
from autoptd.runtime.comm.rank import Rank
from autoptd.runtime.program.mesh import Mesh
from autoptd.runtime.randomness import Randomness
from tests.masks import keep_mask

CPU = torch.device("cpu")
OPERATOR = 5


def make_rank(tensor: int = 1, index: int = 0) -> Rank:
    mesh = Mesh(tensor, 1, 1)
    rank = Rank.local(mesh, mesh.coordinates(index))
    rank.randomness = Randomness(seed=(3 << 32) + 1, call=2, sample=6)
    return rank


@dataclass(frozen=True)
class Case:
    """`kernel` and `chain` take the same tensors; `operands` are those of a shape [..., h]: "x", "h" or "s".

    `by_sigmoid`: the chain with its tanh written as a sigmoid, as the kernel computes it.
    """

    kernel: Callable[..., Tensor]
    chain: Callable[..., Tensor]
    operands: Sequence[str] = ("x", "h")
    tables: int = 0  # the last operands are constants
    by_sigmoid: Callable[..., Tensor] | None = None

    def make(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, *, strided: bool = False
    ) -> list[Tensor]:
        """Random operands, the same numbers for every device; `strided`: with other strides each."""
        generator = torch.Generator().manual_seed(sum(shape))
        made = []
        for number, kind in enumerate(self.operands):
            extent = {"x": tuple(shape), "h": tuple(shape[-1:]), "s": tuple(shape[-2:])}[kind]
            numbers = 2 * torch.randn(extent, generator=generator, dtype=torch.float64)
            tensor = numbers.to(device, dtype)
            tensor = scatter(tensor, number) if strided else tensor
            made.append(tensor.requires_grad_(number < len(self.operands) - self.tables))
        return made


def scatter(x: Tensor, number: int) -> Tensor:
    """`x` with other strides: a slice of something larger, or with two dimensions swapped in memory."""
    if number % 2 or x.dim() < 2:
        return torch.stack([x, x], -1 if number % 2 else -2).select(-1 if number % 2 else -2, 1)
    return x.transpose(-2, -3 if x.dim() > 2 else -1).contiguous().transpose(-2, -3 if x.dim() > 2 else -1)


def drop(p: float, sample: int | None, divided: int | None, rank: Rank) -> Callable[..., Tensor]:
    """dropout(x + bias) + residual, each part written out."""

    def chain(x: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        total = x if bias is None else x + bias
        if p > 0:
            own = {"size": rank.group("tensor").size, "index": rank.group("tensor").index}
            mask = keep_mask(rank.randomness, p, OPERATOR, x.shape, CPU, sample=sample, divided=divided, **own)
            total = total * mask.to(x.device) * (1 / (1 - p) if p < 1 else 0)
        return total if residual is None else total + residual

    return chain


def dropping(
    operands: Sequence[str] = ("x", "h", "x"),
    p: float = 0.3,
    sample: int | None = 0,
    divided: int | None = None,
    rank: Rank | None = None,
) -> Case:
    rank = make_rank() if rank is None else rank

    def kernel(x: Tensor, *others: Tensor) -> Tensor:
        bias = others[0] if "h" in operands else None
        residual = others[-1] if len(operands) > 1 and operands[-1] == "x" else None
        return kernels.bias_dropout_add(rank, x, bias, residual, p, OPERATOR, sample=sample, divided=divided)

    written_out = drop(p, sample, divided, rank)

    def chain(x: Tensor, *others: Tensor) -> Tensor:
        bias = others[0] if "h" in operands else None
        residual = others[-1] if len(operands) > 1 and operands[-1] == "x" else None
        return written_out(x, bias, residual)

    return Case(kernel, chain, operands)


def turn(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, turned: int | None = None) -> Tensor:
    """Rotary embedding as models write it, on the first `turned` elements (even, at most all)."""
    rows = x[..., : cos.shape[-1]]
    if interleaved:
        rotated = torch.stack((-rows[..., 1::2], rows[..., ::2]), -1).flatten(-2)
    else:
        first, second = rows.chunk(2, -1)
        rotated = torch.cat((-second, first), -1)
    return torch.cat((rows * cos + rotated * sin, x[..., cos.shape[-1] :]), -1)


def rotary(interleaved: bool, spared: int) -> Case:
    """`spared` elements do not turn, and one more where the number of the others is odd."""

    def cut(table: Tensor) -> Tensor:
        return table[..., : (table.shape[-1] - spared) // 2 * 2]

    def kernel(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return kernels.rotary_embedding(x, cut(cos), cut(sin), interleaved)

    def chain(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return turn(x, cut(cos), cut(sin), interleaved)

    return Case(kernel, chain, ("x", "s", "s"), tables=2)


def gate(activation: Any, of_gate: Callable[[Tensor], Tensor]) -> Case:
    return Case(partial(kernels.gated_product, activation=activation), lambda x, up: of_gate(x) * up, ("x", "x"))


def rounded_gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.tanh(0.798 * x * (1 + 0.044715 * x * x)))


def sigmoid_gelu(x: Tensor, coefficient: float) -> Tensor:
    return x * torch.sigmoid(2 * coefficient * (x + 0.044715 * x * x * x))


tanh_gelu = partial(functional.gelu, approximate="tanh")
CASES = {
    "bias_gelu": Case(kernels.bias_gelu, lambda x, bias: functional.gelu(x + bias)),
    "bias_gelu tanh": Case(
        partial(kernels.bias_gelu, approximate="tanh"),
        lambda x, bias: tanh_gelu(x + bias),
        by_sigmoid=lambda x, bias: sigmoid_gelu(x + bias, math.sqrt(2 / math.pi)),
    ),
    "bias_gelu rounded": Case(
        partial(kernels.bias_gelu, approximate="tanh", coefficient=0.798),
        lambda x, bias: rounded_gelu(x + bias),
        by_sigmoid=lambda x, bias: sigmoid_gelu(x + bias, 0.798),
    ),
    "gated silu": gate("silu", functional.silu),
    "gated gelu": gate("gelu", functional.gelu),
    "gated gelu_tanh": gate("gelu_tanh", tanh_gelu),
    "rotary": rotary(False, 0),
    "rotary interleaved": rotary(True, 0),
    "rotary partial": rotary(False, 3),
    "rotary interleaved partial": rotary(True, 3),
    "dropout": dropping(("x",)),
    "bias + dropout": dropping(("x", "h")),
    "dropout + residual": dropping(("x", "x")),
    "bias + dropout + residual": dropping(),
    "bias + residual": dropping(p=0),
    "samples second": dropping(sample=1),
    "no samples": dropping(sample=None),
    "nearly all dropped": dropping(p=0.9),
    "all dropped": dropping(p=1),
    "divided first": dropping(divided=2, rank=make_rank(3, 0)),
    "divided middle": dropping(divided=1, rank=make_rank(3, 1)),
    "divided last": dropping(sample=1, divided=2, rank=make_rank(3, 2)),
}
