"""The states that a parallel model saves and loads: whole ones, this rank's slices, and checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autoptd.runtime.checkpoint.loading import load_step
from autoptd.runtime.checkpoint.saving import Saving, Schedulers, Training, name_schedulers, save_step
from autoptd.runtime.comm.connection import Connection
from autoptd.runtime.engine.bound_shape import BoundShape
from autoptd.runtime.guards.weight_agreement import StepLog
from autoptd.runtime.module.step_runner import StepRunner
from autoptd.runtime.module.trained_weights import TrainedWeights
from autoptd.runtime.program.manifest import Manifest
from autoptd.runtime.user_warnings import warn_caller
from autoptd.runtime.weights.pretrained import write_pretrained
from autoptd.runtime.weights.slices import (
    check_proved,
    check_tied,
    compiled_in,
    find_tensor,
    gather_whole,
    take_slice,
)

Optimizer = torch.optim.Optimizer | None


@dataclass(eq=False)
class StateDicts:
    """The states of a parallel model on this rank, on their way to files and back.

    `slices` are the module's parameters and buffers under the user's names.
    """

    manifest: Manifest
    connection: Connection
    shapes: Sequence[BoundShape]
    weights: TrainedWeights
    runner: StepRunner
    steps: StepLog

    def __post_init__(self) -> None:
        self._saving: Saving | None = None
        self._warns = self.manifest.mesh.tensor * self.manifest.mesh.pipeline > 1
        self._buffers = self._read_buffers()

    def gather(self, slices: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the whole state on rank 0, {} elsewhere: a collective of all ranks."""
        with self.connection.position.collective_call("full_state_dict"):
            return gather_whole(self.manifest, self.connection.rank, slices)

    def export(self, slices: Mapping[str, Tensor], folder: str | Path, max_shard_size: int | str) -> None:
        """Write the whole model as transformers does: a collective of all ranks."""
        with self.connection.position.collective_call("export_pretrained"):
            write_pretrained(self.manifest, self.connection.rank, slices, folder, max_shard_size)

    def load_whole(self, slices: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
        """Write this rank's slices of a whole `state` into `slices`. ValueError where it does not fit."""
        manifest = self.manifest
        names = [name for name in manifest.parameters if manifest.is_saved(name)]
        unknown = sorted(set(state) - set(names) - set(manifest.aliases))
        if unknown:
            raise ValueError(
                f"{len(unknown)} names of the state are unknown to the compiled model: "
                f"{', '.join(unknown[:5])}; give the state_dict of the model that was compiled"
            )
        check_proved(manifest, state)
        check_tied(manifest, state)
        # All are looked up before any is changed.
        whole = {name: find_tensor(manifest, state, name) for name in names}
        with torch.no_grad():
            for name, own in slices.items():
                if name in whole:
                    parameter = replace(manifest.parameters[name], dtype=own.dtype)
                    value = take_slice(parameter, whole[name], self.connection.rank)
                    # A value that was rounded to the whole one's dtype, as full_state_dict does, is no other value.
                    rounded = own.to(whole[name].dtype).to(own.dtype)
                    own.copy_(torch.where(rounded == value, own, value))
        self.take_over()

    def check_proved(self, slices: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Raise ValueError where this rank's `state` has other values of a buffer that was compiled in."""
        for name in (proved.name for proved in self.manifest.proved):
            if name in slices and name in state:
                own, given = slices[name], state[name]
                if own.shape == given.shape and not torch.equal(own, given.to(own)):
                    raise ValueError(compiled_in(name))

    def warn_of_slices(self) -> None:
        """Warn once that a ``state_dict`` has one rank's slices, where a mesh divides the model."""
        if self._warns:
            self._warns = False
            warn_caller(
                "state_dict of a parallel model has this rank's slices under the model's names, and a file of it is no "
                "file of the model: save parallel.full_state_dict(), which every rank must call, or go on later from "
                "parallel.save_checkpoint (Trainer: save_strategy='no', Lightning: enable_checkpointing=False)"
            )

    def save(
        self,
        slices: Mapping[str, Tensor],
        folder: str | Path,
        optimizer: Optimizer,
        scheduler: Schedulers,
        data: Any,
        keep: int | None,
        asynchronous: bool,
    ) -> None:
        """Write a checkpoint; the rest as `Parallel.save_checkpoint`."""
        self.finish()
        with self.connection.position.collective_call("save_checkpoint"):
            training = self.training(slices, optimizer, scheduler)
            self._saving = save_step(training, Path(folder), data, keep, asynchronous)
        if not asynchronous:
            self.finish()

    def finish(self) -> None:
        """Wait for the save that goes on, if any."""
        saving, self._saving = self._saving, None
        if saving is not None:
            with self.connection.position.collective_call("finish_checkpoint"):
                saving.finish()

    def load(
        self,
        slices: Mapping[str, Tensor],
        folder: str | Path,
        optimizer: Optimizer,
        scheduler: Schedulers,
        trust_pickle: bool,
    ) -> Any:
        """Take a checkpoint over; the rest as `Parallel.load_checkpoint`."""
        self.finish()
        with self.connection.position.collective_call("load_checkpoint"):
            given = load_step(self.training(slices, optimizer, scheduler), Path(folder), trust_pickle)
        self.steps.reset()
        self._refresh_constants()
        return given

    def training(self, slices: Mapping[str, Tensor], optimizer: Optimizer, scheduler: Schedulers) -> Training:
        """Return what a checkpoint is of: `slices`, and what trains them."""
        self.weights.adopt_writes()
        named, shards = name_schedulers(scheduler), self.weights.shards
        scale = self.runner.loss_scale
        return Training(self.manifest, self.connection.rank, slices, shards, optimizer, named, scale)

    def take_over(self) -> None:
        """Bring up to date what depends on parameters and buffers, which have new values that fit together."""
        self.steps.reset()
        self.weights.adopt_writes()
        self._refresh_constants()

    def take_buffers(self) -> None:
        """Compute constants anew where buffers were written or replaced. ValueError where they are compiled in."""
        if self._buffers == self._read_buffers():
            return
        known, own = self.manifest.parameters, self.weights.watch.buffers()
        for alias, name in self.manifest.aliases.items():
            if own.get(alias) is not own.get(name):
                raise ValueError(
                    f"the buffer {alias} was replaced after bind, and is one with {name}: write its values "
                    "(buffer.copy_), or replace both by one tensor"
                )
        found = {n: b for n, b in own.items() if n in known and tuple(b.shape) == known[n].shape}
        check_proved(self.manifest, found)
        self._refresh_constants()
        self._buffers = self._read_buffers()

    def _read_buffers(self) -> list[tuple[int, int]]:
        """Return the identities of the buffers, and the counts of the writes into them."""
        buffers = self.weights.watch.buffers().values()
        return [(id(b), 0 if b.is_inference() else b._version) for b in buffers]

    def _refresh_constants(self) -> None:
        watch = self.weights.watch
        for shape in self.shapes:
            shape.refresh({**watch.parameters, **watch.buffers()})
