"""Run one training step of this rank: a loop over the actions of its schedule.

A stage keeps the microbatches in flight in its slots. Sends are posted, and waited for at the end of the step; a
receive is waited for by the forward or backward that needs its value.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autoptd.runtime.comm.connection import Connection
from autoptd.runtime.comm.rank import Rank
from autoptd.runtime.comm.timings import Measured
from autoptd.runtime.comm.transfer import LocalBoundary, RecvBuffer, SendBuffer
from autoptd.runtime.engine.captures import Captures
from autoptd.runtime.engine.graphs import GraphSlot
from autoptd.runtime.engine.slot import Slot, StageCall, Weights
from autoptd.runtime.optimizer.gradient_memory import StageLeaves
from autoptd.runtime.optimizer.gradient_sums import GradientSums, list_complete
from autoptd.runtime.program.manifest import Boundary, Manifest, StageInterface
from autoptd.runtime.program.program_text import ProgramText
from autoptd.runtime.program.schedule import Action, Kind, assign_slots, last_gradients
from autoptd.runtime.randomness import as_signed
from autoptd.runtime.weights import file_tensor
from autoptd.runtime.weights.slices import Slices

StageInputs = Sequence[Sequence[Tensor]]  # of a stage from the batch: a row per microbatch
Inputs = Mapping[int, StageInputs]  # of this rank's stages


@dataclass(frozen=True)
class ShapeFunctions:
    """The program of a rank for one input shape, and the whole tensors that its weights and constants are made from."""

    manifest: Manifest
    text: ProgramText
    weights: file_tensor.Weights


class StageRun:
    """One stage on this rank, its four buffers, and the microbatches in flight in its slots.

    Inputs arrive and outputs depart; for the backward, gradients of the outputs arrive and gradients of the inputs
    depart. Only differentiable boundary values have gradients. The first stage has no buffers below, the last none
    above. Slots are those of this rank's `actions`; forwards take the first. The last backward completes gradients.
    """

    def __init__(
        self, program: ShapeFunctions, rank: Rank, interface: StageInterface, measured: Measured, graphs: bool
    ) -> None:
        manifest, actions = program.manifest, program.text.actions
        self.takes: dict[Kind, RecvBuffer | LocalBoundary] = {}
        self.puts: dict[Kind, SendBuffer | LocalBoundary] = {}
        self.losses: dict[int, Tensor] = {}
        self.outputs: dict[int, list[Tensor]] = {}  # of each microbatch, that a call returns besides the loss
        self._measured = measured
        self.interface, self._index, self._randomness = interface, interface.index, rank.randomness
        call = StageCall(partial(program.text.stages[self._index], rank), interface)
        self._places, end = assign_slots(actions)[self._index], last_gradients(actions).get(self._index)
        self._last = None if end is None else actions[end].microbatch
        count = max(self._places.values(), default=0) + 1
        self.graphed = [GraphSlot(call, rank.device) for _ in range(count)] if graphs else []
        self._slots: Sequence[Slot] = self.graphed or [Slot(call, rank.device) for _ in range(count)]
        b, m = manifest.microbatch_size, manifest.num_microbatches
        self._moments = torch.zeros(m, 4, dtype=torch.int64, device=rank.device)
        first = rank.coordinates.data * b * m
        torch.arange(first, first + b * m, b, out=self._moments[:, 2])

    def start(
        self, weights: Weights, inputs: StageInputs, seeds: Tensor | None, sums: GradientSums | None = None
    ) -> None:
        """Begin a step with its weights, batch inputs and seeds (float64 [m]); clear what a broken one left.

        Losses are differentiated with `seeds`; None: forwards only. The last backward's gradients leave by `sums`.
        """
        self.clear()
        if self._last is not None:
            watched = None if sums is None or seeds is None else sums.watch(self._index)
            self._slots[self._places[self._last]].watch = watched
        self._weights, self._inputs, self._seeds, self._sums = weights, inputs, seeds, sums
        # Filled, not copied from numbers: on a GPU a copy would wait for it.
        self._moments[:, 0].fill_(as_signed(self._randomness.seed))
        self._moments[:, 1].fill_(self._randomness.call)
        if seeds is not None:
            self._moments[:, 3] = seeds.view(torch.int64)

    def clear(self) -> None:
        """Let go of a step and its batch."""
        self._weights, self._inputs, self._seeds, self.losses, self.outputs = {}, (), None, {}, {}
        parts: tuple[Any, ...] = *self._slots, *self.takes.values(), *self.puts.values()
        for part in parts:
            part.clear()

    def forward(self, microbatch: int) -> None:
        """Run the stage on `microbatch` in its slot, and put its outputs for departure."""
        arrival, departure = self.takes.get(Kind.RECEIVE_INPUT), self.puts.get(Kind.SEND_OUTPUT)
        received = arrival.take(microbatch) if arrival is not None else ()
        begin = self._measured.mark()
        trains = self._seeds is not None
        slot = self._slots[self._places[microbatch] if trains else 0]
        self._randomness.moment = slot.moment
        values = [*received, *self._inputs[microbatch]]
        results = slot.forward(self._weights, values, self._moments[microbatch], trains)
        sent = len(self.interface.sends) or 1  # the loss
        outputs, self.outputs[microbatch] = results[:sent], results[sent:]
        if departure is None:
            (self.losses[microbatch],) = outputs
        else:
            departure.put(microbatch, outputs)
        self._measured.add(Kind.FORWARD, begin, stage=self._index, microbatch=microbatch)

    def backward(self, microbatch: int) -> None:
        """Differentiate the stage on `microbatch` into its weights' ``.grad``; put its inputs' gradients."""
        if Kind.RECEIVE_GRADIENT in self.takes:
            gradients = self.takes[Kind.RECEIVE_GRADIENT].take(microbatch)
        else:
            assert self._seeds is not None
            gradients = [self._seeds[microbatch].to(self.losses[microbatch].dtype)]
        begin = self._measured.mark()
        departing = self._slots[self._places[microbatch]].backward(gradients, microbatch == self._last)
        if Kind.SEND_GRADIENT in self.puts:
            self.puts[Kind.SEND_GRADIENT].put(microbatch, departing)
        self._measured.add(Kind.BACKWARD, begin, stage=self._index, microbatch=microbatch)
        if microbatch == self._last and self._sums is not None:
            self._sums.end_stage(self._index)


class Executor:
    """One input shape of a program on this rank: its schedule, bound to stages and channels once, run once a step.

    `slices` are tensors of this shape alone beside those of the model: its constants, such as a mask of its length.
    `leaves` are what the stages compute with, as `renew_leaves` made them last.

    `measured` is when the last step's actions ran, and `outputs` its results besides the loss, by path, stacked.
    """

    def __init__(self, program: ShapeFunctions, connection: Connection, slices: Slices, graphs: bool) -> None:
        self.slices, self.constants = slices, program.text.constants
        self.leaves = StageLeaves()
        self._made_for: tuple[object, object] = None, None
        self.outputs: dict[tuple[str, ...], Tensor] = {}
        self.measured = Measured(connection.rank.device)
        self._connection, self._device = connection, connection.rank.device
        self.manifest = program.manifest
        here = connection.rank.coordinates.pipeline
        own = self.manifest.stages[here :: self.manifest.mesh.pipeline]
        self.stages = {s.index: StageRun(program, connection.rank, s, self.measured, graphs) for s in own}
        self.complete = list_complete(self.manifest, here, program.text.actions)
        graphed = {index: stage.graphed for index, stage in self.stages.items()} if graphs else {}
        self.captures = Captures(connection.rank, connection.world, graphed)
        for boundary in range(len(self.manifest.stages) - 1):
            self._join(boundary)
        self._steps = [(action, self._step(action)) for action in program.text.actions]
        self._forward_steps = [step for step in self._steps if step[0].kind.compute is Kind.FORWARD]

    def _join(self, boundary: int) -> None:
        """Give the stages on either side of `boundary` (stage `boundary` and the next) their buffers."""
        values: Sequence[Boundary] = self.manifest.stages[boundary].sends
        shared = self._connection.rank.group("tensor"), self.manifest.scatter_gather
        channels, pipeline = self._connection.channels, self.manifest.mesh.pipeline
        for kind in (Kind.FORWARD, Kind.BACKWARD):
            source, target = (boundary, boundary + 1)[:: kind.direction]
            sender, receiver = self.stages.get(source), self.stages.get(target)
            ends = source % pipeline, target % pipeline
            if sender is not None and receiver is not None:
                sender.puts[kind.send] = receiver.takes[kind.receive] = LocalBoundary()
            elif sender is not None:
                sender.puts[kind.send] = SendBuffer(values, channels[ends], *shared, f"stage {source} -> {target}")
            elif receiver is not None:
                receiver.takes[kind.receive] = RecvBuffer(values, channels[ends], *shared, self._device)
            values = [value for value in values if value.requires_grad]  # only these have gradients

    def _step(self, action: Action) -> Callable[[], None]:
        """Return the call that runs `action`, which `check_schedule` has proved to be one of this rank's."""
        stage = self.stages[action.stage]
        if action.kind.computes:
            return partial(stage.forward if action.kind is Kind.FORWARD else stage.backward, action.microbatch)
        buffer: Any = {**stage.takes, **stage.puts}[action.kind]
        return partial(buffer.send if action.kind.sends else buffer.post, action.microbatch)

    def renew_leaves(self, tensors: Slices, narrow: Slices, trained: frozenset[str] | None, sums: GradientSums) -> None:
        """Let leaves be in the memory of `tensors`, or of `narrow` ones instead; those of `trained` add to `sums`.

        Only another `tensors` or `trained` makes them anew. Each stage has its own: uses of tied ones add up apart.
        """
        if not self.leaves.by_stage or tensors is not self._made_for[0] or trained is not self._made_for[1]:
            self._made_for = tensors, trained
            slices = {**tensors, **self.slices, **narrow}
            self.leaves = StageLeaves({stage: {} for stage in self.stages})
            for stage, own in self.leaves.by_stage.items():
                for name in self.manifest.stages[stage].parameters:
                    own[name] = slices[name].detach().requires_grad_(name in (trained or ()))
            sums.attach(self.leaves, trained)
        sums.leaves = self.leaves

    def run(
        self, inputs: Inputs, seeds: Tensor | None, begin_stage: Callable[[int], None], sums: GradientSums | None = None
    ) -> list[Tensor]:
        """Run the step; return the microbatch losses, in order, on the last stage's rank and nothing elsewhere.

        ``begin_stage(k)`` is called before each forward of stage k. With `seeds`, one per microbatch, the losses are
        differentiated with these: gradients are added to the ``.grad`` of `leaves` in the order of the backwards, and
        go on their way by `sums` when a stage has had its last one, or there are forwards only; no `sums`, no graphs.
        """
        rank, position, weights = self._connection.rank, self._connection.position, self.leaves.by_stage
        rank.measured = self.measured
        self.measured.start()
        for index, stage in self.stages.items():
            stage.start(weights[index], inputs[index], seeds, sums)
        gradients = seeds is not None
        # The program's own casts decide: autocast around the call would change the values that cross a boundary.
        with torch.set_grad_enabled(gradients), torch.autocast(self._device.type, enabled=False):
            self.captures.begin(None if sums is None else sums.memory, weights, gradients)
            for action, step in self._steps if gradients else self._forward_steps:
                position.act(action)
                try:
                    if action.kind is Kind.FORWARD:
                        begin_stage(action.stage)
                    step()
                except Exception as error:
                    error.add_note(f"(in {action}, at {rank.coordinates})")
                    raise
        for channel in self._connection.channels.values():
            channel.release()
        last = self.stages.get(len(self.manifest.stages) - 1)
        losses = [] if last is None else [loss for _, loss in sorted(last.losses.items())]
        for stage in self.stages.values():
            made = zip(*(own for _, own in sorted(stage.outputs.items())), strict=True)
            paths = (result.path for result in stage.interface.outputs)
            self.outputs.update(zip(paths, map(torch.stack, made), strict=True))
            stage.clear()
        rank.randomness.moment = None
        return losses
