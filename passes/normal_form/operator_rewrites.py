"""Rewrite operators to the normal form: one small function each, and the table of them."""

import math
from collections.abc import Callable
from string import ascii_letters
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from autoptd.passes.ir.nodes import aten_name, name_arguments, nodes_in, refuse_random, shape_of, where
from autoptd.passes.normal_form import loss_rewrites, stacked_experts
from autoptd.passes.normal_form.draws import draws, write_draw
from autoptd.passes.normal_form.writer import Call
from autoptd.runtime import aten, kernels

Rule = Callable[[Call], "fx.Node | None"]
"""The replacement of a call: a new node, an existing one, or None to keep the call."""


def rewrite(target: Any, call: Call) -> fx.Node:
    """Write the normal form of `call`. Raises ValueError for an unsupported or a random operator."""
    packet = getattr(target, "overloadpacket", None)
    rule = _draw if draws(target) else RULES.get(target, RULES.get(packet))
    made = rule(call) if rule is not None else None
    if made is not None:
        return made
    refuse_random(call.node, target)
    return call.writer.emit(target, call.args, call.meta, call.kwargs)


def _refused(reason: str) -> Rule:
    def rule(call: Call) -> fx.Node | None:
        raise ValueError(f"{where(call.node)}: {reason.format(call.node.target)}")

    return rule


_recurrent = _refused(
    "{} is a whole recurrent layer, which is not supported: write its steps with linear operators, or leave the layer "
    "out of the compiled model"
)
_unlike_dense = _refused(
    "ranks cannot sum the sparse gradient of an embedding with sparse=True, nor divide it by the frequency of a token "
    "in the whole batch (scale_grad_by_freq=True), of which they see one microbatch at a time: leave these options out"
)
_embedding_bag = _refused("an embedding bag is not supported: write an embedding and the mean or sum of bags")


def _embedding(call: Call) -> fx.Node | None:
    return _unlike_dense(call) if call.argument("sparse") or call.argument("scale_grad_by_freq") else None


def _cast(call: Call) -> fx.Node | None:
    same = call.given.dtype == call.val.dtype
    return call.source if same else call.emit(aten.to.dtype, call.source, call.val.dtype)


def _contiguous(call: Call) -> fx.Node | None:
    same = call.given.stride() == call.val.stride()
    return call.source if same else call.emit(aten.contiguous.default, call.source)


def _shaped(target: OpOverload) -> Rule:
    """Write all sizes: reshape for views too, because later passes may change strides."""

    def rule(call: Call) -> fx.Node:
        same = call.given.shape == call.val.shape
        return call.source if same else call.emit(target, call.source, list(call.val.shape))

    return rule


_reshape = _shaped(aten.reshape.default)


def _repeat(call: Call) -> fx.Node | None:
    """Write tiles as an expanded dimension outside each repeated one, merged into it if it has a size."""
    times = [int(n) for n in call.args[1]]
    if call.given.numel() == 0 or 0 in times:
        return None
    x = call.reshape(call.source, [1] * (len(times) - call.given.dim()) + list(call.given.shape))
    for dim, number in enumerate(times):
        x = _repeat_indices(call, x, dim, number, tiles=True) if number > 1 else x
    return x


def _repeat_interleave(call: Call) -> fx.Node | None:
    """Write repetitions by one number as torch computes them."""
    dim, x = call.argument("dim"), call.source
    if dim is None:
        dim, x = 0, call.reshape(x, [call.given.numel()])
    return _repeat_indices(call, x, dim % len(shape_of(x)), call.args[1])


def _repeat_indices(call: Call, x: fx.Node, dim: int, times: int, *, tiles: bool = False) -> fx.Node:
    """Repeat each index of a dimension, such as key heads that query heads share; `tiles`: all of them, in turn."""
    *outer, size = shape_of(x)[: dim + 1]
    inner = shape_of(x)[dim + 1 :]
    opened, spread = ([1, size], [times, size]) if tiles else ([size, 1], [size, times])
    if tiles and size == 1:
        opened, spread = [1], [times]
    x = call.reshape(x, [*outer, *opened, *inner])
    x = call.derive(aten.expand.default, x, [*outer, *spread, *inner])
    return call.reshape(x, [*outer, size * times, *inner])


def _slice(call: Call) -> fx.Node | None:
    extent = call.given.shape
    if extent == call.val.shape:
        return call.source
    dim, start, end, step = (call.argument(name) for name in ("dim", "start", "end", "step"))
    start, end, _ = slice(start, end).indices(extent[dim])
    sizes = (dim % len(extent), start, end) if step == 1 else (dim % len(extent), start, end, step)
    return call.emit(aten.slice.Tensor, call.source, *sizes)


