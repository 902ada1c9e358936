"""LayerNorm and RMSNorm, alone and of dropout(x + bias) + residual: the sum and its norm in one kernel (SC21 §4.2).

Backward needs the sum, its row statistics and the weight; nothing else is saved. Results are contiguous. A sum and its
norm give the same bits together and apart, as they are at the end of a stage or of a recomputed layer: what lies
between them, a value and its gradient, is rounded to its dtype. (In Triton but for the gradient of the sum's bias.)
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from autoptd.runtime.comm.rank import Rank
from autoptd.runtime.kernels.keyed_draws import drop_and_add, find_key
from autoptd.runtime.kernels.operands import Operand, check_rows, promote, sum_rows, widen
from autoptd.runtime.kernels.registration import define_operator, runs_plainly
from autoptd.runtime.randomness import Dim, Key, Shape

_EXACT = ({torch.float32}, {torch.float64})  # dtypes in which torch's own norm rounds as ours

# What is added to x before its norm: bias and residual, and the dropout's probability, key and moment.
Added = tuple[Operand, Operand, float, Key, Operand]
_NOTHING: Added = None, None, 0.0, [], None


def rms_norm(x: Tensor, weight: Tensor, eps: float | None) -> Tensor:
    """Divide the rows of `x` [.., h] by their root mean square, and multiply by `weight` [h].

    As Hugging Face's Llama does: in half precision the statistics are float32, and what is multiplied by the
    weight has x's dtype. `eps` None is x's machine epsilon, as torch's.
    """
    return _sum_and_norm("rms_norm", x, weight, None, eps, _NOTHING)[1]


def layer_norm(x: Tensor, weight: Tensor, norm_bias: Operand = None, eps: float = 1e-5) -> Tensor:
    """Normalise rows of `x` [.., h], multiply by `weight` [h], add `norm_bias` [h]; in float32 for half precision."""
    return _sum_and_norm("layer_norm", x, weight, norm_bias, eps, _NOTHING)[1]


def add_layer_norm(
    rank: Rank,
    x: Tensor,
    weight: Tensor,
    norm_bias: Operand = None,
    eps: float = 1e-5,
    bias: Operand = None,
    residual: Operand = None,
    p: float = 0.0,
    operator: int = 0,
    sample: Dim = 0,
    divided: Dim = None,
    shape: Shape = None,
) -> tuple[Tensor, Tensor]:
    """Compute ``sum = dropout(x + bias) + residual``, and the sum's LayerNorm over the last dimension of `x`.

    `weight`, `norm_bias` and `bias` are [h], `residual` is like `x` [.., h]; None leaves one out. For the
    mask see `keyed_draws.dropout`. In half precision all is computed in float32, and the sum is rounded once.
    """
    mask = find_key(rank, x, p, operator, sample, divided, shape)
    return _sum_and_norm("add_layer_norm", x, weight, norm_bias, eps, (bias, residual, p, *mask))


def add_rms_norm(
    rank: Rank,
    x: Tensor,
    weight: Tensor,
    eps: float | None,
    bias: Operand = None,
    residual: Operand = None,
    p: float = 0.0,
    operator: int = 0,
    sample: Dim = 0,
    divided: Dim = None,
    shape: Shape = None,
) -> tuple[Tensor, Tensor]:
    """Compute ``sum = dropout(x + bias) + residual`` and `rms_norm` of the sum; otherwise as `add_layer_norm`."""
    mask = find_key(rank, x, p, operator, sample, divided, shape)
    return _sum_and_norm("add_rms_norm", x, weight, None, eps, (bias, residual, p, *mask))


def _sum_and_norm(
    kernel: str, x: Tensor, weight: Tensor, norm_bias: Operand, eps: float | None, added: Added
) -> tuple[Tensor, Tensor]:
    bias, residual, _, key, _ = added
    check_rows(kernel, {"x": x, "residual": residual}, weight=weight, norm_bias=norm_bias, bias=bias)
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    centers = kernel.endswith("layer_norm")
    adds = _adds(bias, residual, key)
    exact = {tensor.dtype for tensor in (x, weight, norm_bias, bias, residual) if tensor is not None}
    if centers and exact in _EXACT and not key and runs_plainly(x):
        x = x if bias is None else x + bias
        x = x if residual is None else residual + x
        x = x.contiguous() if adds else x
        return x, functional.layer_norm(x, x.shape[-1:], weight, norm_bias, eps)
    total, normed, _, _ = _add_norm(x, weight, norm_bias, eps, *added, centers)
    return total if adds else x, normed


def _adds(bias: Operand, residual: Operand, key: Key) -> bool:
    return bias is not None or residual is not None or bool(key)


def _allocate(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, weight, _, _, bias, residual, _, key, _, centers = arguments
    added = x.new_empty(x.shape if _adds(bias, residual, key) else (0,), dtype=promote(x, bias, residual))
    normed = x.new_empty(x.shape, dtype=added.dtype if centers else promote(added, weight))
    scale = x.new_empty((*x.shape[:-1], 1), dtype=widen(added.dtype))
    return added, normed, scale.new_empty(scale.shape if centers else (0,)), scale


@define_operator("add_norm", _allocate, triton="norm")
def _add_norm(
    x: Tensor,
    weight: Tensor,
    norm_bias: Operand,
    eps: float,
    bias: Operand,
    residual: Operand,
    p: float,
    key: Key,
    moment: Operand,
    centers: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return ``dropout(x + bias) + residual``, its LayerNorm (`centers`) or RMSNorm, and mean and factor of each row.

    The sum is empty where nothing is added to `x`, the means [.., 1] in an RMSNorm.
    """
    added = x.new_empty(0)
    if _adds(bias, residual, key):
        added = x = drop_and_add(x, bias, residual, p, key, moment).contiguous()
    wide = x.contiguous().to(widen(x.dtype))
    if centers:
        offset = None if norm_bias is None else norm_bias.to(wide.dtype)
        normed, mean, scale = torch.native_layer_norm(wide, x.shape[-1:], weight.to(wide.dtype), offset, eps)
        return added, normed.to(x.dtype), mean, scale
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return added, weight * (wide * scale).to(x.dtype), scale.new_empty(0), scale


