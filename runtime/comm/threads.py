"""Ranks as threads of one process: how they exchange tensors and wait, and how a failure of one ends the others."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import torch
from torch import Tensor

from autoptd.runtime.health.activity import Position
from autoptd.runtime.program.schedule import Action

T = TypeVar("T")
R = TypeVar("R")


class ThreadWorld:
    """The threads that may wait for each other.

    Every wait uses one condition, so the world knows which thread waits for what. When one rank fails, all others
    stop. When all running threads wait, that is a deadlock, which is reported at once and not after a timeout.
    Threads may wait only inside `run`; a world cannot be used again after a failure. `given` is what ranks have brought
    to a collective so far, by the name of its group and its number there.
    """

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.given: dict[tuple[str, int], dict[int, tuple[str, Tensor]]] = {}
        self.failure: BaseException | None = None
        self._running = 0
        self._waiting: dict[int, tuple[Callable[[], bool], str]] = {}

    def wait(self, ready: Callable[[], bool], what: str) -> None:
        """Wait until `ready()`. The caller must hold the condition, as it is held while `ready` is called.

        Raises RuntimeError if another rank has failed, or if no rank is left that could make it ready.
        """
        me = threading.get_ident()
        self._waiting[me] = (ready, what)
        try:
            self._find_deadlock()
            self.condition.wait_for(lambda: ready() or self.failure is not None)
        finally:
            del self._waiting[me]
        if not ready():
            self.check(f"gave up waiting for {what}")

    def check(self, what: str) -> None:
        """Raise RuntimeError, which begins with `what`, if a rank has failed."""
        if self.failure is not None:
            raise RuntimeError(f"{what}: {self.failure}") from self.failure

    def run(self, function: Callable[[T], R], ranks: Sequence[T]) -> list[R]:
        """Call `function(rank)` for all ranks at once, each in a thread, in the caller's grad mode.

        Return the results in order, or raise the first exception of any rank after all have stopped.
        """
        grad = torch.is_grad_enabled()
        self._running = len(ranks)

        def work(number: int, rank: T) -> R:
            try:
                with torch.set_grad_enabled(grad):
                    return function(rank)
            except BaseException as error:
                error.add_note(f"(on rank {number} of {len(ranks)})")
                self.fail(error)
                raise
            finally:
                with self.condition:
                    self._running -= 1
                    self._find_deadlock()

        # Wait after an interrupt too: a thread inside torch when the interpreter ends aborts the process.
        with ThreadPoolExecutor(len(ranks), "rank") as pool:
            try:
                results = [pool.submit(work, number, rank) for number, rank in enumerate(ranks)]
                wait(results)
            except KeyboardInterrupt as error:
                self.fail(error)
        if self.failure is not None:
            raise self.failure
        return [result.result() for result in results]

    def fail(self, error: BaseException) -> None:
        """End the waits of all ranks; only the first error is reported."""
        with self.condition:
            if self.failure is None:
                self.failure = error
            self.condition.notify_all()

    def _find_deadlock(self) -> None:
        if self.failure is not None or not self._waiting or len(self._waiting) < self._running:
            return
        if any(ready() for ready, _ in self._waiting.values()):
            return
        waits = "; ".join(sorted(what for _, what in self._waiting.values()))
        self.failure = RuntimeError(f"deadlock: all ranks that still run wait: {waits}")
        self.condition.notify_all()


class ThreadPosition(Position):
    """The position of a rank of `world`, which begins no further action after another rank has failed."""

    def __init__(self, world: ThreadWorld) -> None:
        super().__init__()
        self._world = world

    def act(self, action: Action) -> None:
        self._world.check(f"stopped before {action}")
        super().act(action)
