"""The vocabulary-parallel cross-entropy: logits stay divided, three numbers per row travel (SC21 §2.3)."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from autoptd.runtime.communicator import Group
from autoptd.runtime.rank import Rank


def cross_entropy(
    rank: Rank,
    logits: Tensor,
    target: Tensor,
    vocabulary: int,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum"] = "mean",
) -> Tensor:
    """Compare divided `logits` [N, ceil(V / t)] with `target` [N]: a scalar, equal on all tensor ranks.

    All-reduces the row maximum, and in one tensor the row's sum of exponentials and its target logit. Columns
    past `vocabulary` are padding. Rows whose target is `ignore_index` count for nothing; the mean is over the
    others (nan when there are none). A target outside 0 to V - 1 is torch's own error. Half-precision logits
    are summed in float32.
    """
    if logits.dim() != 2 or target.shape != logits.shape[:1]:
        raise ValueError(
            f"cross_entropy was given logits {list(logits.shape)} and target {list(target.shape)}, "
            "expected [N, V/t] and [N]; flatten them first"
        )
    if reduction not in ("mean", "sum"):
        raise ValueError(f"cross_entropy was given reduction={reduction!r}, expected 'mean' or 'sum'")
    mean = reduction == "mean"
    arguments = (logits, target, rank.tensor, vocabulary, ignore_index, mean)
    loss: Tensor = _CrossEntropy.apply(*arguments)  # type: ignore[no-untyped-call]
    return loss


class _CrossEntropy(torch.autograd.Function):
    """Saves softmax - one_hot of the own columns, which is the gradient but for a factor per row."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, group: Group, vocabulary: int, ignore_index: int, mean: bool
    ) -> Tensor:
        dtype = torch.float32 if logits.dtype in (torch.bfloat16, torch.float16) else logits.dtype
        width = logits.shape[1]
        start = group.index * width
        own = max(0, min(width, vocabulary - start))  # columns that are no padding
        kept = target != ignore_index
        illegal = kept & ((target < 0) | (target >= vocabulary))
        column = target - start
        here = kept & (column >= 0) & (column < own)
        # An illegal target becomes a column that is not there, for torch to refuse as in the plain model.
        column = column.masked_fill(~here, 0).masked_fill(illegal, width)

        largest = logits.new_full(target.shape, -torch.inf, dtype=dtype)
        if own:
            torch.amax(logits[:, :own].to(dtype), 1, out=largest)
        largest = group.all_reduce(largest, "max")
        shifted = logits.to(dtype) - largest[:, None]
        aim = shifted.gather(1, column[:, None]).squeeze(1).masked_fill(~here, 0)
        softmax = shifted.exp_()
        softmax[:, own:] = 0
        total, aim = group.all_reduce(torch.stack([softmax.sum(1), aim])).unbind()
        loss = (total.log() - aim).masked_fill(~kept, 0).sum()
        count = kept.sum() if mean else None

        if ctx.needs_input_grad[0]:
            softmax.div_(total[:, None]).scatter_add_(1, column[:, None], -here.to(dtype)[:, None])
            ctx.save_for_backward(softmax.to(logits.dtype), kept, count)
        return (loss if count is None else loss / count).to(logits.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        direction, kept, count = ctx.saved_tensors
        factor = (gradient if count is None else gradient / count).expand(kept.shape).masked_fill(~kept, 0)
        return direction * factor[:, None], None, None, None, None, None
