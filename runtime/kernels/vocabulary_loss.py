"""The vocabulary-parallel cross-entropy: logits stay divided, three numbers per row travel (SC21 §2.3).

All-reduces cannot stand inside an operator, so the operators are what one rank does alone: statistics of its
columns of every row, and the rows' losses. Their gradient is computed from the logits once more, so that
nothing as wide as the vocabulary is kept beside them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from autoptd.runtime.kernels.precision import widen
from autoptd.runtime.kernels.registration import define_operator
from autoptd.runtime.kernels.selection import find_kernels
from autoptd.runtime.rank import Rank

# Elements worked on at once in plain torch: on a CPU few enough to stay in its cache.
CPU_CHUNK = 1 << 18
DEVICE_CHUNK = 1 << 26


def cross_entropy(
    rank: Rank,
    logits: Tensor,
    target: Tensor,
    vocabulary: int,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum"] = "mean",
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Compare divided `logits` [N, ceil(V / t)] with `target` [N]: a scalar, equal on all tensor ranks.

    All-reduces the row maximum, and in one tensor the row's sum of exponentials and its target logit. Columns
    past `vocabulary` are padding. Rows whose target is `ignore_index` count for nothing; the mean is over the
    others (nan when there are none). A target outside 0 to V - 1 is torch's own error. Half-precision logits
    are summed in float32, and no float32 copy of them is kept. The loss has `dtype`: by default the logits',
    under autocast float32.
    """
    _check(logits, target, reduction)
    width = logits.shape[1]
    start = rank.tensor.index * width
    own = max(0, min(width, vocabulary - start))  # columns that are no padding
    kept = target != ignore_index
    illegal = kept & ((target < 0) | (target >= vocabulary))
    column = target - start
    here = kept & (column >= 0) & (column < own)
    # An illegal target becomes a column that is not there, for torch to refuse as in the plain model.
    read = column.masked_fill(~here, 0).masked_fill(illegal, width)

    constant = logits.detach()
    largest, total = _sum_exponentials(rank, constant, own)
    aim = constant.gather(1, read[:, None]).squeeze(1).to(largest.dtype) - largest
    total, aim = rank.tensor.all_reduce(torch.stack([total, aim.masked_fill(~here, 0)])).unbind()
    column = column.masked_fill(~here, -1)
    losses: Tensor = torch.ops.autoptd.cross_entropy_rows(logits, column, largest, total, aim, own)
    loss = losses.masked_fill(~kept, 0).sum()
    if reduction == "mean":
        loss = loss / kept.sum()
    if dtype is None:
        device = logits.device.type
        autocasts = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        dtype = loss.dtype if autocasts else logits.dtype
    return loss.to(dtype)


def _check(logits: Tensor, target: Tensor, reduction: str) -> None:
    if logits.dim() != 2 or target.shape != logits.shape[:1]:
        raise ValueError(
            f"cross_entropy was given logits {list(logits.shape)} and target {list(target.shape)}, "
            "expected [N, V/t] and [N]; flatten them first"
        )
    if reduction not in ("mean", "sum"):
        raise ValueError(f"cross_entropy was given reduction={reduction!r}, expected 'mean' or 'sum'")
    if not logits.is_floating_point() or target.dtype != torch.int64:
        raise ValueError(
            f"cross_entropy was given logits of {logits.dtype} and a target of {target.dtype}, expected "
            "floating-point logits and torch.int64: the number of a class, not its probabilities"
        )
    if logits.device != target.device:
        raise ValueError(f"cross_entropy was given logits on {logits.device} and a target on {target.device}")


def _sum_exponentials(rank: Rank, logits: Tensor, own: int) -> tuple[Tensor, Tensor]:
    """Every row's maximum over all tensor ranks, and its sum of exponentials relative to it, of the own columns."""
    largest, total = torch.ops.autoptd.cross_entropy_statistics(logits, own).unbind()
    if rank.tensor.size == 1:
        return largest, total
    everywhere = rank.tensor.all_reduce(largest.clone(), "max")
    # A row that is -inf here adds 0; where it is on all ranks, -inf less -inf makes the sum nan, as torch's.
    return everywhere, total * (largest - everywhere).exp()


