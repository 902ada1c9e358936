"""What a parallel model's tensors are taken out by and put back: whole states, this rank's slices, checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from autoptd.runtime.checkpoint.loading import load_step
from autoptd.runtime.checkpoint.saving import Saving, Schedulers, Training, name_schedulers, save_step
from autoptd.runtime.comm.groups import Posted
from autoptd.runtime.engine.bound_shape import BoundShape
from autoptd.runtime.engine.dynamo import leave_uncompiled
from autoptd.runtime.guards.weight_agreement import StepLog
from autoptd.runtime.module.training_api import Trained
from autoptd.runtime.optimizer.loss_scale import LossScale
from autoptd.runtime.optimizer.zero1 import Shard
from autoptd.runtime.weights.pretrained import write_pretrained
from autoptd.runtime.weights.slices import (
    check_proved,
    check_tied,
    compiled_in,
    find_tensor,
    gather_whole,
    take_slice,
)
from autoptd.runtime.weights.submodules import UNCOPIED


class Persistent(Trained):
    """A module of this rank's slices, some of which a sharded optimizer may step and bring back later."""

    _shapes: Sequence[BoundShape]
    _loss_scale: LossScale | None
    _saving: Saving | None
    _gathering: dict[Shard, Posted[Tensor]]  # the weights on their way
    _versions: list[int]
    _steps: StepLog

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refused, for copies as for pickles: what runs the step is of this process."""
        raise TypeError(UNCOPIED)

    def full_state_dict(self) -> dict[str, Tensor]:
        """The whole model's ``state_dict`` on the CPU of rank 0, {} elsewhere; the plain model loads it.

        Every rank must call it.
        """
        with self._connection.position.duty("full_state_dict"):
            return gather_whole(self._manifest, self._rank, self._slices())

    def export_pretrained(self, folder: str | Path, *, max_shard_size: int | str = "5GB") -> None:
        """Write the whole model as safetensors into `folder`, as transformers' ``save_pretrained`` does.

        Every rank must call it; rank 0 writes, a tensor at a time. A tied tensor is written once.
        ``model.config.save_pretrained(folder)`` adds what ``from_pretrained`` needs besides. Raises ValueError for a
        `max_shard_size` that is none, OSError on every rank where rank 0 cannot write.
        """
        with self._connection.position.duty("export_pretrained"):
            write_pretrained(self._manifest, self._rank, self._slices(), folder, max_shard_size)

    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take this rank's slices of a whole `state`, given to every rank.

        Raises ValueError for other names, values that differ where the program has one tensor, or other values of a
        buffer that were compiled into the program.
        """
        manifest = self._manifest
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
            for name, own in self._slices().items():
                if name in whole:
                    parameter = replace(manifest.parameters[name], dtype=own.dtype)
                    value = take_slice(parameter, whole[name], self._rank)
                    # What it was rounded to, as full_state_dict gives it, is no other value.
                    rounded = own.to(whole[name].dtype).to(own.dtype)
                    own.copy_(torch.where(rounded == value, own, value))
        self._take_over()

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """As of every module: takes this rank's tensors under the user's names. All ranks of a stage must call it.

        Raises ValueError for other values of a buffer that were compiled into the program.
        """
        slices = self._slices()
        for name in (proved.name for proved in self._manifest.proved):
            if name in slices and name in state_dict:
                own, given = slices[name], state_dict[name]
                if own.shape == given.shape and not torch.equal(own, given.to(own)):
                    raise ValueError(compiled_in(name))
        result = super().load_state_dict(state_dict, strict, assign)
        self._take_over()
        return result

    def _take_over(self) -> None:
        """Parameters and buffers have new values, which fit together: so has what depends on them."""
        self._steps.reset()
        self._adopt_writes()
        self._refresh_constants()

    def _refresh_constants(self) -> None:
        slices = self._slices()
        for shape in self._shapes:
            shape.refresh(slices)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As of every module, once all replicas' steps have arrived."""
        self._await_gathers()
        return super().named_parameters(*args, **kwargs)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """As of every module, by which ``to`` reads all parameters, once all replicas' steps have arrived."""
        self._await_gathers()
        return super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """This rank's tensors under the user's names; trained weights in half precision as the float32 they step in.

        Where an optimizer is sharded, which has that float32, they are as the stages compute with them.
        """
        self._await_gathers()
        return super().state_dict(*args, **kwargs)

    def save_checkpoint(
        self,
        folder: str | Path,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: Schedulers = None,
        *,
        data: Any = None,
        keep: int | None = None,
        asynchronous: bool = False,
    ) -> None:
        """Write a checkpoint into a new folder below `folder`, which all ranks share. Every rank must call it.

        `scheduler` may be a list or dict, a gradient scaler among them. `load_checkpoint` will give `data` back: JSON's
        types and tuples, as rank 0 has it. `keep` removes all but the last so many checkpoints of `folder`. With
        `asynchronous` a thread writes a copy. CheckpointError, on every rank, where one cannot write all as it is.
        """
        self.finish_checkpoint()
        with self._connection.position.duty("save_checkpoint"):
            self._saving = save_step(
                self._training(optimizer, scheduler), Path(folder), data, keep, asynchronous
            )
        if not asynchronous:
            self.finish_checkpoint()

    def finish_checkpoint(self) -> None:
        """Wait for an asynchronous save, as the next save and load do; every rank must call it. CheckpointError."""
        saving, self._saving = self._saving, None
        if saving is not None:
            with self._connection.position.duty("finish_checkpoint"):
                saving.finish()

    def load_checkpoint(
        self,
        folder: str | Path,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: Schedulers = None,
        *,
        trust_pickle: bool = False,
    ) -> Any:
        """Take over the last committed checkpoint of `folder`, or the step's folder `folder`; give its `data`.

        Every rank must call it. It may be from any mesh. With `trust_pickle` a folder of torch.distributed.checkpoint
        is read too, of which only the model's tensors are taken: reading it can run any code that is in it.
        CheckpointError, on every rank and with nothing changed on any, where one cannot take all of it over.
        """
        self.finish_checkpoint()
        with self._connection.position.duty("load_checkpoint"):
            given = load_step(self._training(optimizer, scheduler), Path(folder), trust_pickle)
        self._steps.reset()
        self._refresh_constants()
        return given

    def _read_versions(self) -> list[int]:
        """Counts of the writes into parameters that a sharded optimizer steps; what it sends round does not count."""
        parameters = self._watch.parameters
        return [parameters[name]._version for shard in self._shards for name in shard.names]

    def _adopt_writes(self) -> None:
        """Let a sharded optimizer step from what was written into parameters since, or given to them as ``p.data``.

        ValueError, as of a call, where what they were given is shaped otherwise, of another dtype or elsewhere.
        """
        self._await_gathers()
        versions, rebound = self._read_versions(), self._is_rebound()
        if rebound:
            self._bind_again()
        if rebound or versions != self._versions or self._is_written():
            self._versions = versions
            for shard in self._shards:
                shard.adopt()

    def _check_unwritten(self) -> None:
        """Raise ValueError where a parameter was written while its new values were on their way, which it now gets."""
        if self._gathering and self._read_versions() != self._versions:
            self._versions = self._read_versions()
            raise ValueError(
                "a parameter was written right after a sharded optimizer's step, before the other replicas' new "
                "weights had come, and would lose that: take it anew from parallel.parameters(), which waits for them"
            )

    def _is_rebound(self) -> bool:
        """Whether parameters that a sharded optimizer steps have memory that it does not send new weights to."""
        return any(shard.rebound(self._watch.parameters) for shard in self._shards)

    def _is_written(self) -> bool:
        """Whether parameters that a sharded optimizer steps are seen to have been written past their versions."""
        written = [shard.is_written() for shard in self._shards]
        return bool(written) and bool(torch.stack(written).any())

    def _bind_again(self) -> None:
        self._watch.check(self)
        parameters = self._watch.parameters
        # Copies, all before the first write: two parameters may have been given each other's memory.
        values = {
            name: (shard, parameters[name].detach().clone())
            for shard in self._shards
            for name in shard.rebound(parameters)
        }
        for shard in {shard for shard, _ in values.values()}:
            shard.renew()  # what is bound to again later may be a view of what there was
        for name, (shard, value) in values.items():
            shard.write(name, value)
        for shard in self._shards:
            shard.bind(parameters)

    def _check_optimizers_own(self) -> None:
        """Raise ValueError where what a sharded optimizer steps was written, which the stages do not read."""
        for shard in self._shards:
            if shard.is_own_written():
                raise ValueError(
                    f"the part of {shard.names[0]}, or of one stepped with it, that a sharded optimizer has was "
                    "written outside of its step, where no stage sees it: write parallel.parameters() instead"
                )

    def _training(self, optimizer: torch.optim.Optimizer | None, scheduler: Schedulers) -> Training:
        self._adopt_writes()
        named, slices = name_schedulers(scheduler), self._slices()
        return Training(self._manifest, self._rank, slices, self._shards, optimizer, named, self._loss_scale)

    def _slices(self) -> dict[str, Tensor]:
        return {**dict(self.named_parameters()), **dict(self.named_buffers())}

    @leave_uncompiled
    def _await_gathers(self) -> None:
        self._check_unwritten()
        for posted in self._gathering.values():
            posted.wait()
        self._gathering = {}
