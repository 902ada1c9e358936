"""Rotary position embedding (Su et al., "RoFormer", 2021), in the halved and in the interleaved form."""

from typing import Any

import torch
from torch import Tensor

from autoptd.runtime.kernels.operands import allocate_promoted, check_operands
from autoptd.runtime.kernels.registration import define_operator


def rotary_embedding(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Compute ``x * cos + rotate(x) * sin`` on the first elements of each row; the others stay as they are.

    `x` is [..., s, d], as many of its elements turn as `cos` and `sin` [..., s, r] have, spread over it. ``rotate``
    makes of the halves (a, b) of the r elements (-b, a), and with `interleaved` the same of each pair. Dtypes are
    promoted as by ``*``. Raises ValueError on other shapes, and for tables that require a gradient.
    """
    check_operands("rotary_embedding", x=x, cos=cos, sin=sin)
    turned = cos.shape[-1] if cos.dim() else 0
    fits = x.dim() >= cos.dim() > 0 and cos.shape == sin.shape and turned <= x.shape[-1] and turned % 2 == 0
    pairs = zip(reversed(x.shape[:-1]), reversed(cos.shape[:-1]), strict=False)
    if not fits or not all(extent in (1, of_x) for of_x, extent in pairs):
        raise ValueError(
            f"rotary_embedding was given x {list(x.shape)}, cos {list(cos.shape)} and sin {list(sin.shape)}, "
            "expected [..., s, d] and tables [..., s, r] that are broadcast against it, with r even and at most d"
        )
    if cos.requires_grad or sin.requires_grad:
        raise ValueError("rotary_embedding was given tables that require a gradient; detach them")
    return _rotary_embedding(x, cos, sin, interleaved, False)


@define_operator("rotary_embedding", allocate_promoted, triton="rotary")
def _rotary_embedding(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, backward: bool) -> Tensor:
    """Rotate `x`; with `backward` multiply a gradient by the transposed rotation."""
    width = cos.shape[-1]
    turned = x[..., :width]
    out = allocate_promoted(x, cos, sin)
    if width < x.shape[-1]:
        out[..., width:] = x[..., width:]
    (first, second), (of_first, of_second) = _split(turned, interleaved), _split(sin, interleaved)
    into_first, into_second = _split(torch.mul(turned, cos, out=out[..., :width]), interleaved)
    if backward:
        of_first, of_second = of_second, of_first
    into_first.addcmul_(second, of_first, value=1 if backward else -1)
    into_second.addcmul_(first, of_second, value=-1 if backward else 1)
    return out


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, cos, sin, ctx.interleaved, ctx.backward = inputs
    ctx.dtype = x.dtype
    ctx.save_for_backward(cos, sin)


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    of_x = _rotary_embedding(gradient, *ctx.saved_tensors, ctx.interleaved, not ctx.backward)
    return of_x.to(ctx.dtype), None, None, None, None


_rotary_embedding.register_autograd(_differentiate, setup_context=_save)


def _split(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Return the two elements of each pair that turns."""
    if interleaved:
        return x[..., 0::2], x[..., 1::2]
    first, second = x.chunk(2, -1)
    return first, second
