"""What a training loop asks of a parallel model beside the call: the norm, numbers, a step, where it is."""

from __future__ import annotations

from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autoptd.runtime.comm.connection import Connection
from autoptd.runtime.comm.rank import Rank
from autoptd.runtime.comm.timings import gather_measured
from autoptd.runtime.comm.trace import write_trace
from autoptd.runtime.engine.batch import find_loss
from autoptd.runtime.engine.bound_shape import BoundShape
from autoptd.runtime.engine.dynamo import leave_uncompiled
from autoptd.runtime.engine.last_step import LastStep, read_last_step
from autoptd.runtime.guards.parameter_watch import ParameterWatch
from autoptd.runtime.optimizer.clipping import check_norm_type, global_norm, scale_gradients
from autoptd.runtime.optimizer.zero1 import Shard
from autoptd.runtime.program.manifest import Manifest
from autoptd.runtime.program.mesh import Coordinates
from autoptd.runtime.user_warnings import warn_caller
from autoptd.runtime.weights.submodules import UNREAD


class Trained(nn.Module):
    """A module whose ``forward`` is a whole step of `_manifest`, with what loops and their frameworks ask of it."""

    _manifest: Manifest
    _rank: Rank
    _connection: Connection
    _shape: BoundShape  # of the last call
    _shards: tuple[Shard, ...]
    _watch: ParameterWatch
    _loss: Tensor | None  # of the last call
    _norm: Tensor | None  # of the last call's gradients, where they were clipped

    # Accelerate leaves a model that says so as it is: no DDP round it, no autocast, no move to another device.
    _is_accelerate_prepared = True
    # By which transformers' Trainer knows how the model's labels are counted; bind takes it from the model.
    loss_type: str | None = None
    # Numbers and texts that the compiled model has as attributes, by name.
    compiled_in: frozenset[str] = frozenset()

    def __getattr__(self, name: str) -> Any:
        """As of every module; where there is none of this `name`, what there is instead."""
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            reason = (
                "a parallel model has the compiled one's parameters and modules, not its methods (that one can load "
                "full_state_dict; activations are recomputed by compile(recompute=...)) nor its config (instead of the "
                "Trainer's label_smoothing_factor, compute such a loss in the model's forward)"
            )
            manifest = self.__dict__.get("_manifest")
            known = () if manifest is None else (*manifest.parameters, *manifest.aliases)
            if any(each.partition(".")[0] == name for each in known):
                reason = f"the stages of this rank do not read the model's {name}: go by named_parameters()"
            raise AttributeError(f"{error}: {reason}", name=name, obj=self) from None

    def __setattr__(self, name: str, value: Any) -> None:
        """As of every module, with a warning for an attribute that was compiled into the program."""
        super().__setattr__(name, value)
        if name in self.compiled_in:
            warn_caller(UNREAD.format(name=name))

    @property
    def coordinates(self) -> Coordinates:
        """Where this rank is in the mesh; ``.data`` is the replica whose batches it takes."""
        return self._rank.coordinates

    @property
    def accepts_loss_kwargs(self) -> bool:
        """Whether a call takes ``num_items_in_batch``: the Trainer asks."""
        return self._manifest.weighing_labels is not None

    @property
    def last_step(self) -> LastStep:
        """The last call in numbers, as this rank saw it; waits for the device. RuntimeError where no step has run."""
        measured = self._shape.executor.measured
        if self._loss is None or not measured.spans:
            raise RuntimeError(
                "no step has run, or the last one failed: call the parallel model before last_step"
            )
        manifest, device = self._shape.manifest, self._rank.device
        return read_last_step(manifest, measured, device, self._loss, self._norm)

    def save_trace(self, path: str | Path) -> None:
        """Write the last step as it ran: a chrome trace as `Simulation.save_trace` has it of the predicted one.

        Every rank must call it, and rank 0 writes the pipeline that it is in. A forward or backward is shown from
        where its values have arrived; what is sent is not shown. An all-reduce of the tensor ranks is shown from when
        it is posted to when its result is taken, and the gradients of weights that are computed beside it, if any.
        Times are by the clocks of the ranks' machines.
        Raises RuntimeError where no step has run, or the last one failed.
        """
        measured = self._shape.executor.measured
        if self._loss is None or not measured.spans:
            raise RuntimeError(
                "no step has run, or the last one failed: call the parallel model before save_trace"
            )
        with self._connection.position.duty("save_trace"):
            rows, phases = gather_measured(measured, self._rank.pipeline, self._rank.device)
        if self._rank.coordinates == self._rank.mesh.coordinates(0):
            about = {"step": "measured", "device": self._rank.device.type, "mesh": str(self._manifest.mesh)}
            write_trace(path, rows, phases, (), about)

    def train_step(
        self,
        batch: Mapping[str, Tensor],
        optimizer: torch.optim.Optimizer,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
        max_norm: float | None = None,
    ) -> Tensor:
        """One whole training step: call, backward, clip to `max_norm`, `optimizer`, `scheduler`, no gradients left.

        Every rank must call it; the same loss on each. As the plain loop, and raises what these calls raise.
        """
        loss = find_loss(self._manifest.output, self(**batch))
        loss.backward()
        if max_norm is not None:
            self.clip_grad_norm_(max_norm)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
        return loss.detach()

    @leave_uncompiled
    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of every module, and of what a sharded optimizer steps."""
        super().zero_grad(set_to_none)
        for shard in self._shards:
            if set_to_none:
                shard.own.grad = None
            elif shard.own.grad is not None:
                shard.own.grad.zero_()

    @leave_uncompiled
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Clip the gradient of the whole model, over all ranks, to `max_norm`; give its norm before.

        Every rank must call it, and gets the same norm; the rest is as in ``torch.nn.utils``. ValueError for a
        `norm_type` that is not positive.
        """
        check_norm_type(norm_type := float(norm_type))
        norm = self._measure_norm(norm_type)
        if error_if_nonfinite and not torch.isfinite(norm):
            raise RuntimeError(
                f"the {norm_type}-norm of the gradient is {norm.item()}: skip this step, "
                "or pass error_if_nonfinite=False to scale by it all the same"
            )
        gradients = (leaf.grad for leaf in self._leaves().values())
        with torch._C.DisableTorchFunctionSubclass():  # here shares are tensors like any, and sooner scaled
            scale_gradients((gradient for gradient in gradients if gradient is not None), norm, max_norm)
        dtypes = {p.dtype for p in self._manifest.parameters.values() if p.kind == "parameter"}
        return norm.to(torch.float64 if torch.float64 in dtypes else torch.float32)

    @leave_uncompiled
    def _measure_norm(self, norm_type: float, of: Container[str | int] | None = None) -> Tensor:
        """The norm of the whole gradient, or of the leaves that it is `of`, in float64: a collective of all ranks."""
        gradients = {
            name: p.grad
            for name, p in self._leaves().items()
            if isinstance(name, str) and p.grad is not None and (of is None or name in of)
        }
        position = self._connection.position
        duty, during = position.duty("clip_grad_norm_"), position.during("norm of the gradient")
        with duty, during, torch._C.DisableTorchFunctionSubclass():
            self._norm = global_norm(self._manifest, self._rank, gradients, self._shards, norm_type)
        return self._norm

    def _leaves(self) -> dict[str | int, nn.Parameter]:
        """What an optimizer may step: parameters by name, and this replica's parts of shards by their position.

        Frozen ones too: what was frozen after its backward has a gradient, by which it is stepped.
        """
        sharded = {name for shard in self._shards for name in shard.names}
        whole: dict[str | int, nn.Parameter] = {
            n: p for n, p in self._watch.parameters.items() if n not in sharded
        }
        return {**whole, **{index: shard.own for index, shard in enumerate(self._shards)}}

    def _trained(self) -> dict[str | int, nn.Parameter]:
        """The leaves that a call gives gradients to."""
        return {name: leaf for name, leaf in self._leaves().items() if leaf.requires_grad}