def _chunk(call: Call) -> fx.Node | None:
    dim = call.argument("dim")
    return call.emit(aten.split.Tensor, call.source, call.val[0].shape[dim], dim)


def _permute(call: Call) -> fx.Node | None:
    """Write an operator that moves dimensions as ``transpose`` or ``permute``, from what becomes of different sizes."""
    if call.val.is_complex():
        return None
    twin = torch.empty([*range(call.given.dim())], device="meta")
    order = list(call.node.target(twin, *call.args[1:], **call.kwargs).shape)  # type: ignore[operator]
    moved = [d for d, source in enumerate(order) if d != source]
    if len(moved) == 2:
        return call.emit(aten.transpose.int, call.source, *moved)
    return call.emit(aten.permute.default, call.source, order) if moved else call.source


def _neutral(value: int) -> Rule:
    """Drop x * 1 and, for integers, x + 0 (a float's -0.0 + 0 is not -0.0)."""

    def rule(call: Call) -> fx.Node | None:
        source, other = call.args[:2]
        if not isinstance(source, fx.Node) or isinstance(other, fx.Node) or other != value:
            return None
        same = call.given.dtype == call.val.dtype and call.given.shape == call.val.shape
        return source if same and (value == 1 or not call.val.is_floating_point()) else None

    return rule


def _matmul(call: Call) -> fx.Node | None:
    """Write x @ w.t() of a matrix as ``linear``, as torch computes it."""
    other = call.args[1]
    turned = other.target is aten.transpose.int and other.args[0].op == "get_attr"
    if not turned or call.given.dim() < 2 or other.meta["val"].dim() != 2:
        return None
    return call.emit(aten.linear.default, call.source, other.args[0])


def _linear(call: Call) -> fx.Node | None:
    """Write the product of an identity with a weight as the weight transposed (DoRA)."""
    if call.source.target is not aten.eye.default or call.argument("bias") is not None:
        return None
    return call.emit(aten.transpose.int, call.args[1], 0, 1)


def _norm(call: Call) -> fx.Node | None:
    """Write the 2-norm over a dimension by a sum, which may be divided, without a gradient: a root's is not 0 at 0."""
    dim, options = call.argument("dim"), [call.argument(name) for name in ("ord", "dtype")]
    other = options not in ([None, None], [2, None]) or call.val.dtype == torch.float16  # whose squares overflow
    if call.source in call.writer.trained or other or len(dim or ()) != 1:
        return None
    squares = call.derive(aten.mul.Tensor, call.source, call.source)
    total = call.derive(aten.sum.dim_IntList, squares, dim, call.argument("keepdim"))
    return call.emit(aten.sqrt.default, total)


def _einsum(call: Call) -> fx.Node:
    """Write letters for "...", and several products one by one: along the path, or the first two, their result last."""
    equation, operands = str(call.args[0]).replace(" ", ""), call.args[1]
    inputs, arrow, result = equation.partition("->")
    groups = inputs.split(",")
    if not arrow:
        once = sorted(letter for letter in inputs if letter.isalpha() and inputs.count(letter) == 1)
        result = "..." * ("..." in inputs) + "".join(once)
    free = "".join(letter for letter in ascii_letters if letter not in equation)
    dims = [x.meta["val"].dim() for x in operands]
    hidden = [dim - len(g) + 3 if "." in g else 0 for g, dim in zip(groups, dims, strict=True)]
    names = [free[len(free) - count :] for count in (*hidden, max(hidden))]
    *groups, result = (g.replace("...", name) for g, name in zip((*groups, result), names, strict=True))
    pending = list(zip(groups, operands, strict=True))
    path = iter(call.argument("path") or [0, 1] * len(pending))
    while len(pending) > 2:
        second, first = (pending.pop(at) for at in sorted((next(path), next(path)), reverse=True))
        read = result + "".join(group for group, _ in pending)
        kept = "".join(letter for letter in dict.fromkeys(first[0] + second[0]) if letter in read)
        product = f"{first[0]},{second[0]}->{kept}"
        pending.append((kept, call.derive(aten.einsum.default, product, [first[1], second[1]])))
    product = ",".join(group for group, _ in pending) + f"->{result}"
    return call.emit(aten.einsum.default, product, [x for _, x in pending])


def _tensordot(call: Call) -> fx.Node:
    """Write an einsum, which may round otherwise if it sums over several dimensions, or has a vector."""
    x, y, own, other = call.args
    letters = iter(ascii_letters)
    first, second = ([next(letters) for _ in tensor.meta["val"].shape] for tensor in (x, y))
    for dim, twin in zip(own, other, strict=True):
        second[twin] = first[dim]
    kept = [letter for letter in first + second if (letter in first) is not (letter in second)]
    return call.emit(aten.einsum.default, "".join([*first, ",", *second, "->", *kept]), [x, y])


