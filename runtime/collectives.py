"""Communication inside a stage, over the tensor group: Megatron's conjugate operators f and g (SC21 §2.3)."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from autoptd.runtime.comm.rank import Rank
from autoptd.runtime.kernels.linear import Gathered, Linear, multiply, multiply_scattered
from autoptd.runtime.kernels.operands import Operand
from autoptd.runtime.kernels.partial_sums import add_up, move, sum_over_ranks


def copy_to_tensor(rank: Rank, x: Tensor) -> Tensor:
    """Hand a replicated `x` to a divided region (f). Backward all-reduces the ranks' partial gradients."""
    return x if rank.group("tensor").size == 1 else move(x, lambda own: own, partial(add_up, rank))


def reduce_from_tensor(rank: Rank, x: Tensor) -> Tensor:
    """Sum the partial `x` of a divided region over the tensor ranks (g). Backward is the identity."""
    return sum_over_ranks(rank, x)


def reduce_scatter(rank: Rank, x: Tensor, dim: int) -> Tensor:
    """Sum the partial `x` over the tensor ranks, and keep this rank's t-th of its dimension `dim`.

    Backward all-gathers. With `gather_to_tensor` it stands for g and f (Korthikanti et al. 2022, §4.2.2).
    """
    return _relay(rank, x, dim, Rank.reduce_scatter, Rank.all_gather)


def gather_to_tensor(rank: Rank, x: Tensor, dim: int) -> Tensor:
    """Hand all tensor ranks' parts of `x`, in rank order along `dim`, to a divided region.

    Backward reduce-scatters the ranks' partial gradients.
    """
    return _relay(rank, x, dim, Rank.all_gather, Rank.reduce_scatter)


def all_gather(rank: Rank, x: Tensor, dim: int) -> Tensor:
    """Return all tensor ranks' parts of `x`, in rank order along `dim`; backward takes this rank's part."""
    return _relay(rank, x, dim, Rank.all_gather, take_own)


def take_own(rank: Rank, x: Tensor, dim: int) -> Tensor:
    """Take this tensor rank's part of a replicated `x`: the index-th of t equal, contiguous parts along `dim`.

    Backward gives a partial gradient, zero outside the part. Raises ValueError when t does not divide `dim`.
    """
    group = rank.group("tensor")
    width, rest = divmod(x.shape[dim], group.size)
    if rest:
        raise ValueError(f"dimension {dim} of {list(x.shape)} does not divide over {group.size} tensor ranks")
    return x if group.size == 1 else x.narrow(dim, group.index * width, width)


def copied_linear(
    rank: Rank, x: Tensor, weight: Tensor, bias: Operand = None, transposed: bool = False, gathered: Gathered = False
) -> Tensor:
    """Compute ``linear(copy_to_tensor(rank, x), weight, bias)``, or of ``gather_to_tensor(rank, x, 0)`` if `gathered`.

    `weight` is [out, in], or [in, out] where `transposed`. The backward posts f's all-reduce, computes the gradients of
    weight and bias, and then waits for it. Of a gathered x this rank's part is kept, which the backward gathers again.
    "in pieces", the tensor ranks' parts go around, and each is multiplied while the next one comes.
    """
    return multiply(rank, Linear(transposed), x, [weight], [bias], gathered)[0]


def copied_linears(
    rank: Rank,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Operand] | None = None,
    transposed: bool = False,
    gathered: Gathered = False,
) -> tuple[Tensor, ...]:
    """Compute several linears as `copied_linear` does one; biases may be None.

    Raises ValueError where there are not as many biases as weights.
    """
    given = [None] * len(weights) if biases is None else biases
    if len(given) != len(weights) or not weights:
        raise ValueError(
            f"copied_linears was given {len(weights)} weights and {len(given)} biases, expected a bias or None for each"
        )
    return multiply(rank, Linear(transposed), x, weights, given, gathered)


def scattered_linear(rank: Rank, x: Tensor, weight: Tensor, transposed: bool = False) -> Tensor:
    """Compute ``reduce_scatter(rank, linear(x, weight), 0)`` in t pieces, the sum of one sent while the next is made.

    The backward gathers the gradient in pieces, and multiplies each with the weight while the next one comes.
    """
    return multiply_scattered(rank, Linear(transposed), x, weight)


COPIED = (copied_linear, copied_linears)
SCATTERED = (reduce_scatter, scattered_linear)


def send_to_experts(rank: Rank, rows: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Send each expert's `rows` [n, h] to the rank that has it: an all-to-all of as many rows as there are.

    `rows` lie in the order of a tensor rank's experts, as many for each as `counts` [experts] says, and behind them may
    be others. The k ranks that share these experts tell each other their counts first. Returns the rows, from all, of
    this rank's experts, the index-th of k equal parts, in their order; how many they are [experts / k]; and the counts
    of all [k, experts]. The number of rows depends on data. Backward is `return_from_experts`.
    """
    group = rank.group("exchange")
    given = torch.stack(group.all_gather(counts))
    moved = move(rows, partial(_send, rank, given=given), partial(_return, rank, given=given, length=len(rows)))
    return moved, given.chunk(group.size, 1)[group.index].sum(0), given


def return_from_experts(rank: Rank, rows: Tensor, given: Tensor, length: int) -> Tensor:
    """Send the `rows` of this rank's own experts back to where they came from, by the counts of all that were `given`.

    Returns [length, h], with zeros behind the rows of all experts. Backward is `send_to_experts`.
    """
    return move(rows, partial(_return, rank, given=given, length=length), partial(_send, rank, given=given))


def _send(rank: Rank, rows: Tensor, given: Tensor) -> Tensor:
    if rows.is_meta:  # with as many rows for each rank
        return torch.empty_like(rows)
    group, sizes = rank.group("exchange"), _count_sent(given)
    return group.all_to_all(rows[: sum(sizes[group.index])], sizes)[_sort_by_expert(rank, given)]


def _return(rank: Rank, rows: Tensor, given: Tensor, length: int) -> Tensor:
    made = rows.new_zeros(length, *rows.shape[1:])
    if not rows.is_meta:
        by_source = torch.empty_like(rows, memory_format=torch.contiguous_format)
        by_source[_sort_by_expert(rank, given)] = rows
        sizes = [list(taken) for taken in zip(*_count_sent(given), strict=True)]
        back = rank.group("exchange").all_to_all(by_source, sizes)
        made[: len(back)] = back
    return made


def _count_sent(given: Tensor) -> list[list[int]]:
    """Return how many rows each of the k ranks has for each of them."""
    return given.view(len(given), len(given), -1).sum(2).tolist()


def _sort_by_expert(rank: Rank, given: Tensor) -> Tensor:
    """Return the order by expert of the rows that this rank gets, which lie by the rank that sent them."""
    own = given.chunk(len(given), 1)[rank.group("exchange").index]
    experts = torch.arange(own.shape[1], device=own.device).repeat(len(own))
    return experts.repeat_interleave(own.flatten()).argsort(stable=True)


def _relay(rank: Rank, x: Tensor, dim: int, forward: Callable[..., Tensor], backward: Callable[..., Tensor]) -> Tensor:
    if rank.group("tensor").size == 1:
        return x
    return move(x, partial(forward, rank, dim=dim), partial(backward, rank, dim=dim))
