"""Memory of gradients: autograd may leave the same memory in several places."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor


def separate_gradients(leaves: Iterable[Tensor], others: Sequence[Tensor]) -> None:
    """Give each leaf's ``.grad`` memory that no other leaf's has, nor any of `others`, by copying those that share.

    Autograd keeps a gradient that nobody else holds, and does not see who holds another view of its memory: in
    ``p[None] + q[None]`` both have the sum's gradient, and an addition into one changes the other.
    """
    held = [(x, None) for x in others] + [(leaf.grad, leaf) for leaf in leaves if leaf.grad is not None]
    spans = [(x.data_ptr(), x.data_ptr() + x.nbytes, leaf) for x, leaf in held]
    until, last = 0, None  # where the furthest one so far ends, and whose it is
    for begin, end, leaf in sorted(spans, key=lambda span: span[0]):
        if begin < until and leaf is not None:
            _copy(leaf)
            continue  # it is elsewhere now
        if begin < until and last is not None:
            _copy(last)
            last = None
        if end > until:
            until, last = end, leaf


def _copy(leaf: Tensor) -> None:
    assert leaf.grad is not None
    leaf.grad = leaf.grad.clone()
