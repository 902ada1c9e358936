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
    until, last = 0, None  # where the furthest one so far ends, and whose it is
    for gradient, leaf in sorted(held, key=lambda pair: pair[0].data_ptr()):
        begin, end = gradient.data_ptr(), gradient.data_ptr() + gradient.nbytes
        sharing = leaf if leaf is not None else last
        if begin < until and sharing is not None:
            assert sharing.grad is not None
            sharing.grad = sharing.grad.clone()
            if sharing is leaf:
                continue  # it is elsewhere now
            last = None
        if end > until:
            until, last = end, leaf
