"""Find the origin of a non-finite loss or gradient: run the step once more and look at every operator."""

import linecache
import re
import sys
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from traceback import walk_stack
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autoptd.runtime.comm import groups, point_to_point
from autoptd.runtime.comm.agreement import gather_given, share_text
from autoptd.runtime.comm.connection import Connection
from autoptd.runtime.engine.label_weights import count_valid
from autoptd.runtime.health.activity import Position
from autoptd.runtime.program.manifest import Manifest
from autoptd.runtime.program.schedule import Action, Kind

PROGRAM = re.compile(r"program_\d+\.py")
COMMUNICATION = {module.__file__ for module in (point_to_point, groups)}
FORWARD, BACKWARD, SUM, NOTHING = range(4)  # in the order in which one causes the other


class Inspector(TorchDispatchMode):
    """A record of the first operator that gave a NaN or an infinity, and its line; -inf is right in masks.

    The last stage's mean loss of an `unlabelled` microbatch is one by right, so are its gradients, which are masked.
    """

    def __init__(self, position: Position, last_stage: int, unlabelled: Container[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: tuple[Action, int, str] | None = None
        # Of operators: of tensor ranks, which all run the same, the first to break one is the cause.
        self._number = 0
        self._position = position
        self._last_stage, self._unlabelled = last_stage, unlabelled

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func)
        if self.found is not None or name.startswith("c10d") or _is_communicating():
            return result
        self._number += 1
        # An empty tensor has no values yet, and what is copied into a slot had them before: its reader is named.
        if "empty" not in name and "copy_" not in name and _has_broken(result):
            action = Action.parse(self._position.read().activity)
            if not self._is_mean_of_none(action, result):
                self.found = action, self._number, f"{name}{_source_line()}"
        return result

    def _is_mean_of_none(self, action: Action, result: object) -> bool:
        if action.stage != self._last_stage or action.microbatch not in self._unlabelled:
            return False
        single = not any(x.dim() for x in tree_leaves(result) if isinstance(x, Tensor))
        return single or action.kind is Kind.BACKWARD


def explain_nonfinite(
    manifest: Manifest,
    connection: Connection,
    batch: Mapping[str, Tensor],
    loss: Tensor,
    gradients: Sequence[Tensor],
    unlabelled: Container[int],
    repeat: Callable[[], object],
) -> str:
    """Describe the first operator that gives a non-finite value; every rank must call it, and gets the same text.

    `repeat` runs the step's schedule again; its `unlabelled` microbatches have no label, and do not count if others do.
    """
    with Inspector(connection.position, len(manifest.stages) - 1, unlabelled) as inspector:
        repeat()
    connection.position.phase("search for the first operator")
    order = [NOTHING, 0, 0, 0]
    text = "no operator gave a NaN or an infinity when the step was repeated: look at the machine"
    if inspector.found is not None:
        (stage, kind, microbatch), number, line = inspector.found
        forward = kind is Kind.FORWARD
        order = [FORWARD, microbatch, stage, number] if forward else [BACKWARD, microbatch, -stage, number]
        way = "forward" if forward else "backward"
        text = f"it comes up first in the {way} of stage {stage} on microbatch {microbatch}, in {line}"
        judged = forward and stage == len(manifest.stages) - 1 and microbatch not in unlabelled
        if judged and (ignored := find_ignored(manifest, batch, microbatch)):
            text = f"microbatch {microbatch} of replica {connection.rank.coordinates.data} {ignored}"
    elif any(not gradient.isfinite().all() for gradient in gradients):
        order, text = [SUM, 0, 0, 0], "every rank's own values are finite, a sum of their gradients is not"
    # The cause is what is first in the order of the step, over all ranks.
    orders = gather_given(connection.world, torch.tensor(order, device=connection.rank.device))
    first = min(orders, key=lambda rank: orders[rank])
    where = share_text(connection.rank, text, first)
    what = f"the loss is {loss.item()}" + ", but a gradient is not finite" * int(torch.isfinite(loss))
    return (
        f"{what}: {where} (rank {first}). No gradient was handed to .grad, so the parameters are as before this "
        "step: skip the batch, or look at its data and at the learning rate"
    )


def find_ignored(manifest: Manifest, batch: Mapping[str, Tensor], microbatch: int) -> str:
    """Describe a microbatch whose loss is a mean over no label; return "" for one that has some."""
    for labels in manifest.inputs:
        known = labels.batch_dim is not None and labels.ignore_index is not None
        if known and not count_valid(labels, batch[labels.name])[microbatch]:
            return f"has no label: all of {labels.name} that the loss reads are {labels.ignore_index}"
    return ""


def _has_broken(result: object) -> bool:
    tensors = (x for x in tree_leaves(result) if isinstance(x, Tensor) and not x.is_meta)
    numbers = (x for x in tensors if x.is_floating_point() or x.is_complex())
    return any(bool((x.isnan() | (x == torch.inf)).any()) for x in numbers)


def _is_communicating() -> bool:
    """Return whether an operator is part of a message, whose values have not arrived yet, or are another rank's."""
    return any(frame.f_code.co_filename in COMMUNICATION for frame, _ in walk_stack(sys._getframe()))


def _source_line() -> str:
    """Return the line of the rank program that runs now, with its number; "" outside of it."""
    for frame, line in walk_stack(sys._getframe()):
        filename = frame.f_code.co_filename
        if PROGRAM.fullmatch(Path(filename).name):
            return f", {filename}:{line}: {linecache.getline(filename, line).strip()}"
    return ""