def _concatenate(call: Call) -> fx.Node | None:
    """Drop [0], which torch joins to tensors of any shape; its dtype counts, though."""
    sources, *dim = call.args
    filled = [source for source in sources if source.meta["val"].shape != (0,)]
    if len(filled) in (0, len(sources)):
        return None
    dtype = call.val.dtype
    filled = [x if x.meta["val"].dtype == dtype else call.derive(aten.to.dtype, x, dtype) for x in filled]
    return call.emit(aten.cat.default, filled, *dim) if len(filled) > 1 else filled[0]


def _as(target: OpOverload) -> Rule:
    return lambda call: call.emit(target, *call.args, **call.kwargs)


def _dropout(call: Call) -> fx.Node | None:
    p = call.argument("p")
    if p == 0 or not call.argument("train"):
        return call.source
    if call.node.target is not aten.dropout.default:
        return None  # of whole channels, or that keeps a mean and a variance: refused as random
    return call.emit(kernels.dropout, call.writer.rank, call.source, p, call.writer.next_number("dropouts"))


def _draw(call: Call) -> fx.Node | None:
    """Write a draw as arithmetic on keyed numbers, for each element of an argument of its shape, else of zeros."""
    if call.val.is_complex():
        return None

    def uniform(dtype: torch.dtype) -> fx.Node:
        shape = call.val.shape
        likes = (x for x in nodes_in(call.args) if shape_of(x) == shape)
        like: Any = next(likes, None) or call.fill(aten.zeros.default, shape, dtype)
        while like.target is aten.zeros_like.default:
            like = like.args[0]
        like = like if like.meta["val"].dtype == dtype else call.derive(aten.to.dtype, like, dtype)
        val = torch.empty_like(like.meta["val"], memory_format=torch.contiguous_format)
        args = call.writer.rank, like, call.writer.next_number("draws")
        return call.writer.emit(kernels.uniform, args, {**call.meta, "val": val})

    given = name_arguments(call.node.target, call.args, call.kwargs)
    for name in ("mean", "std"):  # no gradient reaches them, as in torch
        if given.get(name) in call.writer.trained:
            given[name] = call.derive(aten.detach.default, given[name])
    drawn: fx.Node = write_draw(call.node.target, given, call.val.dtype, uniform, call.derive)
    if drawn.meta["val"].dtype != call.val.dtype:
        drawn = call.emit(aten.to.dtype, drawn, call.val.dtype)
    return drawn


