"""Mixtures of experts: rows sorted by expert, one product for all experts, and the weighted sum of a token's rows.

A *pair* is a token and one of its k slots, number token * k + slot. `route` sorts pairs by expert, `dispatch` takes the
rows of their tokens, `grouped_linear` multiplies each expert's rows by its weight, `combine` adds a token's rows up.
A rank with its part of the experts has rows of their pairs alone. How many these are depends on data, and the buffers
do not: they hold tokens * min(k, own experts) rows, as many as there can be. What is behind the own rows is finite,
and means nothing in either direction: the sums of the other ranks have it.
"""

from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from autoptd.runtime.comm.rank import Rank
from autoptd.runtime.kernels.linear import Linear
from autoptd.runtime.kernels.operands import Operand, promote
from autoptd.runtime.kernels.registration import define_operator


def route(rank: Rank, experts: Tensor, number: int, own: int) -> tuple[Tensor, Tensor]:
    """Sort the pairs of the `own` experts of this tensor rank by expert: their order [rows], and counts [own].

    `experts` [tokens, k] are different ones of `number`; others have no row. Behind its own pairs is tokens * k: none.
    """
    size = rank.group("tensor").size
    if experts.dim() != 2 or own not in (number, -(-number // size)) or number % own:
        raise ValueError(
            f"route was given experts {list(experts.shape)}, {own} of {number} its own, on {size} tensor ranks: "
            "expected [tokens, k], and all experts or an equal part for each rank"
        )
    first = rank.group("tensor").index * own if own < number else 0
    return _route(experts, first, own)


def dispatch(x: Tensor, order: Tensor, slots: int) -> Tensor:
    """Take the rows of x [tokens, h] that the pairs in `order` have, each token with `slots` of them: [rows, h]."""
    return _dispatch(x, order, slots)  # type: ignore[no-any-return]


def grouped_linear(
    rows: Tensor, weight: Tensor, counts: Tensor, bias: Operand = None, transposed: bool = False
) -> Tensor:
    """Compute ``linear`` of each expert's rows, ``counts[e]`` in turn, with its ``weight[e]`` and bias; zeros behind.

    `weight` is [experts, out, in], or [experts, in, out] where `transposed`. Experts without rows get zero gradients.
    """
    inner = weight.shape[1 if transposed else 2]
    if rows.dim() != 2 or weight.dim() != 3 or rows.shape[1] != inner or counts.shape != weight.shape[:1]:
        way = "in, out" if transposed else "out, in"
        raise ValueError(
            f"grouped_linear was given rows {list(rows.shape)}, weight {list(weight.shape)} and counts "
            f"{list(counts.shape)}, expected [rows, in], [experts, {way}] and [experts]"
        )
    return _grouped_linear(rows, weight, counts, bias, transposed)


def combine(rows: Tensor, gates: Tensor, order: Tensor) -> Tensor:
    """Add up each token's rows, weighed by its `gates` [tokens, k]: [tokens, h], in the wider dtype of both.

    On a rank with its part of the experts it is a partial sum.
    """
    return _combine(rows, gates, order)


# Operators


def _allocate_route(experts: Tensor, first: int, own: int) -> tuple[Tensor, Tensor]:
    tokens, slots = experts.shape
    return experts.new_empty(tokens * min(slots, own), dtype=torch.int64), experts.new_empty(own, dtype=torch.int64)


@define_operator("route", _allocate_route)
def _route(experts: Tensor, first: int, own: int) -> tuple[Tensor, Tensor]:
    tokens, slots = experts.shape
    place = experts.flatten().long() - first
    place, order = place.masked_fill_((place < 0) | (place >= own), own).sort(stable=True)
    ends = torch.searchsorted(place, torch.arange(own + 1, device=place.device))
    order, rows = order[: tokens * min(slots, own)], ends[-1]
    torch._assert_async(rows <= len(order), f"a token has one of {own} experts twice: expected {slots} different ones")
    behind = torch.arange(len(order), device=place.device) >= rows
    return order.masked_fill(behind, tokens * slots), ends.diff()


@define_operator("dispatch", lambda x, order, slots: x.new_empty(len(order), x.shape[1]))
def _dispatch(x: Tensor, order: Tensor, slots: int) -> Tensor:
    return x.index_select(0, (order // slots).clamp_(max=len(x) - 1))


def _take_pairs(rows: Tensor, order: Tensor, tokens: int, slots: int) -> Tensor:
    """Return the row of each pair, zeros for one without: [tokens, slots, h]."""
    place = order.new_full((tokens * slots + 1,), len(order))
    place[order] = torch.arange(len(order), device=order.device)
    absent = (place := place[:-1]) == len(order)
    taken = rows.index_select(0, place.clamp_(max=len(order) - 1)).masked_fill_(absent[:, None], 0)
    return taken.view(tokens, slots, -1)


def _save_dispatch(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, order, ctx.slots = inputs
    ctx.tokens = len(x)
    ctx.save_for_backward(order)


def _differentiate_dispatch(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    (order,) = ctx.saved_tensors
    return _take_pairs(gradient, order, ctx.tokens, ctx.slots).sum(1), None, None


_dispatch.register_autograd(_differentiate_dispatch, setup_context=_save_dispatch)


def _allocate_linear(rows: Tensor, weight: Tensor, counts: Tensor, bias: Operand, transposed: bool) -> Tensor:
    return rows.new_empty(len(rows), weight.shape[2 if transposed else 1])


@define_operator("grouped_linear", _allocate_linear)
def _grouped_linear(rows: Tensor, weight: Tensor, counts: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    matrices = weight if transposed else weight.transpose(1, 2)
    if _runs_grouped(rows, weight, weight.mT):
        ends = counts.cumsum(0, dtype=torch.int32)
        out = functional.grouped_mm(rows.contiguous(), matrices, offs=ends)
        # The expert of each row; behind the rows of all experts one more.
        expert = torch.searchsorted(ends, torch.arange(len(rows), device=counts.device, dtype=ends.dtype), right=True)
        if bias is not None:
            out += bias[expert.clamp(max=len(bias) - 1)]
        return out.masked_fill_((expert == len(counts))[:, None], 0)
    out = rows.new_empty(len(rows), matrices.shape[2])
    for index, own in enumerate(groups := _list_rows(counts)):
        of_bias = None if bias is None else bias[index]
        Linear(transposed).multiply_into(out[own], rows[own], weight[index], of_bias)
    out[groups[-1].stop :] = 0
    return out


def _list_rows(counts: Tensor) -> list[slice]:
    """Return the rows of each expert, which are counted on the host."""
    ends = [0, *accumulate(counts.tolist())]
    return [slice(*pair) for pair in pairwise(ends)]


def _runs_grouped(*factors: Tensor) -> bool:
    """Return whether torch's grouped product takes the factors, in 16 bytes each: it needs no count on the host.

    Of no rows it refuses the strides.
    """
    return all(len(x) and x.is_cuda and x.dtype == torch.bfloat16 and x.shape[-1] % 8 == 0 for x in factors)


def _save_linear(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, weight, counts, _, ctx.transposed = inputs
    ctx.save_for_backward(rows, weight, counts)


def _differentiate_linear(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    rows, weight, counts = ctx.saved_tensors
    wants_rows, wants_weight, _, wants_bias, _ = ctx.needs_input_grad
    of_rows = _grouped_linear(gradient, weight, counts, None, not ctx.transposed) if wants_rows else None
    pair = (rows, gradient) if ctx.transposed else (gradient, rows)
    of_weight = _multiply_groups(pair[0], pair[1], counts) if wants_weight else None
    ones = gradient.new_ones(len(gradient), 8)  # as many as torch's grouped product takes
    of_bias = _multiply_groups(gradient, ones, counts)[..., 0] if wants_bias else None
    return of_rows, of_weight, None, of_bias, None


_grouped_linear.register_autograd(_differentiate_linear, setup_context=_save_linear)


def _multiply_groups(left: Tensor, right: Tensor, counts: Tensor) -> Tensor:
    """Return ``left.t() @ right`` of each expert's rows, zeros for one without: [experts, .., ..]."""
    if _runs_grouped(left, right):
        ends = counts.cumsum(0, dtype=torch.int32)
        return functional.grouped_mm(left.contiguous().t(), right.contiguous(), offs=ends)
    made = left.new_empty(len(counts), left.shape[1], right.shape[1])
    for out, own in zip(made, _list_rows(counts), strict=True):
        torch.mm(left[own].t(), right[own], out=out)
    return made


def _allocate_sums(rows: Tensor, gates: Tensor, order: Tensor) -> Tensor:
    return rows.new_empty(len(gates), rows.shape[1], dtype=promote(rows, gates))


@define_operator("combine", _allocate_sums)
def _combine(rows: Tensor, gates: Tensor, order: Tensor) -> Tensor:
    taken = _take_pairs(rows, order, *gates.shape)
    dtype = promote(rows, gates)
    return (gates.to(dtype).unsqueeze(1) @ taken.to(dtype)).squeeze(1)


def _save_combine(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate_combine(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    rows, gates, order = ctx.saved_tensors
    of_rows = of_gates = None
    if ctx.needs_input_grad[0]:
        weights = torch.cat([gates.flatten(), gates.new_zeros(1)])[order]  # none behind the own pairs
        of_rows = (_dispatch(gradient, order, gates.shape[1]) * weights[:, None]).to(rows.dtype)
    if ctx.needs_input_grad[1]:
        taken = _take_pairs(rows, order, *gates.shape)
        of_gates = (taken.to(gradient.dtype) @ gradient.unsqueeze(2)).squeeze(2).to(gates.dtype)
    return of_rows, of_gates, None


_combine.register_autograd(_differentiate_combine, setup_context=_save_combine)
