"""Scale, mask, softmax and keyed dropout of attention scores in one kernel (SC21 §4.2): general masks and causal ones.

Backward needs the softmax before its dropout; without dropout that is the result itself. In float32 and float64 it
keeps the result too, as the product behind it does anyway: plain torch reads the mask off it. Kernels, and plain
torch in half precision, draw it again. Results are contiguous.
"""

from typing import Any

import torch
from torch import Tensor

from autoptd.runtime.comm.rank import Rank
from autoptd.runtime.kernels.keyed_draws import apply_mask, find_key, keep_factor
from autoptd.runtime.kernels.operands import Operand, widen
from autoptd.runtime.kernels.registration import define_operator
from autoptd.runtime.randomness import Dim, Key, Shape


def scaled_softmax(
    rank: Rank,
    scores: Tensor,
    mask: Operand = None,
    is_causal: bool = False,
    scale: float = 1.0,
    p: float = 0.0,
    operator: int = 0,
    sample: Dim = 0,
    divided: Dim = None,
    shape: Shape = None,
) -> Tensor:
    """Compute ``dropout(softmax(scores * scale + mask))`` over the last dimension of `scores` [.., s, keys].

    `mask` and `is_causal` mean what they mean to torch's ``scaled_dot_product_attention``: a bool mask is True
    where a key may be seen, another is added (and may have a gradient); both broadcast to `scores`; causal
    query i sees the keys 0 to i. A query that sees no key gives zeros. The dropout is `keyed_draws.dropout`
    of the whole `scores`. Half precision is computed in float32; the result has the dtype of `scores`.
    """
    _check(scores, mask, is_causal)
    key, moment = find_key(rank, scores, p, operator, sample, divided, shape)
    return _scaled_softmax(scores, mask, is_causal, scale, p, key, moment)[0]


def _check(scores: Tensor, mask: Operand, is_causal: bool) -> None:
    if scores.dim() < 2 or not scores.is_floating_point():
        raise ValueError(
            f"scaled_softmax was given scores {list(scores.shape)} of {scores.dtype}, "
            "expected floating-point [.., s, keys]"
        )
    if mask is None:
        return
    if is_causal:
        raise ValueError("scaled_softmax was given a mask and is_causal=True; give one of the two")
    sizes = zip(reversed(mask.shape), reversed(scores.shape), strict=False)
    fits = mask.dim() <= scores.dim() and all(own in (1, size) for own, size in sizes)
    known = mask.dtype == torch.bool or mask.is_floating_point()
    if not fits or not known or mask.device != scores.device:
        raise ValueError(
            f"scaled_softmax was given scores {list(scores.shape)} on {scores.device} and a mask {list(mask.shape)} of "
            f"{mask.dtype} on {mask.device}, expected bool (True is seen) or floating-point (added) that broadcasts"
        )


def _allocate(scores: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    *_, key, _ = others
    return scores.new_empty(scores.shape), scores.new_empty(scores.shape if key else (0,))


@define_operator("scaled_softmax", _allocate, triton="softmax")
def _scaled_softmax(
    scores: Tensor, mask: Operand, is_causal: bool, scale: float, p: float, key: Key, moment: Operand
) -> tuple[Tensor, Tensor]:
    """Return the dropped softmax and the softmax itself, which is empty where nothing is dropped and they are one."""
    exact = _softmax(scores, mask, is_causal, scale)
    softmax = exact.to(scores.dtype)
    if moment is None:
        return softmax, softmax.new_empty(0)
    return apply_mask(exact, p, key, moment).mul_(keep_factor(p)).to(scores.dtype), softmax


def _softmax(scores: Tensor, mask: Operand, is_causal: bool, scale: float) -> Tensor:
    """Compute the softmax in plain torch, and in float32 for half precision."""
    scores = scores.contiguous().to(widen(scores.dtype)) * scale
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        return scores.masked_fill_(hidden, -torch.inf).softmax(-1)
    if mask is None:
        return scores.softmax(-1)
    seen = mask if mask.dtype == torch.bool else mask != -torch.inf
    scores = scores.masked_fill_(~mask, -torch.inf) if mask.dtype == torch.bool else scores.add_(mask)
    blind = ~seen.any(-1, keepdim=True)
    if scores.is_cpu and not blind.any():  # on a GPU to look is to wait
        return scores.softmax(-1)
    return scores.masked_fill_(blind, 0).softmax(-1).masked_fill_(blind, 0)


@define_operator("scaled_softmax_backward", lambda _, x, *others: torch.empty_like(x), triton="softmax")
def _scaled_softmax_backward(
    gradient: Tensor, softmax: Tensor, weights: Operand, causal: bool, scale: float, p: float, key: Key, moment: Operand
) -> Tensor:
    """Return the gradient of the masked scores times `scale`: with their scale it is that of the scores.

    `weights` is the softmax after its dropout; None where nothing is dropped, or in half precision.
    """
    if weights is not None:
        # An element of softmax 0 has the gradient 0, whether it was dropped or not.
        kept = gradient * weights
        return kept.addcmul_(softmax, kept.sum(-1, keepdim=True), value=-1).mul_(scale).contiguous()
    wide = widen(softmax.dtype)
    if wide == softmax.dtype:
        result: Tensor = torch.ops.aten._softmax_backward_data(gradient, softmax, -1, wide)
        return result.mul_(scale).contiguous()
    gradient, share = gradient.to(wide), softmax.to(wide)
    if moment is not None:  # weights are rounded, where the mask is exact
        gradient = apply_mask(gradient, p, key, moment).mul_(keep_factor(p))
    # Rounded, a row does not sum to 1: without the division, a constant gradient would not be taken to 0.
    level = (share * gradient).sum(-1, keepdim=True) / share.sum(-1, keepdim=True).clamp_min_(1e-30)
    return (share * (gradient - level)).mul_(scale).to(softmax.dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, mask, *ctx.arguments = inputs
    ctx.mask = None if mask is None else (mask.shape, mask.dtype)
    weights, softmax = output
    exact = widen(softmax.dtype) == softmax.dtype
    ctx.save_for_backward(*((softmax, weights if exact else None) if ctx.arguments[-2] else (weights, None)))
    ctx.mark_non_differentiable(softmax)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, gradient: Operand, _: None) -> tuple[Operand, ...]:
    rest = (None, None, None, None, None)
    if gradient is None:
        return None, None, *rest
    is_causal, scale, *dropout = ctx.arguments
    operands = (gradient, *ctx.saved_tensors, is_causal)
    if not ctx.needs_input_grad[1]:
        return _scaled_softmax_backward(*operands, scale, *dropout), None, *rest
    unscaled = _scaled_softmax_backward(*operands, 1.0, *dropout)
    shape, dtype = ctx.mask
    return unscaled * scale, unscaled.sum_to_size(shape).to(dtype), *rest


_scaled_softmax.register_autograd(_backward, setup_context=_save)
