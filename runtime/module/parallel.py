"""The parallel model of one rank: an nn.Module that runs the whole pipelined step when it is called."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from autoptd.runtime.checkpoint.saving import Schedulers
from autoptd.runtime.comm.connection import Connection
from autoptd.runtime.engine.batch import find_loss
from autoptd.runtime.engine.bound_shape import BoundShape, ShapeFunctions
from autoptd.runtime.engine.dynamo import leave_uncompiled
from autoptd.runtime.engine.last_step import LastStep
from autoptd.runtime.guards.optimizer_watch import watch_divided, watch_steps
from autoptd.runtime.guards.state_marks import StateMarks
from autoptd.runtime.guards.torch_clipping import clip_over_ranks
from autoptd.runtime.guards.weight_agreement import StepLog
from autoptd.runtime.kernels.precision import HALF
from autoptd.runtime.module.gradient_norm import GradientNorm
from autoptd.runtime.module.state_dicts import StateDicts
from autoptd.runtime.module.step_runner import StepRunner
from autoptd.runtime.module.trained_weights import TrainedWeights
from autoptd.runtime.program.manifest import Manifest
from autoptd.runtime.program.mesh import Coordinates
from autoptd.runtime.program.schedule import Schedule
from autoptd.runtime.user_warnings import warn_caller
from autoptd.runtime.weights.slices import Constants, register_slices, take_slices
from autoptd.runtime.weights.submodules import UNCOPIED, UNREAD, SlicedModule

OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)


class Parallel(nn.Module):
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
        self,
        manifest: Manifest,
        connection: Connection,
        functions: Mapping[int, Callable[..., Any]],
        constants: Constants,
        schedule: Schedule,
        weights: Mapping[str, Tensor],
        drawn: bool = False,
        further: Sequence[ShapeFunctions] = (),
    ) -> None:
        """Take this rank's slices of the whole `weights` (by the user's names) and bind the program to them.

        `functions` are this rank's stage functions by stage index, `constants` its program's own; `schedule` has the
        actions of all pipeline ranks. With `drawn`, parameters without values are initialised as the manifest says.
        `further` are the programs of further input shapes, with the same parameters in the same places.
        """
        super().__init__()
        self._manifest, self._connection, rank = manifest, connection, connection.rank
        slices = take_slices(manifest, rank, constants, weights, drawn)
        first = ShapeFunctions(manifest, functions, constants, schedule, weights)
        shapes = [BoundShape(first, connection, {})]
        for program in further:
            own, known = program.manifest, manifest.parameters
            tensors = take_slices(own, rank, program.constants, program.weights, drawn, known)
            shapes.append(BoundShape(program, connection, tensors))
        self._shapes = shapes
        # The stages compute with trained weights in half precision, which are kept in float32.
        narrow = {
            name: x for name, x in slices.items() if x.dtype in HALF and manifest.parameters[name].is_trained
        }
        register_slices(
            self, manifest, {**slices, **{name: x.to(torch.float32) for name, x in narrow.items()}}
        )
        self.train(manifest.training)
        steps, marks = StepLog(), StateMarks(manifest, rank)
        self._weights = TrainedWeights(self, manifest, connection, shapes, narrow, marks)
        self._runner = StepRunner(manifest, connection, shapes, self._weights, steps)
        self._norm = GradientNorm(manifest, connection, self._weights, self._runner)
        self._states = StateDicts(manifest, connection, shapes, self._weights, self._runner, steps)
        for part in self.modules():
            if isinstance(part, SlicedModule):
                part.arrive = WeakMethod(self._weights.await_gathers)
        if manifest.mesh.size > 1:
            watch_steps(self, marks, steps)
        if manifest.mesh.tensor * manifest.mesh.pipeline > 1:
            watch_divided(self, marks)
            clip_over_ranks(self, self._norm.for_torch())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step on this replica's batch, of a compiled shape; return the model's output with only the loss.

        With ``num_items_in_batch`` (see `weigh_items`) the loss is the sum over the labels divided by that number,
        for steps of several calls, whose counts of labels differ.
        """
        self._runner.refuse_broken()
        self._weights.check(self)
        self._states.take_buffers()
        return self._runner.call(self.training, args, kwargs)

    def train_step(
        self,
        batch: Mapping[str, Tensor],
        optimizer: torch.optim.Optimizer,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
        max_norm: float | None = None,
    ) -> Tensor:
        """Run one whole training step: call, backward, clip to `max_norm`, `optimizer`, `scheduler`, clear gradients.

        Every rank must call it, and gets the same loss. It is the plain loop, and raises the errors of these calls.
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

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Clip the gradient of the whole model, over all ranks, to `max_norm`; return its norm before.

        Every rank must call it, and gets the same norm; the rest is as in ``torch.nn.utils``. ValueError for a
        `norm_type` that is not positive.
        """
        return self._norm.clip(max_norm, float(norm_type), error_if_nonfinite)

    @leave_uncompiled
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients as every module does, and those of a sharded optimizer's parts."""
        if set_to_none:
            super().zero_grad()
        for leaf in self._weights.leaves().values():
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
        clip_over_ranks(self, self._norm.for_torch())
        return optimizer

    @property
    def coordinates(self) -> Coordinates:
        """The place of this rank in the mesh; ``.data`` is the replica whose batches it takes."""
        return self._connection.rank.coordinates

    @property
    def accepts_loss_kwargs(self) -> bool:
        """Whether a call takes ``num_items_in_batch``: the Trainer asks."""
        return self._manifest.weighing_labels is not None

    @property
    def sent_elements(self) -> Mapping[str, int]:
        """Elements this rank has sent so far over each stage boundary: "stage 0 -> 1", "stage 1 -> 0"."""
        return sum((shape.executor.sent for shape in self._shapes), Counter[str]())

    @property
    def last_step(self) -> LastStep:
        """The last call in numbers, as this rank saw it; waits for the device. RuntimeError where no step has run."""
        return self._runner.read_last_step()

    def save_trace(self, path: str | Path) -> None:
        """Write the last step as it ran: a chrome trace as `Simulation.save_trace` has it of the predicted one.

        Every rank must call it, and rank 0 writes the pipeline that it is in. A forward or backward is shown from
        where its values have arrived; sends are not shown. An all-reduce of the tensor ranks is shown from when
        it is posted to when its result is taken, and the gradients of weights that are computed beside it, if any.
        Times are by the clocks of the ranks' machines.
        Raises RuntimeError where no step has run, or the last one failed.
        """
        self._runner.save_trace(path)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return this rank's tensors under the user's names; trained weights in half precision as stepped, in float32.

        Where an optimizer is sharded, which has that float32, they are as the stages compute with them.
        """
        self._states.warn_of_slices()
        self._weights.await_gathers()
        return super().state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Take this rank's tensors under the user's names, as every module does. All ranks of a stage must call it.

        Raises ValueError for other values of a buffer that were compiled into the program.
        """
        self._states.check_proved(self._slices(), state_dict)
        result = super().load_state_dict(state_dict, strict, assign)
        self._states.take_over()
        return result

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return the whole model's ``state_dict`` on the CPU of rank 0, {} elsewhere; the plain model loads it.

        Every rank must call it.
        """
        return self._states.gather(self._slices())

    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take this rank's slices of a whole `state`, given to every rank.

        Raises ValueError for other names, values that differ where the program has one tensor, or other values of a
        buffer that were compiled into the program.
        """
        self._states.load_whole(self._slices(), state)

    def export_pretrained(self, folder: str | Path, *, max_shard_size: int | str = "5GB") -> None:
        """Write the whole model as safetensors into `folder`, as transformers' ``save_pretrained`` does.

        Every rank must call it; rank 0 writes, a tensor at a time. A tied tensor is written once.
        ``model.config.save_pretrained(folder)`` adds what ``from_pretrained`` needs besides. Raises ValueError for a
        `max_shard_size` that is none, OSError on every rank where rank 0 cannot write.
        """
        self._states.export(self._slices(), folder, max_shard_size)

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
        self._states.save(self._slices(), folder, optimizer, scheduler, data, keep, asynchronous)

    def finish_checkpoint(self) -> None:
        """Wait for an asynchronous save, as the next save and load do; every rank must call it. CheckpointError."""
        self._states.finish()

    def load_checkpoint(
        self,
        folder: str | Path,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: Schedulers = None,
        *,
        trust_pickle: bool = False,
    ) -> Any:
        """Take over the last committed checkpoint of `folder`, or the step's folder `folder`; return its `data`.

        Every rank must call it. It may be from any mesh. With `trust_pickle` a folder of torch.distributed.checkpoint
        is read too, but only for the model's tensors: reading it can run any code that is in it.
        CheckpointError, on every rank and with nothing changed on any, where one cannot take all of it over.
        """
        return self._states.load(self._slices(), folder, optimizer, scheduler, trust_pickle)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters as every module does, after all replicas' new weights have arrived."""
        self._weights.await_gathers()
        return super().named_parameters(*args, **kwargs)

    def _slices(self) -> dict[str, Tensor]:
        return {**dict(self.named_parameters()), **dict(self.named_buffers())}

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Let ``to`` and the like read the parameters after all replicas' new weights have arrived."""
        self._weights.await_gathers()
        return super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]

    def __getattr__(self, name: str) -> Any:
        """Return an attribute as every module does; for an unknown `name` the error says what there is instead."""
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
        """Set an attribute as every module does, with a warning for one that was compiled into the program."""
        super().__setattr__(name, value)
        if name in self.compiled_in:
            warn_caller(UNREAD.format(name=name))

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse to be copied or pickled: the connections of a step are of this process."""
        raise TypeError(UNCOPIED)
