"""When the stages of a rank are captured as graphs, when these are replayed, and when they are forgotten.

A mode is captured in its second step, before the schedule begins: the first step has compiled kernels and filled the
slots, and no message is on its way yet. All ranks capture in the same step, as collectives may need; or none replays.
"""

import linecache
from collections.abc import Hashable, Mapping, Sequence
from itertools import chain
from typing import Literal

import torch

from autoptd.runtime.comm.groups import Group
from autoptd.runtime.comm.rank import Rank
from autoptd.runtime.engine.graphs import GraphSlot
from autoptd.runtime.engine.slot import Weights
from autoptd.runtime.program.program_text import line_of
from autoptd.runtime.user_warnings import warn_caller


class Captures:
    """The graphs of a rank's `slots`, by stage, for one input shape; a rank without graphs has no slots here.

    A mode is whether the model trains and whether gradients are computed.
    """

    def __init__(self, rank: Rank, world: Group, slots: Mapping[int, Sequence[GraphSlot]]) -> None:
        self._rank, self._world, self._slots = rank, world, slots
        self._all = list(chain.from_iterable(slots.values()))
        self._read: Hashable = None  # what the graphs have read besides
        self._mode: Hashable = None
        self._states: dict[Hashable, Literal["wanted", "captured", "refused"]] = {}  # of modes

    @property
    def wants(self) -> bool:
        """Whether the last step's mode is to be captured on this rank."""
        return bool(self._slots) and self._states.get(self._mode, "wanted") == "wanted"

    def agree(self, wanted: bool) -> None:
        """Capture the last step's mode in its next step, if some rank `wanted` that."""
        if wanted:
            self._states[self._mode] = "wanted"

    def begin(self, memory: Hashable, weights: Mapping[int, Weights], gradients: bool) -> None:
        """Begin a step on `memory`, of which None means without graphs: choose what its slots replay.

        What looks at operators or at saved tensors would see none of a replay's; then there is none.
        """
        replays = memory is not None and not _is_observed()
        if memory is not None:
            self._mode = self._rank.randomness.training, gradients
            read = memory, torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()
            if read != self._read:
                self._read = read
                self._forget()
            if self._states.get(self._mode) == "wanted":
                self._capture_everywhere(replays, weights, gradients)
        replays &= self._states.get(self._mode) == "captured"
        for slot in self._all:
            slot.mode = self._mode if replays else None

    def _capture_everywhere(self, replays: bool, weights: Mapping[int, Weights], gradients: bool) -> None:
        """Capture the mode on all ranks; where one fails, refuse it, and where one does not replay now, wait."""
        fails = replays and not self._capture(weights, gradients)
        own = torch.tensor([fails, not replays], dtype=torch.int64, device=self._rank.device)
        failed, waits = self._world.all_reduce(own, "max").tolist()
        if waits and not failed:
            return
        self._states[self._mode] = "refused" if failed else "captured"
        if failed:
            self._forget()

    def _capture(self, weights: Mapping[int, Weights], gradients: bool) -> bool:
        """Capture the slots that the mode uses; return whether all can be, with a warning where one cannot."""
        self._wait()
        torch.cuda.empty_cache()  # what the step before lay in, which a graph takes no memory from
        for stage, slots in self._slots.items():
            for slot in slots if gradients else slots[:1]:
                self._rank.randomness.moment = slot.moment
                try:
                    slot.capture(self._mode, weights[stage], gradients)
                except Exception as error:
                    _warn(slot.call.function.func.__code__.co_filename, error)
                    return False
        return True

    def _forget(self) -> None:
        self._wait()
        self._states = {mode: state for mode, state in self._states.items() if state != "captured"}
        for slot in self._all:
            slot.forget()

    def _wait(self) -> None:
        """Wait for replays that run, whose graphs may go; before a schedule no message keeps the device waiting."""
        if self._slots and self._rank.device.type == "cuda":
            torch.cuda.synchronize(self._rank.device)


def _is_observed() -> bool:
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None or torch._C._len_torch_dispatch_stack() > 0 or torch.is_anomaly_enabled()


def _warn(filename: str, error: BaseException) -> None:
    """Warn that the stage in `filename` cannot be captured, with the first of its errors."""
    first, earlier = error, error.__context__
    while earlier is not None and line_of(earlier, filename):  # later ones say that the capture has failed
        first, earlier = earlier, earlier.__context__
    line = line_of(first, filename)
    place = f"{filename}:{line}: {linecache.getline(filename, line).strip()}: " if line else ""
    reason = f"{place}{type(first).__name__}: {(str(first).splitlines() or [''])[0]}"
    warn_caller(f"{filename} runs without CUDA graphs (bind(graphs=False) has none): {reason}")