def _attention(call: Call) -> fx.Node | None:
    q, k, v, mask, p = (call.argument(n) for n in ("query", "key", "value", "attn_mask", "dropout_p"))
    is_causal, scale, grouped = (call.argument(name) for name in ("is_causal", "scale", "enable_gqa"))
    if p == 0:
        options = {"is_causal": is_causal, "scale": scale, "enable_gqa": grouped}
        kept = {name: value for name, value in options.items() if value not in (None, False)}
        masks = () if mask is None else (mask,)
        return call.emit(aten.scaled_dot_product_attention.default, q, k, v, *masks, **kept)
    if grouped:
        k, v = (_repeat_indices(call, x, 1, shape_of(q)[1] // shape_of(x)[1]) for x in (k, v))
    scale = 1 / math.sqrt(q.meta["val"].shape[-1]) if scale is None else scale
    options = {"is_causal": True} if is_causal else {}
    options |= {"scale": scale, "p": p, "operator": call.writer.next_number("dropouts")}
    scores = call.derive(aten.matmul.default, q, call.derive(aten.transpose.int, k, -2, -1))
    if mask in call.writer.trained:
        # A mask gets no gradient in the kernel, which gets only the hidden keys.
        scores = call.derive(aten.add.Tensor, call.derive(aten.mul.Tensor, scores, scale), mask)
        mask, options["scale"] = call.derive(aten.ne.Scalar, mask, -math.inf), 1.0
    masks = () if mask is None else (mask,)
    meta = {**call.meta, "val": scores.meta["val"]}
    weights = call.writer.emit(kernels.scaled_softmax, (call.writer.rank, scores, *masks), meta, options)
    return call.emit(aten.matmul.default, weights, v)


# Operators with two names in torch: the other one, and the one that passes know.
_OTHER_NAMES = """
    multiply=mul subtract=sub divide=div true_divide=div negative=neg absolute=abs clip=clamp fix=trunc greater=gt
    greater_equal=ge less=lt less_equal=le not_equal=ne arctan=atan arctan2=atan2 arcsin=asin arccos=acos
    __and__=bitwise_and __or__=bitwise_or __xor__=bitwise_xor
"""


def _filled(factory: OpOverload) -> Rule:
    """Write a tensor of one number without the one that it is like, as a constant; zeros for what is written to later.

    Not one that is as large as an activation, which is not worth keeping.
    """

    def rule(call: Call) -> fx.Node | None:
        name = aten_name(call.node.target)
        if name.endswith("_like") and call.given.is_floating_point():
            zeros = name == "empty_like"
            return call.emit(aten.zeros_like.default, call.source, dtype=call.val.dtype) if zeros else None
        fill = (call.argument("fill_value"),) if factory is aten.full.default else ()
        return call.emit(factory, list(call.val.shape), *fill, dtype=call.val.dtype)

    return rule


def _route(call: Call) -> fx.Node:
    """Write that each rank has all experts so far."""
    experts, _, number = call.args
    return call.emit(kernels.route, call.writer.rank, experts, number, number)


def _grouped(call: Call) -> fx.Node | None:
    """Write torch's product of sorted rows with a matrix for each expert as ours, which takes counts and not ends."""
    rows, weight, ends, *rest = call.args
    if call.given.dim() != 2 or weight.meta["val"].dim() != 3 or any(x is not None for x in rest) or call.kwargs:
        return None
    begins = call.derive(aten.constant_pad_nd.default, call.derive(aten.slice.Tensor, ends, 0, 0, -1), [1, 0])
    return call.emit(kernels.grouped_linear, rows, weight, call.derive(aten.sub.Tensor, ends, begins), None, True)


RULES: dict[Any, Rule] = {  # an operator's overloads that are all written alike have one row
    **dict.fromkeys((aten.alias, aten.lift_fresh_copy, aten.lift_fresh), lambda call: call.source),
    **dict.fromkeys((aten.to, aten._to_copy, aten.type_as), _cast),
    **dict.fromkeys((aten.contiguous, aten.clone), _contiguous),
    **dict.fromkeys((aten.view.default, aten.reshape, aten._unsafe_view, aten.view_as), _reshape),
    **dict.fromkeys((aten.reshape_as, aten.flatten, aten.unflatten), _reshape),
    **dict.fromkeys((aten.gru, aten.lstm, aten.rnn_tanh, aten.rnn_relu), _recurrent),
    **dict.fromkeys((aten.expand, aten.expand_as), _shaped(aten.expand.default)),
    **dict.fromkeys((aten.t, aten.numpy_T, aten.mT, aten.mH, aten.adjoint), _permute),
    **dict.fromkeys((aten.movedim, aten.moveaxis), _permute),
    **dict.fromkeys((aten.cross_entropy_loss.default, aten.nll_loss_nd.default), loss_rewrites.write_loss),
    aten.kl_div.default: loss_rewrites.write_composite,
    aten.index.Tensor: loss_rewrites.write_index,
    aten.repeat.default: _repeat,
    aten.repeat_interleave.self_int: _repeat_interleave,
    aten.slice.Tensor: _slice,
    aten.chunk.default: _chunk,
    aten.detach.default: lambda call: None if call.source in call.writer.trained else call.source,
    # Without `cudnn_enable`, which differs by machine and means nothing to the operator.
    aten.layer_norm.default: lambda call: call.emit(aten.layer_norm.default, *call.args[:5]),
    kernels.route: _route,
    aten._grouped_mm.default: _grouped,
    aten.embedding.default: _embedding,
    aten.embedding_bag: _embedding_bag,
    aten.mul.Tensor: _neutral(1),
    aten.add.Tensor: _neutral(0),
    aten.matmul.default: _matmul,
    aten.linear.default: _linear,
    aten.linalg_norm.default: _norm,
    aten.einsum.default: _einsum,
    aten.tensordot.default: _tensordot,
    aten.sum.dim_IntList: stacked_experts.write_sum,
    aten.cat.default: _concatenate,
    aten.max.other: _as(aten.maximum.default),
    aten.min.other: _as(aten.minimum.default),
    **dict.fromkeys((aten.dropout.default, aten.feature_dropout.default, aten.alpha_dropout.default), _dropout),
    aten.empty.memory_format: _filled(aten.zeros.default),
    aten.scaled_dot_product_attention.default: _attention,
    **{
        getattr(aten, form.format(name)).default: _filled(getattr(aten, name.replace("empty", "zeros")).default)
        for name in ("ones", "zeros", "full", "empty")
        for form in ("new_{}", "{}_like")
    },
    **{
        getattr(getattr(aten, other), overload): _as(getattr(getattr(aten, name), overload))
        for other, name in (pair.split("=") for pair in _OTHER_NAMES.split())
        for overload in {*getattr(aten, other).overloads()} & {*getattr(aten, name).overloads()}
    },
}