def _allocate_gradients(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    _, _, added, weight, _, scale, _, _, _, wanted = arguments
    total, own = (added.new_empty(added.shape if want else (0,)) for want in wanted[:2])
    return total, own, scale.new_empty((sum(wanted[2:]), *weight.shape))


@define_operator("add_norm_backward", _allocate_gradients, triton="norm")
def _add_norm_backward(
    d_normed: Tensor,
    d_added: Operand,
    added: Tensor,
    weight: Tensor,
    mean: Operand,
    scale: Tensor,
    p: float,
    key: Key,
    moment: Operand,
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the sum and of x, empty where not `wanted`, and below each other those vectors that are.

    These are the gradients of the weight, the norm's bias and x's bias, in the dtype of the statistics; the last is
    the sum of x's gradient, or without dropout of the sum's, which must be wanted too.
    """
    x, outer, gain = (tensor.to(scale.dtype) for tensor in (added, d_normed, weight))
    if mean is None:
        total, *vectors = *_differentiate_rms(outer, x, gain, scale), None  # there is no norm's bias
    else:
        arguments = (outer, x, x.shape[-1:], mean, scale, gain, gain, [True, wanted[2], wanted[3]])
        total, *vectors = torch.ops.aten.native_layer_norm_backward(*arguments)
    total = total.to(added.dtype)
    if d_added is not None:
        total.add_(d_added)
    own = drop_and_add(total, None, None, p, key, moment) if key else total
    vectors.append(sum_rows(own, scale.dtype) if wanted[4] else None)
    found = [vector for vector, want in zip(vectors, wanted[2:], strict=True) if want and vector is not None]
    total, own = (of if want else added.new_empty(0) for of, want in zip((total, own), wanted, strict=False))
    return total, own, torch.stack(found) if found else scale.new_empty((0, *weight.shape))


def _differentiate_rms(outer: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of the rows `x` [.., h] and the `weight` [h] from that of the result, `outer` [.., h].

    `scale` [.., 1] is the factor of each row. Two tensors as large as `x` do: memory is what this waits for.
    """
    unit = x * scale
    product = outer * unit
    of_weight = sum_rows(product, scale.dtype)
    level = product.mul_(weight).mean(-1, keepdim=True)
    return torch.mul(outer, weight, out=product).addcmul_(unit, level, value=-1).mul_(scale), of_weight


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    added, _, mean, scale = output
    x, weight, _, _, bias, residual, *ctx.mask, centers = inputs
    adds = _adds(bias, residual, ctx.mask[1])
    ctx.save_for_backward(added if adds else x, weight, mean if centers else None, scale)
    ctx.mark_non_differentiable(mean, scale, *([] if adds else [added]))
    ctx.set_materialize_grads(False)
    ctx.dtypes = [value.dtype if isinstance(value, Tensor) else None for value in inputs]


def _differentiate(ctx: Any, d_added: Operand, d_normed: Operand, *_: None) -> tuple[Operand, ...]:
    added, *saved = ctx.saved_tensors
    if d_normed is None:
        d_normed = added.new_zeros(added.shape)
    x, gain, offset, _, bias, residual, *_ = ctx.needs_input_grad
    dropped = bool(ctx.mask[1])
    wanted = [residual or ((x or bias) and not dropped), (x or bias) and dropped, gain, offset, bias]
    of_sum, of_x, vectors = _add_norm_backward(d_normed, d_added, added, *saved, *ctx.mask, wanted)
    left = iter(vectors)
    of_weight, of_offset, of_bias = (next(left) if want else None for want in wanted[2:])
    of_x = of_x if dropped else of_sum
    gradients: tuple[Any, ...] = (of_x, of_weight, of_offset, None, of_bias, of_sum, None, None, None, None)
    found = zip(gradients, ctx.dtypes, ctx.needs_input_grad, strict=True)
    return tuple(gradient.to(dtype) if needed else None for gradient, dtype, needed in found)


_add_norm.register_autograd(_differentiate, setup_context=_save)
