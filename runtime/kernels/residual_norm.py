"""LayerNorm and RMSNorm, alone and of dropout(x + bias) + residual: the sum and its norm in one kernel (SC21 §4.2).

Backward needs the sum, its row statistics and the weight; nothing else is saved. Results are contiguous. A sum and its
norm give the same bits together and apart, as they are at the end of a stage or of a recomputed layer: what lies
between them, a value and its gradient, is rounded to its dtype. (In Triton but for the gradient of the sum's bias.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from autoptd.runtime.comm.rank import Rank
from autoptd.runtime.kernels.keyed_dropout import bias_dropout_add_operator
from autoptd.runtime.kernels.masking import find_key
from autoptd.runtime.kernels.operands import sum_rows
from autoptd.runtime.kernels.plain_norm import center_rows, differentiate_rms, scale_rows
from autoptd.runtime.kernels.precision import cast_widely, promote, widen
from autoptd.runtime.kernels.registration import define_operator
from autoptd.runtime.kernels.selection import find_kernels, runs_plainly


def rms_norm(x: Tensor, weight: Tensor, eps: float | None) -> Tensor:
    """Divide the rows of `x` [.., h] by their root mean square, and multiply by `weight` [h].

    As Hugging Face's Llama does: in half precision the statistics are float32, and what is multiplied by the
    weight has x's dtype. `eps` None is x's machine epsilon, as torch's.
    """
    _check("rms_norm", x, None, weight=weight)
    normed: Tensor = _rms_norm(x, weight, _epsilon(x, eps))[0]
    return normed


def layer_norm(x: Tensor, weight: Tensor, norm_bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """Subtract from the rows of `x` [.., h] their mean, divide by their deviation, multiply by `weight` [h], and add
    `norm_bias` [h]; in half precision all in float32."""
    _check("layer_norm", x, None, weight=weight, norm_bias=norm_bias)
    exact = {tensor.dtype for tensor in (x, weight, norm_bias) if tensor is not None}
    if exact in _EXACT and runs_plainly(x):
        return functional.layer_norm(x, x.shape[-1:], weight, norm_bias, eps)
    normed: Tensor = _layer_norm(x, weight, norm_bias, eps)[0]
    return normed


def add_layer_norm(
    rank: Rank,
    x: Tensor,
    weight: Tensor,
    norm_bias: Tensor | None = None,
    eps: float = 1e-5,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    p: float = 0.0,
    operator: int = 0,
    sample: int | None = 0,
    divided: int | None = None,
    shape: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute ``sum = dropout(x + bias) + residual``, and the sum's LayerNorm over the last dimension of `x`.

    `weight`, `norm_bias` and `bias` are [h], `residual` is like `x` [.., h]; None leaves one out. For the
    mask see `keyed_dropout.dropout`. In half precision all is computed in float32, and the sum is rounded once.
    """
    _check("add_layer_norm", x, residual, weight=weight, norm_bias=norm_bias, bias=bias)
    key = find_key(rank, x, p, operator, sample, divided, shape)
    exact = {tensor.dtype for tensor in (x, weight, norm_bias, bias, residual) if tensor is not None}
    if exact in _EXACT and not key and runs_plainly(x):
        x = x if bias is None else x + bias
        x = (x if residual is None else residual + x).contiguous()
        bias = residual = None
    if bias is None and residual is None and not key:
        return x, layer_norm(x, weight, norm_bias, eps)
    arguments = (x, weight, norm_bias, eps, bias, residual, p, key)
    added, normed, _, _ = _add_layer_norm(*arguments)
    return added, normed


