"""The kernels that reduce rows, each beside the chain of torch's operators that it stands for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from autoptd.runtime import kernels
from tests.masks import keep_mask
from tests.runtime.kernels.elementwise_cases import OPERATOR, make_rank, scatter

EPS = 1e-5
RANK = make_rank()


@dataclass(frozen=True)
class RowCase:
    """`kernel` and `chain` take the same tensors to the same tuple; `operands` are "x", "h" or ranges of a mask."""

    kernel: Callable[..., tuple[Tensor, ...]]
    chain: Callable[..., tuple[Tensor, ...]]
    operands: Sequence[str | Callable[[Sequence[int]], Tensor]] = ("x",)

    def make(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, *, strided: bool = False
    ) -> list[Tensor]:
        """Random operands, the same numbers for every device; `strided`: with other strides each."""
        generator = torch.Generator().manual_seed(sum(shape))
        made = []
        for number, kind in enumerate(self.operands):
            if not isinstance(kind, str):
                mask = kind(shape).to(device)
                made.append(mask if mask.dtype == torch.bool else mask.to(dtype).requires_grad_())
                continue
            extent = tuple(shape) if kind == "x" else tuple(shape[-1:])
            tensor = 2 * torch.randn(extent, generator=generator, dtype=torch.float64)
            tensor = tensor.to(device, dtype)
            made.append((scatter(tensor, number) if strided else tensor).requires_grad_())
        return made


def drop(x: Tensor, p: float, sample: int | None = 0) -> Tensor:
    if p == 0:
        return x
    mask = keep_mask(RANK.randomness, p, OPERATOR, x.shape, torch.device("cpu"), sample=sample)
    return x * mask.to(x.device) * (1 / (1 - p) if p < 1 else 0)


def normalize_root_mean_square(x: Tensor, weight: Tensor) -> Tensor:
    """As Hugging Face's Llama writes it."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def adding(kind: str, parts: Sequence[str], p: float = 0.3, sample: int | None = 0, norm_bias: bool = True) -> RowCase:
    """`parts` are of "bias" and "residual"; operands x, weight, norm_bias (LayerNorm), then the parts."""
    layer = kind == "layer"
    biased = layer and norm_bias
    operands = ("x", "h", *(("h",) if biased else ()), *("h" if part == "bias" else "x" for part in parts))

    def split(others: tuple[Tensor, ...]) -> tuple[Tensor | None, dict[str, Tensor]]:
        return (others[0] if biased else None), dict(zip(parts, others[biased:], strict=True))

    def kernel(x: Tensor, weight: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        norm, given = split(others)
        place: dict[str, Any] = {**given, "p": p, "operator": OPERATOR, "sample": sample}
        if layer:
            return kernels.add_layer_norm(RANK, x, weight, norm, EPS, **place)
        return kernels.add_rms_norm(RANK, x, weight, EPS, **place)

    def chain(x: Tensor, weight: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        norm, given = split(others)
        total = drop(x + given["bias"] if "bias" in given else x, p, sample)
        total = total + given["residual"] if "residual" in given else total
        if layer:
            return total, functional.layer_norm(total, total.shape[-1:], weight, norm, EPS)
        return total, normalize_root_mean_square(total, weight)

    return RowCase(kernel, chain, operands)


def attend(
    mask: Callable[[Sequence[int]], Tensor] | None, causal: bool = False, p: float = 0.3, scale: float = 0.3
) -> RowCase:
    def kernel(x: Tensor, seen: Tensor | None = None) -> tuple[Tensor, ...]:
        return (kernels.scaled_softmax(RANK, x, seen, causal, scale, p, OPERATOR),)

    def chain(x: Tensor, seen: Tensor | None = None) -> tuple[Tensor, ...]:
        if causal:
            seen = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).tril()
        scores = x * scale
        if seen is not None:
            scores = scores.masked_fill(~seen, -torch.inf) if seen.dtype == torch.bool else scores + seen
        blind = (scores == -torch.inf).all(-1, keepdim=True)  # would be 0 / 0
        wide = scores.masked_fill(blind, 0).to(torch.promote_types(x.dtype, torch.float32)).softmax(-1)
        return (drop(wide.masked_fill(blind, 0).to(x.dtype), p),)

    return RowCase(kernel, chain, ("x",) if mask is None else ("x", mask))


def see_some(shape: Sequence[int]) -> Tensor:
    """A bool mask [s, keys]; its second row sees nothing."""
    seen = torch.rand(tuple(shape[-2:]), generator=torch.Generator().manual_seed(3)) > 0.4
    seen[1] = False
    return seen


def pad(shape: Sequence[int]) -> Tensor:
    """A bool mask [b, 1, .., 1, keys] of padded samples."""
    lengths = torch.arange(shape[0]) % 3
    return (torch.arange(shape[-1]) >= lengths[:, None]).view(shape[0], *[1] * (len(shape) - 2), shape[-1])


def add_some(shape: Sequence[int]) -> Tensor:
    """An additive mask [b, 1, .., s, keys], partly -inf, its last row wholly."""
    generator = torch.Generator().manual_seed(4)
    mask = torch.randn(shape[0], *[1] * (len(shape) - 3), *shape[-2:], generator=generator)
    mask = mask.masked_fill(~see_some(shape) & (torch.arange(shape[-1]) > 0), -torch.inf)
    mask[..., -1, :] = -torch.inf
    return mask


def learn(shape: Sequence[int]) -> Tensor:
    """A learnt position bias [1, .., s, keys], as T5's."""
    return torch.randn(1, *shape[1:], generator=torch.Generator().manual_seed(5))


CASES = {
    "layer_norm": RowCase(
        lambda x, weight, bias: (kernels.layer_norm(x, weight, bias, EPS),),
        lambda x, weight, bias: (functional.layer_norm(x, x.shape[-1:], weight, bias, EPS),),
        ("x", "h", "h"),
    ),
    "rms_norm": RowCase(
        lambda x, weight: (kernels.rms_norm(x, weight, EPS),),
        lambda x, weight: (normalize_root_mean_square(x, weight),),
        ("x", "h"),
    ),
    "layer, all": adding("layer", ("bias", "residual")),
    "layer, samples second": adding("layer", ("bias", "residual"), sample=1),
    "layer, residual": adding("layer", ("residual",), p=0),
    "layer, bias": adding("layer", ("bias",), p=0, norm_bias=False),
    "layer, dropout": adding("layer", ()),
    "layer, all dropped": adding("layer", ("residual",), p=1),
    "rms, all": adding("rms", ("bias", "residual")),
    "rms, residual": adding("rms", ("residual",), p=0),
    "rms, dropout + residual": adding("rms", ("residual",), sample=None),
    "softmax": attend(None),
    "softmax, causal": attend(None, causal=True),
    "softmax, causal, undropped": attend(None, causal=True, p=0),
    "softmax, bool": attend(see_some),
    "softmax, padding": attend(pad, p=0),
    "softmax, added": attend(add_some),
    "softmax, learnt": attend(learn, scale=1),
    "softmax, all dropped": attend(None, p=1),
}
