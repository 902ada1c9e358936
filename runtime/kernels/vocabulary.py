"""The vocabulary-parallel embedding and cross-entropy: logits stay divided, three numbers per row travel (SC21 §2.3).

All-reduces cannot stand inside an operator, so the operators are what one rank does alone: statistics of its
columns of every row, and the rows' losses. Only the logits are kept as wide; the gradient computes softmax again.
"""

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from autoptd.runtime.comm.rank import Rank
from autoptd.runtime.kernels.linear import SUM
from autoptd.runtime.kernels.operands import widen
from autoptd.runtime.kernels.partial_sums import sum_over_ranks
from autoptd.runtime.kernels.registration import define_operator

# Elements worked on at once in plain torch: on a CPU few enough to stay in its cache.
CPU_CHUNK = 1 << 18
DEVICE_CHUNK = 1 << 26


def embedding(rank: Rank, weight: Tensor, ids: Tensor, vocabulary: int, padding_idx: int = -1) -> Tensor:
    """Look `ids` up in this tensor rank's rows of the table: partial, zero where another rank owns the row.

    `weight` [ceil(V / t), h] holds rows index * ceil(V / t) on; the last rank's may be padded. An id outside
    0 to V - 1 is torch's own IndexError on every rank. The row `padding_idx` (-1: none) gets no gradient.
    """
    local, elsewhere = localize(rank, len(weight), ids, vocabulary)
    start, own = own_columns(rank, len(weight), vocabulary)
    own_padding = padding_idx - start if start <= padding_idx < start + own else -1
    return lookup(weight, local, own_padding).masked_fill(elsewhere.unsqueeze(-1), 0)


def lookup(weight: Tensor, ids: Tensor, padding_idx: int = -1) -> Tensor:
    """Compute torch's ``embedding`` of a table in half precision.

    Where the table has a sum, the gradients of its rows are added there in float32, and no other row is read.
    """
    if not hasattr(weight, SUM):
        return torch.embedding(weight, ids, padding_idx)
    return _Lookup.apply(weight, ids, padding_idx)  # type: ignore[no-any-return, no-untyped-call]


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, padding_idx: int) -> Tensor:
        ctx.sum, ctx.padding_idx = getattr(weight, SUM), padding_idx
        ctx.save_for_backward(ids)
        return torch.embedding(weight, ids, padding_idx)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        """Add the rows of one id up at one of its places, then each place to the table.

        There a row gets zeros but from one place, so the order in which a GPU adds changes no bit.
        """
        (ids,) = ctx.saved_tensors
        ids, rows = ids.flatten().long(), gradient.reshape(-1, gradient.shape[-1]).float()
        if ctx.padding_idx >= 0:
            rows = rows.masked_fill((ids == ctx.padding_idx)[:, None], 0)
        count = torch.arange(len(ids), device=ids.device)
        places = ids.new_empty(len(ctx.sum)).scatter_(0, ids, count)[ids]
        ctx.sum.index_add_(0, ids, torch.ops.aten.embedding_dense_backward(rows, places, len(ids), -1, False))
        return None, None, None


