"""Products with frozen weights in fewer bits, which no backward keeps in full."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from autoptd.runtime.kernels.registration import define_operator


def quantized_linear(
    x: Tensor, packed: Tensor, absmax: Tensor, table: Tensor, stored: torch.dtype | None = None
) -> Tensor:
    """Compute ``linear(x, weight)`` of the weight [out, in] that `dequantize` makes, in the dtype of x.

    The backward dequantizes again. It rounds the weight to `stored` first, as that of bitsandbytes does.
    """
    shape, width = tuple(packed.shape), packed[0].numel() * table.shape[-1]
    if len(shape) != 3 or tuple(absmax.shape) != shape[:2] or x.shape[-1] != width or len(table) != 256:
        raise ValueError(
            f"quantized_linear was given {[list(each.shape) for each in (x, packed, absmax, table)]}, expected "
            "[.., blocks * bytes * numbers], [out, blocks, bytes], [out, blocks] and [256, numbers]"
        )
    return _quantized_linear(x, packed, absmax, table, stored)  # type: ignore[no-any-return]


def dequantize(packed: Tensor, absmax: Tensor, table: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight: each byte of `packed` is a row of `table`, and each block has its scale in `absmax`."""
    numbers = functional.embedding(packed.int(), table).flatten(2)
    return numbers.mul_(absmax.unsqueeze(2)).flatten(1).to(dtype)


@define_operator("quantized_linear", lambda x, packed, *_: x.new_empty((*x.shape[:-1], len(packed))))
def _quantized_linear(x: Tensor, packed: Tensor, absmax: Tensor, table: Tensor, stored: torch.dtype | None) -> Tensor:
    return functional.linear(x, dequantize(packed, absmax, table, x.dtype))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *saved, ctx.stored = inputs
    ctx.save_for_backward(*saved)


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    packed, absmax, table = ctx.saved_tensors
    weight = dequantize(packed, absmax, table, ctx.stored or gradient.dtype)
    return gradient @ weight.to(gradient.dtype), None, None, None, None


_quantized_linear.register_autograd(_differentiate, setup_context=_save)
