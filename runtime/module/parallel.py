"""The parallel model of one rank: an nn.Module that runs the whole pipelined step when it is called."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only  # private, with no public twin

from autoptd.runtime.checkpoint.loading import load_step
from autoptd.runtime.checkpoint.optimizer_state import NamedOptimizer
from autoptd.runtime.checkpoint.pretrained import write_pretrained
from autoptd.runtime.checkpoint.saving import Saving, Training
from autoptd.runtime.checkpoint.schedulers import Schedulers, name_schedulers
from autoptd.runtime.comm.connection import Connection
from autoptd.runtime.comm.timings import gather_measured
from autoptd.runtime.comm.trace import write_trace
from autoptd.runtime.engine.batch import call_signature
from autoptd.runtime.engine.dynamo import leave_uncompiled
from autoptd.runtime.engine.executor import Executor, ShapeFunctions
from autoptd.runtime.engine.last_step import LastStep, read_last_step
from autoptd.runtime.engine.lazy_output import LazyOutput
from autoptd.runtime.guards.optimizer_watch import watch_divided, watch_steps
from autoptd.runtime.kernels.operands import HALF
from autoptd.runtime.module.bound_weights import BoundWeights
from autoptd.runtime.module.gradient_norm import clip_gradients, clip_over_ranks
from autoptd.runtime.module.step_runner import StepRunner
from autoptd.runtime.optimizer.gradient_memory import StageLeaves
from autoptd.runtime.optimizer.zero1 import OptimizerT
from autoptd.runtime.program.manifest import Manifest
from autoptd.runtime.program.mesh import Coordinates
from autoptd.runtime.user_warnings import warn_caller
from autoptd.runtime.weights.slices import check_proof, gather_whole, load_whole, register_slices, take_slices
from autoptd.runtime.weights.submodules import UNREAD, BoundModule


class Parallel(BoundModule):
    """This rank's part of the model, used as the whole: ``loss = parallel(**batch).loss; loss.backward()``.

    A call runs the schedule, forwards and backwards, and keeps the gradients; ``backward`` scales them by the factor
    of the loss and hands them to ``.grad``. Every rank must call it, and gets the same loss. Under ``torch.no_grad()``
    it runs the forwards only. Parameters have their names in the user's ``state_dict``.
    """

    # Accelerate leaves a model with this flag as it is: no DDP around it, no autocast, no move to another device.
    _is_accelerate_prepared = True
    # transformers' Trainer reads here how the model's labels are counted; bind takes it from the model.
    loss_type: str | None = None
    # Numbers and texts that the compiled model has as attributes, by name.
    compiled_in: frozenset[str] = frozenset()

    def __init__(
        self, connection: Connection, *programs: ShapeFunctions, drawn: bool = False, graphs: bool = False
    ) -> None:
        """Take this rank's slices of the whole weights of the first of `programs`, by the user's names, and bind it.

        Those of further input shapes have the same parameters in the same places. With `drawn`, parameters without
        values are initialised as the manifest says; with `graphs` stages are replayed.
        """
        super().__init__()
        program, *further = programs
        manifest, rank = program.manifest, connection.rank
        self._manifest, self._connection = manifest, connection
        slices = take_slices(manifest, rank, program.text.constants, program.weights, drawn, ())
        self._shapes = [Executor(program, connection, {}, graphs)]
        for other in further:
            own = take_slices(other.manifest, rank, other.text.constants, other.weights, drawn, manifest.parameters)
            self._shapes.append(Executor(other, connection, own, graphs))
        # The stages compute with trained weights in half precision, which are kept in float32.
        narrow = {n: x for n, x in slices.items() if x.dtype in HALF and manifest.parameters[n].is_trained}
        register_slices(self, manifest, {**slices, **{name: x.to(torch.float32) for name, x in narrow.items()}})
        self.train(manifest.training)
        self._weights = BoundWeights(self, connection, self._shapes, narrow)
        self._runner = StepRunner(self._weights)
        self._saving: Saving | None = None
        for part in self.modules():
            if isinstance(part, BoundModule):
                part.arrive = WeakMethod(self._weights.await_gathers)
        if manifest.mesh.size > 1:
            watch_steps(self, self._weights.marks, self._runner.steps)
        self._warns_of_slices = manifest.mesh.expert * manifest.mesh.pipeline > 1
        if self._warns_of_slices:
            watch_divided(self, self._weights.marks)
            clip_over_ranks(self, self._runner)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step on this replica's batch, of a compiled shape; return the model's output.

        It has the loss, and as `LazyOutput` what ``compile(outputs=...)`` asked for; all other fields are None.

        With ``num_items_in_batch`` (`weigh_items`) the sum over labels is divided by that, for steps of several calls.
        """
        return self._runner.call(self, args, kwargs)

    def gather_replicas(self, given: Any) -> Any:
        """Return a tensor, or nested ones, with the rows of all replicas, in the order of the data ranks.

        Every rank must call it. A Trainer that gathers so counts each row once: ``trainer.gather_function =
        trainer.accelerator.gather_for_metrics = parallel.gather_replicas``.
        """

        def gather(x: Tensor) -> Tensor:
            own = x.full() if isinstance(x, LazyOutput) else x
            return torch.cat(list(map(torch.atleast_1d, self._connection.rank.group("data").all_gather(own))))

        with self._connection.position.collective_call("gather_replicas"), self._connection.exchange():
            return tree_map_only(Tensor, gather, given)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Clip the gradient of the whole model, over all ranks, to `max_norm`; return its norm before.

        Every rank must call it, and gets the same norm. ValueError unless `norm_type` is positive; else as torch's.
        """
        return clip_gradients(self._runner, max_norm, float(norm_type), error_if_nonfinite)

    @leave_uncompiled
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients as every module does, and those of a sharded optimizer's parts."""
        if set_to_none:
            super().zero_grad()
        for leaf in self._weights.leaves.values():
            if set_to_none:
                leaf.grad = None
            elif leaf.grad is not None:
                leaf.grad.zero_()

    def shard_optimizer(self, optimizer: OptimizerT) -> OptimizerT:
        """Divide the states and the step of `optimizer` among the replicas (ZeRO's first stage), and return it.

        Each replica then sums only its part of the gradients, steps it, and sends the new weights to the others while
        the next step begins; in half precision the float32 weights are divided too. The parameter groups stay, their
        parameters become flat parts of this replica's own, and only these have gradients with values: the ``.grad`` of
        the model's parameters is NaN, and good for torch's clipping alone. Every rank that has parameters must call it
        with an equal optimizer of ``parallel.parameters()``, before or between steps.

        Raises ValueError for an optimizer that may not step each element by itself, or has other parameters, for a
        parameter of it with a hook, and where one would be divided otherwise than by those that sum its gradients.
        """
        self._weights.shard(self, optimizer)
        clip_over_ranks(self, self._runner)
        return optimizer

    def whole_optimizer(self, make: Callable[..., OptimizerT], *args: Any, **options: Any) -> OptimizerT:
        """Return ``make(*args, **options)``, an optimizer of some of ``parallel.parameters()`` that steps them whole.

        For those that look at more than an element: Muon, Shampoo, Adafactor, LAMB. `make` is their class or a
        function. Where the mesh divides a parameter, each step gathers it and its gradient on one rank, which steps
        it, and sends the rows back; the ranks share this work by size, and each has the states of what it steps. Every
        rank that has parameters must call it, with the same ones on all ranks of a stage, and it steps as any
        optimizer does. Each parameter must be stepped by itself: clip the norm of all gradients before the step.

        Raises ValueError for LBFGS, which cannot, for parameters of a sharded optimizer, and experts over data ranks.
        """
        return self._weights.make_whole(make, *args, **options)

    @property
    def coordinates(self) -> Coordinates:
        """The place of this rank in the mesh; ``.data`` is the replica whose batches it takes."""
        return self._connection.rank.coordinates

    @property
    def accepts_loss_kwargs(self) -> bool:
        """Whether a call takes ``num_items_in_batch``: the Trainer asks."""
        return self._manifest.weighing_labels is not None

    @property
    def last_step(self) -> LastStep:
        """The last call in numbers, as this rank saw it; waits for the device. RuntimeError where no step has run."""
        measured, loss = self._runner.read_measured("last_step")
        return read_last_step(self._runner.shape.manifest, measured, loss, self._runner.norm)

    def save_trace(self, path: str | Path) -> None:
        """Write the last step as it ran: a chrome trace as `Simulation.save_trace` has it of the predicted one.

        Every rank must call it, and rank 0 writes the pipeline that it is in. A forward or backward is shown from
        where its values have arrived; sends are not shown. An all-reduce of the tensor ranks is shown from when
        it is posted to when its result is taken, and the gradients of weights that are computed beside it, if any.
        Times are by the clocks of the ranks' machines. RuntimeError where no step has run, or the last one failed.
        """
        measured, _ = self._runner.read_measured("save_trace")
        rank = self._connection.rank
        with self._connection.position.collective_call("save_trace"):
            rows, phases = gather_measured(measured, rank.group("pipeline"))
        if rank.number == 0:
            about = {"step": "measured", "device": rank.device.type, "mesh": str(rank.mesh)}
            write_trace(path, rows, phases, (), about)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return this rank's tensors under the user's names; trained weights in half precision as stepped, in float32.

        Where an optimizer is sharded, which has that float32, they are as the stages compute with them.
        """
        if self._warns_of_slices:
            self._warns_of_slices = False
            warn_caller(
                "state_dict of a parallel model has this rank's slices under the model's names, and a file of it is no "
                "file of the model: save parallel.full_state_dict(), which every rank must call, or go on later from "
                "parallel.save_checkpoint (Trainer: save_strategy='no', Lightning: enable_checkpointing=False)"
            )
        self._weights.await_gathers()
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Take this rank's tensors under the user's names, as every module does. All ranks of a stage must call it.

        Raises ValueError for other values of a buffer that were compiled into the program.
        """
        check_proof(self._manifest, state_dict, self._weights.parts)
        result = super().load_state_dict(state_dict, strict, assign)
        self._take_over()
        return result

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return the plain model's ``state_dict`` on the CPU of rank 0, {} elsewhere. Every rank must call it."""
        with self._connection.position.collective_call("full_state_dict"):
            return gather_whole(self._manifest, self._connection.rank, self._slices())

    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take this rank's slices of a whole `state`, given to every rank.

        Raises ValueError for other names, values that untie a tensor, or others of a buffer that was compiled in.
        """
        load_whole(self._manifest, self._connection.rank, self._slices(), state)
        self._take_over()

    def export_pretrained(self, folder: str | Path, *, max_shard_size: int | str = "5GB") -> None:
        """Write the whole model as safetensors into `folder`, as transformers' ``save_pretrained`` does.

        Every rank must call it; rank 0 writes, a tensor at a time. A tied tensor is written once.
        ``model.config.save_pretrained(folder)`` adds what ``from_pretrained`` needs besides. Raises ValueError for a
        `max_shard_size` that is none, OSError on every rank where rank 0 cannot write.
        """
        with self._connection.position.collective_call("export_pretrained"):
            write_pretrained(self._manifest, self._connection.rank, self._slices(), folder, max_shard_size)

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
        with self._connection.position.collective_call("save_checkpoint"):
            self._saving = Saving(self._training(optimizer, scheduler), Path(folder), data, keep, asynchronous)
        if not asynchronous:
            self.finish_checkpoint()

    def finish_checkpoint(self) -> None:
        """Wait for an asynchronous save, as the next save and load do; every rank must call it. CheckpointError."""
        saving, self._saving = self._saving, None
        if saving is not None:
            with self._connection.position.collective_call("finish_checkpoint"):
                saving.finish()

    def load_checkpoint(
        self, folder: str | Path, optimizer: torch.optim.Optimizer | None = None, scheduler: Schedulers = None
    ) -> Any:
        """Take over the last committed checkpoint of `folder`, or the step's folder `folder`; return its `data`.

        Every rank must call it. It may be from any mesh.
        CheckpointError, on every rank and with nothing changed on any, where one cannot take all of it over.
        """
        self.finish_checkpoint()
        with self._connection.position.collective_call("load_checkpoint"):
            given = load_step(self._training(optimizer, scheduler), Path(folder))
        self._take_over()
        return given

    def _slices(self) -> dict[str, Tensor]:
        return {**dict(self.named_parameters()), **dict(self.named_buffers())}

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        for shape in self._shapes:  # leaves would keep the memory that tensors leave
            shape.leaves = StageLeaves()
        self._weights.sums.release()
        return super()._apply(*args, **kwargs)

    def _training(self, optimizer: torch.optim.Optimizer | None, scheduler: Schedulers) -> Training:
        self._weights.adopt_writes()
        slices, weights = self._slices(), self._weights
        taken = weights.taken_by(optimizer) if optimizer else {}
        named = NamedOptimizer(optimizer, slices, weights.shards, taken) if optimizer else None
        own = slices, weights.shards, named, name_schedulers(scheduler), self._runner.loss_scale
        return Training(self._manifest, self._connection.rank, *own)

    def _take_over(self) -> None:
        """Bring up to date what depends on parameters and buffers, which have new values that fit together."""
        self._runner.steps.reset()
        self._weights.adopt_writes()
        self._weights.refresh_constants()

    def __getattr__(self, name: str) -> Any:
        """Return an attribute as every module does; for an unknown `name` the error says what there is instead."""
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            reason = (
                "a parallel model has those of the compiled one's parameters and modules that the stages of this rank "
                "read (see named_parameters()), not its methods (that one can load full_state_dict; activations are "
                "recomputed by compile(recompute=...)) nor its config (instead of the Trainer's "
                "label_smoothing_factor, compute such a loss in the model's forward)"
            )
            raise AttributeError(f"{error}: {reason}", name=name, obj=self) from None

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute as every module does, with a warning for one that was compiled into the program."""
        super().__setattr__(name, value)
        if name in self.compiled_in:
            warn_caller(UNREAD.format(name=name))


def signed(manifest: Manifest) -> type[Parallel]:
    """Give `Parallel` the signature of the model's own forward, which the Trainer reads for columns and labels."""

    @leave_uncompiled
    def forward(self: Parallel, *args: Any, **kwargs: Any) -> Any:
        return Parallel.forward(self, *args, **kwargs)

    forward.__doc__ = Parallel.forward.__doc__
    forward.__signature__ = call_signature(manifest)  # type: ignore[attr-defined]
    return type("Parallel", (Parallel,), {"forward": forward, "__module__": Parallel.__module__})
