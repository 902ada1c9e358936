"""LayerNorm and RMSNorm of rows in plain torch: in float32 for half precision, the results in their own dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from autoptd.runtime.kernels.operands import sum_rows
from autoptd.runtime.kernels.precision import widen


def center_rows(
    x: Tensor, weight: Tensor, norm_bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the LayerNorm of `x` [.., h], and the mean and the factor of each row [.., 1]."""
    wide = widen(x.dtype)
    offset = None if norm_bias is None else norm_bias.to(wide)
    normed, mean, scale = torch.native_layer_norm(x.to(wide), x.shape[-1:], weight.to(wide), offset, eps)
    return normed.to(x.dtype), mean, scale


def scale_rows(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the RMSNorm of `x` [.., h], and the factor of each row [.., 1]."""
    wide = x.to(widen(x.dtype)).contiguous()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype), scale


def differentiate_rms(outer: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of the rows `x` [.., h] and the `weight` [h] from that of the result, `outer` [.., h].

    `scale` [.., 1] is what each row was multiplied by. Two tensors as large as `x` do: memory is what this waits for.
    """
    unit = x * scale
    product = outer * unit
    of_weight = sum_rows(product, scale.dtype)
    level = product.mul_(weight).mean(-1, keepdim=True)
    inner = torch.mul(outer, weight, out=product)
    return inner.addcmul_(unit, level, value=-1).mul_(scale), of_weight