def cross_entropy(
    rank: Rank,
    logits: Tensor,
    target: Tensor,
    vocabulary: int,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum", "none"] = "mean",
    dtype: torch.dtype | None = None,
    weight: Tensor | None = None,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Compare divided `logits` [N, ceil(V / t)] with `target` [N]: a scalar, or [N], equal on all tensor ranks.

    All-reduces the row maximum, and in one tensor the row's sum of exponentials and its target logit. Columns
    past `vocabulary` are padding. Rows whose target is `ignore_index` count for nothing; the mean is over the
    others (nan when there are none). A target outside 0 to V - 1 is torch's own error. Half-precision logits
    are summed in float32, and no float32 copy of them is kept. The loss has `dtype`: by default the logits'.
    `weight` [V] of the classes and `label_smoothing` are torch's. It can be differentiated once.
    """
    _check(rank, logits, target, vocabulary, reduction)
    dtype = logits.dtype if dtype is None else dtype
    start, own = own_columns(rank, logits.shape[1], vocabulary)
    kept = target != ignore_index
    read, elsewhere = localize(rank, logits.shape[1], target.masked_fill(~kept, 0), vocabulary)
    here = kept & ~elsewhere

    largest, part = _sum_exponentials(rank, logits, own)
    aim = logits.detach().gather(1, read[:, None]).squeeze(1).to(largest.dtype) - largest
    total, aim = rank.all_reduce(torch.stack([part, aim.masked_fill(~here, 0)])).unbind()
    rows = torch.stack([largest, part, total, aim])
    losses = _losses(logits, read.masked_fill(~here, -1), rows, own)
    counts = None if weight is None else weight.to(losses)[target.masked_fill(~kept, 0)]
    losses = losses if counts is None else losses * counts
    if label_smoothing:
        every = logits.new_ones(own) if weight is None else weight[start : start + own]
        sums = sum_over_ranks(rank, logits[:, :own].to(losses) @ every.to(losses))
        whole = vocabulary if weight is None else weight.sum()
        smooth = logsumexp(rank, logits, 1, vocabulary) * whole - sums
        losses = losses * (1 - label_smoothing) + smooth * (label_smoothing / vocabulary)
    return reduce_losses(losses, kept, reduction, counts).to(dtype)


def logsumexp(rank: Rank, x: Tensor, dim: int, vocabulary: int, keepdim: bool = False) -> Tensor:
    """Compute torch's ``logsumexp`` over a divided dimension, equal on all tensor ranks.

    In float32 for half precision. What is past `vocabulary` is padding. It can be differentiated once.
    """
    rows = x.movedim(dim, -1)
    logits = rows.reshape(-1, rows.shape[-1])
    _, own = own_columns(rank, logits.shape[1], vocabulary)
    largest, part = _sum_exponentials(rank, logits, own)
    total = rank.all_reduce(part.clone())
    nowhere = torch.full(part.shape, -1, device=x.device)
    found = _losses(logits, nowhere, torch.stack([largest, part, total, -largest]), own).view(rows.shape[:-1])
    return found.unsqueeze(dim) if keepdim else found


def own_columns(rank: Rank, width: int, vocabulary: int) -> tuple[int, int]:
    """Return the first of this rank's `width` columns, and how many of them are no padding."""
    start = rank.group("tensor").index * width
    return start, max(0, min(width, vocabulary - start))


def localize(rank: Rank, width: int, numbers: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Return the own numbers of columns, 0 for those of another rank, and which are these.

    An illegal number becomes one of no column, for torch to refuse as in the plain model.
    """
    start, own = own_columns(rank, width, vocabulary)
    local = numbers - start
    elsewhere = (local < 0) | (local >= own)
    illegal = (numbers < 0) | (numbers >= vocabulary)
    return local.masked_fill(elsewhere, 0).masked_fill(illegal, width), elsewhere


def reduce_losses(losses: Tensor, kept: Tensor, reduction: str, counts: Tensor | None = None) -> Tensor:
    """Reduce the losses of rows, of those that are `kept`; each counts 1 in the mean, or its `counts`."""
    losses = losses.masked_fill(~kept, 0)
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    return losses.sum() / (kept if counts is None else counts.masked_fill(~kept, 0)).sum()


def _check(rank: Rank, logits: Tensor, target: Tensor, vocabulary: int, reduction: str) -> None:
    t = rank.group("tensor").size
    if logits.dim() != 2 or target.shape != logits.shape[:1] or logits.shape[1] * t < vocabulary:
        raise ValueError(
            f"cross_entropy was given logits {list(logits.shape)} and target {list(target.shape)}, "
            f"expected [N, V/t] and [N], with V = {vocabulary} and t = {t}; flatten them first"
        )
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"cross_entropy was given reduction={reduction!r}, expected 'mean', 'sum' or 'none'")
    if not logits.is_floating_point() or target.dtype != torch.int64:
        raise ValueError(
            f"cross_entropy was given logits of {logits.dtype} and a target of {target.dtype}, expected "
            "floating-point logits and torch.int64: the number of a class, not its probabilities"
        )
    if logits.device != target.device:
        raise ValueError(f"cross_entropy was given logits on {logits.device} and a target on {target.device}")


def _sum_exponentials(rank: Rank, logits: Tensor, own: int) -> tuple[Tensor, Tensor]:
    """Return the rows' maxima over all ranks, and their own sums of exponentials relative to these."""
    largest, total = _statistics(logits.detach(), own).unbind()
    if rank.group("tensor").size == 1:
        return largest, total
    everywhere = rank.all_reduce(largest.clone(), "max")
    # A row that is -inf here adds 0; where it is on all ranks, -inf less -inf makes the sum nan, as torch's.
    return everywhere, total * (largest - everywhere).exp()


def _split_rows(logits: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Split all into a few rows at a time."""
    rows, width = logits.shape
    chunk = CPU_CHUNK if logits.device.type == "cpu" else DEVICE_CHUNK
    parts = max(1, rows // max(1, chunk // max(1, width)))
    return zip(*(tensor.tensor_split(parts) for tensor in (logits, *others)), strict=True)


def _allocate_statistics(logits: Tensor, own: int) -> Tensor:
    return logits.new_empty((2, logits.shape[0]), dtype=widen(logits.dtype))


@define_operator("cross_entropy_statistics", _allocate_statistics, triton="cross_entropy")
def _statistics(logits: Tensor, own: int) -> Tensor:
    """Return the maximum of each row's first `own` columns, and the sum of exponentials relative to it: [2, N].

    In float32 for half precision; -inf and 0 of rows that are -inf.
    """
    statistics = _allocate_statistics(logits, own)
    largest, total = statistics.unbind()
    if own == 0:
        largest.fill_(-torch.inf)
        total.zero_()
        return statistics
    for x, maximum, sum_ in _split_rows(logits[:, :own], largest, total):
        # One softmax of torch is sooner than one exponential; its maximum is 1 over the sum.
        torch.amax(torch.softmax(x, 1, dtype=sum_.dtype), 1, out=sum_)
        maximum.copy_(x.amax(1))
    total.reciprocal_().masked_fill_(largest == -torch.inf, 0)  # there softmax and sum are nan
    return statistics


@define_operator("cross_entropy_rows", lambda *arguments: torch.empty_like(arguments[2][0]))
def _losses(logits: Tensor, column: Tensor, rows: Tensor, own: int) -> Tensor:
    """Return the loss of every row, log(total) - aim.

    `column` is the own column that is the row's target, or -1. `rows` [4, N] are the maximum over all ranks and,
    relative to it, the own columns' sum of exponentials, all ranks' and the target's logit: no gradients go to these.
    """
    return rows[2].log() - rows[3]


@define_operator("cross_entropy_rows_backward", lambda f, x, *_: x.new_empty(x.shape), triton="cross_entropy")
def _gradient(factor: Tensor, logits: Tensor, column: Tensor, rows: Tensor, own: int) -> Tensor:
    """Return softmax - one_hot of the own columns times the row's `factor`, in the dtype of `logits`; padding has 0."""
    result = logits.new_empty(logits.shape)
    result[:, own:] = 0
    if own == 0:
        return result
    parts = _split_rows(logits[:, :own], result[:, :own], factor, column, rows.T)
    for x, gradient, scale, at, numbers in parts:
        _, part, total, _ = numbers.unbind(1)
        # A softmax of the own columns alone becomes that of all columns by the factor part / total.
        softmax = torch.softmax(x, 1, dtype=rows.dtype).masked_fill_((part == 0)[:, None], 0)
        softmax.mul_((scale * (part / total))[:, None])
        hit = scale.masked_fill(at < 0, 0).neg()
        gradient.copy_(softmax.scatter_add_(1, at.clamp(min=0)[:, None], hit[:, None]))
    return result


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    logits, column, rows, ctx.own = inputs
    ctx.save_for_backward(logits, column, rows)


def _backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
    if torch.is_grad_enabled():
        raise RuntimeError("cross_entropy has no second derivative: leave create_graph=True out")
    logits, column, rows = ctx.saved_tensors
    return _gradient(factor, logits, column, rows, ctx.own), None, None, None


_losses.register_autograd(_backward, setup_context=_save)
