"""Slots whose forwards and backwards are CUDA graphs: captured once, and from then on replayed without Python.

- Each slot has a memory pool of its own, for its forward and its backward alone. In a shared pool the memory that one
  slot's forward frees would become what another's saves, and a replay would overwrite it. So the backward may free what
  the forward has saved as it goes, and a slot takes the memory that a microbatch takes without graphs.
- All are captured on one stream, which autograd's nodes of the leaves belong to while they are alive.
- Collectives of the tensor ranks are inside; messages and sums over replicas, events and looks at values outside.
- The stage's last backward records an event where a bucket of gradients is complete. The sum over the replicas waits
  for it on a stream of its own, beside the rest of the backward.
"""

from __future__ import annotations

import gc
import linecache
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from autoptd.runtime.engine.slot import Kept, Slot, StageCall, Weights
from autoptd.runtime.optimizer.bucket_watch import BucketWatch
from autoptd.runtime.program.program_text import line_of
from autoptd.runtime.user_warnings import warn_caller

# Tests add "cpu", where a replay is a plain call.
graph_devices = {"cuda"}


class Replay:
    """Some `work` on a device as a CUDA graph, with memory from `pool`; its `result` lies where it lay before."""

    def __init__(self, work: Callable[[], Any], device: torch.device, pool: Any) -> None:
        self.result: Any = None
        self._work = work
        self._graph = self._capture(device, pool) if device.type == "cuda" else None

    def run(self) -> None:
        """Do the work once more, in the order of the present stream."""
        if self._graph is None:
            self.result = self._work()
        else:
            self._graph.replay()

    def _capture(self, device: torch.device, pool: Any) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(device)
        collecting = gc.isenabled()
        gc.disable()  # what is collected may ask the device, which breaks a capture
        try:
            with torch.cuda.stream(_make_stream(device, "capture")):
                # NCCL's own thread asks its events meanwhile.
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    self.result = self._work()
                except BaseException:
                    with suppress(RuntimeError):  # says once more that the capture has failed
                        graph.capture_end()
                    raise
                graph.capture_end()
        finally:
            if collecting:
                gc.enable()
        return graph


@cache
def _make_stream(device: torch.device, use: str) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _differentiate(
    forward: Replay, gradients: Sequence[Tensor], watch: BucketWatch | None, device: torch.device
) -> tuple[list[Tensor], list[torch.cuda.Event | None]]:
    """Return the gradients of the leaves, and the events of complete buckets; a CPU has none."""
    kept: Kept = forward.result[1]  # of the last run
    marks: list[torch.cuda.Event | None] = []

    def mark(_: int) -> None:
        marks.append(torch.cuda.Event(external=True) if device.type == "cuda" else None)
        if (event := marks[-1]) is not None:
            event.record()

    with nullcontext() if watch is None else watch.report(mark):
        return kept.differentiate(gradients), marks


@contextmanager
def _after(event: torch.cuda.Event | None, device: torch.device) -> Iterator[None]:
    """Let what is posted inside wait for the `event` of a replay, and for no more of it."""
    if event is None:
        yield
        return
    stream = _make_stream(device, "sums")
    stream.wait_event(event)
    with torch.cuda.stream(stream):
        yield


class GraphSlot(Slot):
    """A slot that replays its work; in a step without a `mode` it works as any slot.

    `mode` names what the work depends on besides the values in memory. Work is captured in the second step of a mode:
    the first has compiled kernels and made workspaces.
    """

    def __init__(self, call: StageCall, device: torch.device, refused: set[Hashable]) -> None:
        """`refused` are the modes in which the stage cannot be captured, for all of its slots."""
        super().__init__(call, device)
        self.mode: Hashable = None
        self.refused, self._device = refused, device
        self._running: Replay | None = None
        self.forget()

    def forget(self) -> None:
        """Forget all graphs, which read memory that is no longer used."""
        self._pool: Any = None
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            self._pool = torch.cuda.graph_pool_handle()
        self._forwards: dict[Hashable, Replay] = {}
        self._backwards: dict[Hashable, Replay] = {}

    def forward(
        self, weights: Weights, values: Sequence[Tensor], moment: Tensor, trains: bool
    ) -> list[Tensor]:
        self._running = None
        if self.mode is None or self.mode in self.refused:
            return super().forward(weights, values, moment, trains)
        self.load(values, moment)
        if self.mode not in self._forwards:
            try:
                work = partial(self.call.run, weights, self.values, trains)
                self._forwards[self.mode] = Replay(work, self._device, self._pool)
            except Exception as error:
                self._refuse("forward", error)
                return super().forward(weights, values, moment, trains)
        self._weights, self._running = weights, self._forwards[self.mode]
        self._running.run()
        return [output.clone() for output in self._running.result[0]]

    def backward(self, gradients: Sequence[Tensor], last: bool = False) -> list[Tensor]:
        if (forward := self._running) is None:
            return super().backward(gradients, last)
        self.load_gradients(gradients)
        if self.mode not in self._backwards:
            try:
                work = partial(_differentiate, forward, self.gradients, self.watch, self._device)
                self._backwards[self.mode] = Replay(work, self._device, self._pool)
            except Exception as error:
                self._refuse("backward", error)
                # What autograd kept of the captured forward is spent.
                _, self._kept = self.call.run(self._weights, self.values, trains=True)
                return super().backward(gradients, last)
        self._backwards[self.mode].run()
        # Autograd's nodes are spent; alive, they would tie the weights' leaves to the stream of the capture.
        forward.result = forward.result[0], None
        departing, marks = self._backwards[self.mode].result
        if last and self.watch is not None:
            for number, event in enumerate(marks):
                with _after(event, self._device):
                    self.watch.post(number)
        return [gradient.clone() for gradient in departing]

    def _refuse(self, what: str, error: Exception) -> None:
        """Warn that the `what` of the stage cannot be captured, and do without graphs in this mode."""
        self._forwards.pop(self.mode, None)
        self.refused.add(self.mode)
        first: BaseException = error
        while first.__context__ is not None:  # later ones say that the capture has failed
            first = first.__context__
        filename = self.call.function.func.__code__.co_filename
        line = line_of(first, filename)
        place = f"{filename}:{line}: {linecache.getline(filename, line).strip()}: " if line else ""
        reason = f"{place}{type(first).__name__}: {(str(first).splitlines() or [''])[0]}"
        warn_caller(
            f"the {what} of {filename} runs without CUDA graphs (bind(graphs=False) has none): {reason}"
        )
