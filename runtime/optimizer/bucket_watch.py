"""The moments of a stage's last backward at which its buckets of gradients are complete."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from autoptd.runtime.optimizer.gradient_memory import Bucket


@dataclass(frozen=True)
class BucketWatch:
    """A watch over the `buckets` of a stage's `leaves` in its last backward, each of which `post` sends by its number.

    `triggers` tell how many buckets are complete after a leaf, by its name; empty until a backward has shown it.
    Autograd visits the leaves of one graph in the same order each time.
    """

    leaves: Mapping[str, Tensor]
    buckets: Sequence[Bucket]
    post: Callable[[int], None]
    triggers: dict[str, int]

    @contextmanager
    def report(self, complete: Callable[[int], None]) -> Iterator[None]:
        """Call `complete` with the number of each bucket, ascending, when the backward inside has completed it.

        In the first backward that is at its end. Raises RuntimeError where a gradient comes later than it did then.
        """
        order: list[str] = []
        versions: list[list[int]] = []

        def tell(count: int) -> None:
            for number in range(len(versions), count):
                complete(number)
                versions.append(self._read_versions(number))

        def pass_leaf(name: str, *_: object) -> None:
            order.append(name)
            tell(self.triggers.get(name, 0))

        # A node that is reached without a gradient has been added to by a product.
        handles = [
            get_gradient_edge(self.leaves[name]).node.register_hook(partial(pass_leaf, name))
            for name in (self.triggers or [n for bucket in self.buckets for n in bucket.views])
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        if not self.triggers:
            self._learn(order)
        tell(len(self.buckets))
        for number, found in enumerate(versions):
            if found != self._read_versions(number):
                names = ", ".join(self.buckets[number].views)
                raise RuntimeError(f"a gradient of {names} came after their sum over the replicas had begun")

    def _learn(self, order: Sequence[str]) -> None:
        """Note after which leaf of the `order` each bucket, and those before it, are complete."""
        places = {name: place for place, name in enumerate(order)}
        latest = -1
        for number, bucket in enumerate(self.buckets):
            latest = max([latest, *(places[name] for name in bucket.views if name in places)])
            if latest >= 0:
                self.triggers[order[latest]] = number + 1

    def _read_versions(self, number: int) -> list[int]:
        return [view._version for view in self.buckets[number].views.values()]
