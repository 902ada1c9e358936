"""Marks in an optimizer's ``state_dict`` of the slices it belongs to: torch would load it by position alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer

from autoptd.runtime.comm.rank import Rank
from autoptd.runtime.optimizer.zero1 import FlatShard
from autoptd.runtime.program.manifest import Manifest
from autoptd.runtime.program.placement import Parameter

MARK = "autoptd_slices"  # of a group in a state_dict: for each of its parameters, what that has of the model


class StateMarks:
    """The pieces of the model that each tensor holds which optimizers of this rank step, and marks of them in states.

    A rank's coordinates would not say it: with another number of chunks it has other layers, of the same shapes.
    """

    def __init__(self, manifest: Manifest, rank: Rank) -> None:
        """Begin with no tensors."""
        at = rank.coordinates
        self._place = f"tensor {at.tensor}, pipeline {at.pipeline}, data {at.data}"
        self._slices = {name: _describe(p, rank) for name, p in manifest.parameters.items()}
        self._held: dict[int, tuple[tuple[str, ...], list[str]]] = {}

    def hold(self, parameters: Mapping[str, Tensor], shards: Sequence[FlatShard]) -> None:
        """Take `parameters` and `shards` as the tensors that optimizers step; they live until the next call."""
        self._held = {id(p): ((name,), [self._slices[name]]) for name, p in parameters.items()}
        for shard in shards:
            pieces = [
                f"elements {elements.start}:{elements.stop} of {self._slices[name]}"
                for name, (_, elements) in shard.ranges().items()
            ]
            self._held[id(shard.own)] = shard.names, pieces

    def find(self, tensor: Tensor) -> list[str] | None:
        """Return the pieces of the model that a `tensor` has; None where it is another's."""
        return self._held.get(id(tensor), ((), None))[1]

    def names(self, tensor: Tensor) -> tuple[str, ...]:
        """Return the parameters that are stepped with a `tensor`, on all replicas together; none for another's."""
        return self._held.get(id(tensor), ((), None))[0]

    def mark(self, optimizer: Optimizer) -> None:
        """Mark the ``state_dict`` of an `optimizer` from now on."""
        # A wrapper of an optimizer may lack torch's own hooks: the optimizer inside marks its states.
        if hasattr(optimizer, "_optimizer_state_dict_post_hooks"):
            optimizer.register_state_dict_post_hook(self._write)

    def check(self, optimizer: Optimizer) -> None:
        """Raise ValueError where a state was loaded into `optimizer` whose marks are of other slices.

        Each mark is read once: tensors that a group gets later have no place in the state. Marks of tensors that are
        another model's stay, for that one to read.
        """
        for number, group in enumerate(optimizer.param_groups):
            loaded = zip(group["params"], group.get(MARK, ()), strict=False)
            for position, (tensor, found) in enumerate(loaded):
                own = self.find(tensor)
                if found is not None and own is not None and found != own:
                    raise ValueError(self._describe_other(number, position, found, own))
        for group in optimizer.param_groups:
            loaded = zip(group["params"], group.pop(MARK, ()), strict=False)
            others = [found if self.find(tensor) is None else None for tensor, found in loaded]
            if any(others):
                group[MARK] = others

    def _write(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
            # A state that was loaded and never stepped keeps its marks; another model marks its own tensors.
            known = saved.get(MARK) or [None] * len(group["params"])
            own = [self.find(tensor) for tensor in group["params"]]
            saved[MARK] = [a if a is not None else b for a, b in zip_longest(known, own)]

    def _describe_other(self, group: int, position: int, found: Sequence[str], own: Sequence[str]) -> str:
        pairs = zip_longest(found, own, fillvalue="nothing")
        there, here = next((there, here) for there, here in pairs if there != here)
        return (
            f"the optimizer's state of parameter {position} of group {group} was saved for {there}, and this rank "
            f"({self._place}) has {here} in that place: an optimizer's state_dict has its rank's slices alone, and "
            "torch loads it by position. Load the state that this rank saved, with the same mesh, stages and chunks, "
            "or use parallel.save_checkpoint and load_checkpoint, which go by name and between meshes; where only the "
            f"model's names have changed, take {MARK!r} out of the state's param_groups"
        )


def _describe(parameter: Parameter, rank: Rank) -> str:
    on_tensor, at = parameter.placement["tensor"], rank.group("tensor")
    local = f"{parameter.name}{list(parameter.local_shape(rank.mesh.axes))}"
    if on_tensor.dim is None or at.size == 1:
        return local
    rows = ", ".join(f"{first}:{end}" for first, end in on_tensor.runs(at.size, at.index))
    return f"{local} ({rows} of dimension {on_tensor.dim})"
