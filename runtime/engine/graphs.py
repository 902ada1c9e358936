"""Slots whose forwards and backwards are CUDA graphs: captured once, and from then on replayed without Python.

- Each slot has a memory pool of its own, for its forward and its backward alone. In a shared pool the memory that one
  slot's forward frees would become what another's saves, and a replay would overwrite it. So the backward may free what
  the forward has saved as it goes, and a slot takes the memory that a microbatch takes without graphs.
- All are captured on one stream, which autograd's nodes of the leaves belong to while they are alive.
- Collectives of the tensor ranks are inside; messages and sums over replicas, events and looks at values outside.
- The stage's last backward records an event where a bucket of gradients is complete. The sum over the replicas waits
  for it on a stream of its own, beside the rest of the backward.
"""

import gc
import os
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from autoptd.runtime.engine.slot import Kept, Slot, StageCall, Weights
from autoptd.runtime.optimizer.gradient_buckets import BucketWatch

# Tests add "cpu", where a replay is a plain call.
graph_devices = {"cuda"}


def check_queues() -> None:
    """Raise ValueError where CUDA has so few queues that a graph may stand behind a message that waits for it."""
    if (given := os.environ["CUDA_DEVICE_MAX_CONNECTIONS"]).isdigit() and int(given) < 32:
        raise ValueError(
            f"CUDA_DEVICE_MAX_CONNECTIONS is {given}: with fewer than 32 queues, CUDA graphs and the messages of a "
            "pipeline may wait for each other forever; leave it unset, or bind(graphs=False)"
        )


class Replay:
    """Some `work` on a device as a CUDA graph, with memory from `pool`; its `result` lies where it lay before."""

    def __init__(self, work: Callable[[], Any], device: torch.device, pool: Any) -> None:
        self.result: Any = None
        self._work: Any = work
        self._graph = self._capture(device, pool) if device.type == "cuda" else None
        if self._graph is not None:
            self._work = None  # holds the slot, which goes when the model goes

    def run(self) -> None:
        """Do the work once more, in the order of the present stream."""
        if self._graph is None:
            self.result = self._work()
        else:
            self._graph.replay()

    def _capture(self, device: torch.device, pool: Any) -> torch.cuda.CUDAGraph:
        graph, stream = torch.cuda.CUDAGraph(), _make_stream(device, "capture")
        collecting = gc.isenabled()
        gc.disable()  # what is collected may ask the device, which breaks a capture
        try:
            with torch.cuda.stream(stream):
                # NCCL's own thread asks its events meanwhile.
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    self.result = self._work()
                    graph.capture_end()
                except BaseException:
                    _break_off(graph, pool)
                    raise
        finally:
            if collecting:
                gc.enable()
        return graph


def _break_off(graph: torch.cuda.CUDAGraph, pool: Any) -> None:
    """End a capture that has failed, and let the allocator know, which `capture_end` may not get to."""
    with suppress(RuntimeError):  # says once more that the capture has failed
        graph.capture_end()
        return
    with suppress(RuntimeError):  # if it got to it
        torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
        torch._C._cuda_releasePool(torch.cuda.current_device(), pool)


@cache
def _make_stream(device: torch.device, use: str) -> torch.cuda.Stream:
    """Return the stream of the captures, or of the sums over replicas.

    With workspaces for the products of a forward and a backward, which else would lie in the pool of one slot for good.
    """
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream), torch.enable_grad():
        x = torch.ones(2, 2, device=device, requires_grad=True)
        (x @ x).sum().backward()
    return stream


def _after(event: torch.cuda.Event | None, device: torch.device) -> AbstractContextManager[object]:
    """Let what is posted inside wait for the `event` of a replay, and for no more of it."""
    if event is None:
        return nullcontext()
    stream = _make_stream(device, "sums")
    stream.wait_event(event)
    return torch.cuda.stream(stream)


class GraphSlot(Slot):
    """A slot that replays its work in a step with a `mode`, in which it was captured; else it works as any slot.

    `mode` names what the work depends on besides the values in memory.
    """

    def __init__(self, call: StageCall, device: torch.device) -> None:
        super().__init__(call, device)
        self.mode: Hashable = None
        self._device = device
        self.forget()

    def forget(self) -> None:
        """Forget all graphs, and leave their memory."""
        self._pool = torch.cuda.graph_pool_handle() if self._device.type == "cuda" else None
        self._graphs: dict[Hashable, tuple[Replay, Replay | None]] = {}

    def capture(self, mode: Hashable, weights: Weights, trains: bool) -> None:
        """Capture the work of `mode` on memory that an earlier step has made; nothing of it runs.

        Both the forward and, where it `trains`, the backward, so that either both can be replayed or none.
        """
        forward = Replay(partial(self.call.run, weights, self.values, trains), self._device, self._pool)
        differentiate = partial(self._mark_and_differentiate, forward)
        self._graphs[mode] = forward, Replay(differentiate, self._device, self._pool) if trains else None
        if forward.result is not None:
            # Autograd's nodes are spent; alive, they would tie the weights' leaves to the stream of the capture.
            forward.result = forward.result[0], None

    def _mark_and_differentiate(self, forward: Replay) -> tuple[list[Tensor], list[torch.cuda.Event | None]]:
        """Return the gradients of the leaves, and the events of complete buckets; a CPU has none."""
        kept: Kept = forward.result[1]  # of the last run
        marks: list[torch.cuda.Event | None] = []

        def mark(_: int) -> None:
            marks.append(torch.cuda.Event(external=True) if self._device.type == "cuda" else None)
            if (event := marks[-1]) is not None:
                event.record()

        with nullcontext() if self.watch is None else self.watch.report(mark):
            return kept.differentiate(self.gradients), marks

    def _run(self, weights: Weights, trains: bool) -> list[Tensor]:
        if self.mode is None:
            return super()._run(weights, trains)
        forward, _ = self._graphs[self.mode]
        forward.run()
        return [output.clone() for output in forward.result[0]]

    def _differentiate(self, watch: BucketWatch | None) -> list[Tensor]:
        if self.mode is None:
            return super()._differentiate(watch)
        _, backward = self._graphs[self.mode]
        assert backward is not None
        backward.run()
        departing, marks = backward.result
        if watch is not None:
            for number, event in enumerate(marks):
                with _after(event, self._device):
                    watch.post(number)
        return [gradient.clone() for gradient in departing]