def _split_rows(logits: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Split all into a few rows at a time."""
    rows, width = logits.shape
    chunk = CPU_CHUNK if logits.device.type == "cpu" else DEVICE_CHUNK
    parts = max(1, rows // max(1, chunk // max(1, width)))
    return zip(*(tensor.tensor_split(parts) for tensor in (logits, *others)), strict=True)


@define_operator("cross_entropy_statistics")
def _statistics(logits: Tensor, own: int) -> Tensor:
    """The maximum of each row's first `own` columns, and the sum of exponentials relative to it.

    [2, N], in float32 for half precision; -inf and 0 of rows that are -inf.
    """
    kernels = find_kernels("cross_entropy", logits)
    results = _allocate_statistics(logits, own)
    if kernels is not None:
        kernels.sum_exponentials(logits, own, results)
        return results
    largest, total = results.unbind()
    for x, shift, peak in _split_rows(logits[:, :own], largest, total):
        _soften(x, shift, peak)
    total.reciprocal_().masked_fill_(largest == -torch.inf, 0)
    return results


def _allocate_statistics(logits: Tensor, own: int) -> Tensor:
    return logits.new_empty((2, logits.shape[0]), dtype=widen(logits.dtype))


def _soften(x: Tensor, largest: Tensor, peak: Tensor, out: Tensor | None = None) -> Tensor:
    """The softmax of the rows of `x`; fills their maximum, and the softmax's, which is 1 over its sum.

    One softmax of torch is sooner than one exponential. Of a row that is -inf it is nan.
    """
    softmax = torch.softmax(x, 1, dtype=peak.dtype, out=out)
    if x.shape[1] == 0:
        largest.fill_(-torch.inf)
        return softmax
    largest.copy_(x.amax(1))
    torch.amax(softmax, 1, out=peak)
    return softmax


@define_operator("cross_entropy_rows")
def _losses(logits: Tensor, column: Tensor, largest: Tensor, total: Tensor, aim: Tensor, own: int) -> Tensor:
    """The loss of every row, log(total) - aim.

    Differentiable in `logits` only: the others are what all ranks' logits gave. `column` is the own column that
    is the row's target, or -1.
    """
    return total.log() - aim


def _allocate_losses(
    logits: Tensor, column: Tensor, largest: Tensor, total: Tensor, aim: Tensor, own: int
) -> Tensor:
    return torch.empty_like(total)


@define_operator("cross_entropy_rows_backward")
def _gradient(
    factor: Tensor, logits: Tensor, column: Tensor, largest: Tensor, total: Tensor, own: int
) -> Tensor:
    """softmax - one_hot of the own columns times the row's `factor`, in the dtype of `logits`; padding has 0."""
    result = _allocate_gradient(factor, logits, column, largest, total, own)
    kernels = find_kernels("cross_entropy", logits)
    if kernels is not None:
        kernels.differentiate_losses(factor, logits, column, largest, total, own, result)
        return result
    result[:, own:] = 0
    if own == 0:
        return result
    place = column.clamp(min=0)[:, None]
    hit = factor.masked_fill(column < 0, 0).neg_()[:, None]
    rows = _split_rows(logits[:, :own], result[:, :own], factor, largest, total, place, hit)
    for x, gradient, scale, everywhere, divisor, at, addend in rows:
        shift, peak = torch.empty_like(everywhere), torch.empty_like(divisor)
        softmax = _soften(x, shift, peak, gradient if gradient.dtype == peak.dtype else None)
        impossible = shift == -torch.inf  # of these columns, where their softmax is nan
        if impossible.any():  # rare, and a pass over all of them
            softmax.masked_fill_(impossible[:, None], 0)
            peak.masked_fill_(impossible, 1)
        # So far of these columns alone; of all it is less, by what they are of the row's sum.
        softmax.mul_((shift - everywhere).exp_().mul_(scale).div_(peak * divisor)[:, None])
        softmax.scatter_add_(1, at, addend)
        if softmax is not gradient:
            gradient.copy_(softmax)
    return result


def _allocate_gradient(
    factor: Tensor, logits: Tensor, column: Tensor, largest: Tensor, total: Tensor, own: int
) -> Tensor:
    return logits.new_empty(logits.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    logits, column, largest, total, _, ctx.own = inputs
    ctx.save_for_backward(logits, column, largest, total)


def _backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
    gradient = torch.ops.autoptd.cross_entropy_rows_backward(factor, *ctx.saved_tensors, ctx.own)
    return gradient, None, None, None, None, None


_statistics.register_fake(_allocate_statistics)
_losses.register_fake(_allocate_losses)
_gradient.register_fake(_allocate_gradient)
_losses.register_autograd(_backward, setup_context=_save)