def add_rms_norm(
    rank: Rank,
    x: Tensor,
    weight: Tensor,
    eps: float | None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    p: float = 0.0,
    operator: int = 0,
    sample: int | None = 0,
    divided: int | None = None,
    shape: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute ``sum = dropout(x + bias) + residual`` and `rms_norm` of the sum; otherwise as `add_layer_norm`."""
    _check("add_rms_norm", x, residual, weight=weight, bias=bias)
    key = find_key(rank, x, p, operator, sample, divided, shape)
    if bias is None and residual is None and not key:
        return x, rms_norm(x, weight, eps)
    arguments = (x, weight, _epsilon(x, eps), bias, residual, p, key)
    added, normed, _ = _add_rms_norm(*arguments)
    return added, normed


def _epsilon(x: Tensor, eps: float | None) -> float:
    return torch.finfo(x.dtype).eps if eps is None else eps


def _check(name: str, x: Tensor, residual: Tensor | None, **vectors: Tensor | None) -> None:
    if x.dim() == 0 or not x.is_floating_point():
        raise ValueError(
            f"{name} was given x {list(x.shape)} of {x.dtype}, expected floating-point rows [.., h]"
        )
    if residual is not None:
        _check_other(name, x, "residual", residual, x.shape)
    for argument, tensor in vectors.items():
        if tensor is not None:
            _check_other(name, x, argument, tensor, x.shape[-1:])


def _check_other(name: str, x: Tensor, argument: str, tensor: Tensor, shape: torch.Size) -> None:
    if tensor.shape != shape or not tensor.is_floating_point():
        raise ValueError(
            f"{name} was given {argument} {list(tensor.shape)} of {tensor.dtype}, "
            f"expected floating-point {list(shape)} for x {list(x.shape)}"
        )
    if tensor.device != x.device:
        raise ValueError(f"{name} was given x on {x.device} and {argument} on {tensor.device}")


_EXACT = ({torch.float32}, {torch.float64})  # dtypes in which torch's own norm rounds as ours


@define_operator("layer_norm")
def _layer_norm(
    x: Tensor, weight: Tensor, norm_bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `x` normed, and the mean and the factor of each row [.., 1]."""
    kernels = find_kernels("norm", x, weight, norm_bias)
    if kernels is None:
        return center_rows(x.contiguous(), weight, norm_bias, eps)
    normed, mean, scale = _allocate_layer(x, weight, norm_bias, eps)
    kernels.normalize_rows(x, weight, norm_bias, eps, None, None, 0.0, [], (None, normed, mean, scale))
    return normed, mean, scale


def _allocate_layer(
    x: Tensor, weight: Tensor, norm_bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    mean, scale = (x.new_empty((*x.shape[:-1], 1), dtype=widen(x.dtype)) for _ in range(2))
    return x.new_empty(x.shape), mean, scale


@define_operator("rms_norm")
def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return `x` normed and weighted, and the factor of each row [.., 1]."""
    kernels = find_kernels("norm", x, weight)
    if kernels is None:
        return scale_rows(x, weight, eps)
    normed, scales = _allocate_rms(x, weight, eps)
    kernels.normalize_rows(x, weight, None, eps, None, None, 0.0, [], (None, normed, None, scales))
    return normed, scales


def _allocate_rms(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return (
        x.new_empty(x.shape, dtype=promote(x, weight)),
        x.new_empty((*x.shape[:-1], 1), dtype=widen(x.dtype)),
    )


@define_operator("add_rms_norm")
def _add_rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    bias: Tensor | None,
    residual: Tensor | None,
    p: float,
    key: list[int],
) -> tuple[Tensor, Tensor, Tensor]:
    kernels = find_kernels("norm", x, weight, bias, residual)
    if kernels is None:
        added = _add(x, bias, residual, p, key)
        return added, *scale_rows(added, weight, eps)
    added, normed, scales = _allocate_added_rms(x, weight, eps, bias, residual)
    kernels.normalize_rows(x, weight, None, eps, bias, residual, p, key, (added, normed, None, scales))
    return added, normed, scales


def _allocate_added_rms(
    x: Tensor, weight: Tensor, eps: float, bias: Tensor | None, residual: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    added = x.new_empty(x.shape, dtype=promote(x, bias, residual))
    return added, *_allocate_rms(added, weight, eps)


@define_operator("add_layer_norm")
def _add_layer_norm(
    x: Tensor,
    weight: Tensor,
    norm_bias: Tensor | None,
    eps: float,
    bias: Tensor | None,
    residual: Tensor | None,
    p: float,
    key: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    kernels = find_kernels("norm", x, weight, norm_bias, bias, residual)
    if kernels is None:
        added = _add(x, bias, residual, p, key)
        return added, *center_rows(added, weight, norm_bias, eps)
    results = _allocate_added_layer(x, weight, norm_bias, eps, bias, residual)
    kernels.normalize_rows(x, weight, norm_bias, eps, bias, residual, p, key, results)
    return results


def _allocate_added_layer(
    x: Tensor, weight: Tensor, norm_bias: Tensor | None, eps: float, *others: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    bias, residual = others[:2]
    added = x.new_empty(x.shape, dtype=promote(x, bias, residual))
    return added, *_allocate_layer(added, weight, norm_bias, eps)


def _add(x: Tensor, bias: Tensor | None, residual: Tensor | None, p: float, key: list[int]) -> Tensor:
    """Return ``dropout(x + bias) + residual``, contiguous."""
    added: Tensor = bias_dropout_add_operator(x, bias, residual, p, key)
    return added.contiguous()


@define_operator("add_norm_backward")
def _add_norm_backward(
    d_normed: Tensor,
    d_added: Tensor | None,
    added: Tensor,
    weight: Tensor,
    mean: Tensor | None,
    scale: Tensor,
    p: float,
    key: list[int],
    wanted: list[bool],
) -> list[Tensor]:
    """Return the gradients of the sum, x, the weight, the norm's bias and x's bias; empty where not `wanted`.

    Those of the three vectors have the dtype of the statistics.
    """
    kernels = find_kernels("norm", added, d_added, d_normed, weight)
    if kernels is None:
        return _differentiate(d_normed, d_added, added, weight, mean, scale, p, key, wanted)
    results = _allocate_gradients(d_normed, d_added, added, weight, mean, scale, p, key, wanted)
    total, own, *vectors = [x if want else None for x, want in zip(results, wanted, strict=True)]
    sums = kernels.differentiate_rows(
        d_normed, d_added, added, weight, mean, scale, p, key, (total, own), [x is not None for x in vectors]
    )
    return [
        *results[:2],
        *(x if total is None else total for x, total in zip(results[2:], sums, strict=True)),
    ]


def _allocate_gradients(*arguments: Any) -> list[Tensor]:
    _, _, added, weight, _, scale, _, _, wanted = arguments
    shapes = [added.shape] * 2 + [weight.shape] * 3
    dtypes = [added.dtype] * 2 + [scale.dtype] * 3
    return [
        added.new_empty(shape if want else (0,), dtype=dtype)
        for shape, dtype, want in zip(shapes, dtypes, wanted, strict=True)
    ]


def _differentiate(
    d_normed: Tensor,
    d_added: Tensor | None,
    added: Tensor,
    weight: Tensor,
    mean: Tensor | None,
    scale: Tensor,
    p: float,
    key: list[int],
    wanted: list[bool],
) -> list[Tensor]:
    x, outer, gain = (tensor.to(scale.dtype) for tensor in (added, d_normed, weight))
    if mean is None:
        total, of_weight = differentiate_rms(outer, x, gain, scale)
        vectors = [of_weight, None]
    else:
        arguments = (outer, x, x.shape[-1:], mean, scale, gain, gain, [True, wanted[2], wanted[3]])
        total, *vectors = torch.ops.aten.native_layer_norm_backward(*arguments)
    total = total.to(added.dtype)
    if d_added is not None:
        total.add_(d_added)
    own = bias_dropout_add_operator(total, None, None, p, key) if key else total
    gradients = [
        total,
        own,
        *vectors,
        sum_rows(own, scale.dtype) if wanted[4] else None,
    ]
    return [
        gradient if want and gradient is not None else added.new_empty(0)
        for gradient, want in zip(gradients, wanted, strict=True)
    ]


def _save(
    ctx: Any, names: tuple[str, ...], inputs: tuple[Any, ...], saved: tuple[Tensor | None, ...]
) -> None:
    """Keep `saved`: the sum, the weight, means and scales; and the operator's inputs that are no tensors."""
    given = dict(zip(names, inputs, strict=True))
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*saved)
    ctx.names = names
    ctx.dtypes = {name: value.dtype for name, value in given.items() if isinstance(value, Tensor)}
    ctx.p, ctx.key = given.get("p", 0.0), given.get("key", [])


def _backward(ctx: Any, d_added: Tensor | None, d_normed: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return a gradient for each of the operator's inputs."""
    added, weight, mean, scale = ctx.saved_tensors
    if d_normed is None:
        d_normed = added.new_zeros(added.shape)
    needs = {name: needed for name, needed in zip(ctx.names, ctx.needs_input_grad, strict=True) if needed}
    dropped = bool(ctx.key)
    total = "residual" in needs or ("x" in needs and not dropped)
    wanted = [total, "x" in needs and dropped, "weight" in needs, "norm_bias" in needs, "bias" in needs]
    results = _add_norm_backward(d_normed, d_added, added, weight, mean, scale, ctx.p, ctx.key, wanted)
    gradients = dict(zip(("residual", "x", "weight", "norm_bias", "bias"), results, strict=True))
    if not dropped:
        gradients["x"] = gradients["residual"]
    return tuple(gradients[name].to(ctx.dtypes[name]) if name in needs else None for name in ctx.names)


_LAYER = ("x", "weight", "norm_bias", "eps")
_RMS = ("x", "weight", "eps")
_ADDED = ("bias", "residual", "p", "key")


def _save_layer(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _save(ctx, _LAYER, inputs, (inputs[0], inputs[1], *output[1:]))
    ctx.mark_non_differentiable(*output[1:])


def _save_rms(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _save(ctx, _RMS, inputs, (inputs[0], inputs[1], None, output[1]))
    ctx.mark_non_differentiable(output[1])


def _save_added_rms(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _save(ctx, (*_RMS, *_ADDED), inputs, (output[0], inputs[1], None, output[2]))
    ctx.mark_non_differentiable(output[2])


def _save_added_layer(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _save(ctx, (*_LAYER, *_ADDED), inputs, (output[0], inputs[1], *output[2:]))
    ctx.mark_non_differentiable(*output[2:])


_layer_norm.register_fake(_allocate_layer)
_rms_norm.register_fake(_allocate_rms)
_add_rms_norm.register_fake(_allocate_added_rms)
_add_layer_norm.register_fake(_allocate_added_layer)
_add_norm_backward.register_fake(_allocate_gradients)
_layer_norm.register_autograd(lambda ctx, g, *_: _backward(ctx, None, g), setup_context=_save_layer)
_rms_norm.register_autograd(lambda ctx, g, _: _backward(ctx, None, g), setup_context=_save_rms)
_add_rms_norm.register_autograd(lambda ctx, d, g, _: _backward(ctx, d, g), setup_context=_save_added_rms)
_add_layer_norm.register_autograd(lambda ctx, d, g, *_: _backward(ctx, d, g), setup_context=_save_added_layer)
for _operator in (_layer_norm, _rms_norm, _add_rms_norm, _add_layer_norm):
    _operator.register_autocast(cast_widely)
