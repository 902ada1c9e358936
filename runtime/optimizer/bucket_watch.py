"""The moments of a stage's last backward at which its buckets of gradients are complete."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from autoptd.runtime.optimizer.gradient_memory import Bucket


@dataclass(frozen=True)
class BucketWatch:
    """A watch over the `buckets` of a stage's `leaves` in its last backward; `post` sends one, by its number."""

    leaves: Mapping[str, Tensor]
    buckets: Sequence[Bucket]
    post: Callable[[int], None]

    @contextmanager
    def report(self, complete: Callable[[int], None]) -> Iterator[None]:
        """Call `complete` with the number of each bucket, ascending, when the backward inside has completed it."""
        waiting = [set(bucket.views) for bucket in self.buckets]
        numbers = iter(range(len(waiting)))

        def pass_leaf(own: set[str], name: str, *_: object) -> None:
            own.discard(name)
            while waiting and not waiting[0]:
                waiting.pop(0)
                complete(next(numbers))

        # A node that is reached without a gradient has been added to by a product.
        hooks = ((name, partial(pass_leaf, own, name)) for own in waiting for name in tuple(own))
        handles = [get_gradient_edge(self.leaves[name]).node.register_hook(hook) for name, hook in hooks]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        for number in numbers:  # with leaves that the loss does not reach
            complete(number)
