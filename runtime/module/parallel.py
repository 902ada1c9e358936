"""The parallel model of one rank: an nn.Module that runs the whole pipelined step when it is called."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, TypeVar
from weakref import WeakMethod

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from autoptd.runtime.checkpoint.saving import Saving
from autoptd.runtime.comm.connection import Connection
from autoptd.runtime.comm.groups import Posted
from autoptd.runtime.engine.batch import (
    bind_batch,
    output_builder,
    split_batch,
    unequal_counts,
)
from autoptd.runtime.engine.bound_shape import BoundShape, ShapeProgram
from autoptd.runtime.engine.dynamo import leave_uncompiled
from autoptd.runtime.engine.label_count import NAME as ITEMS
from autoptd.runtime.engine.label_count import read_items, weigh_items
from autoptd.runtime.engine.label_weights import find_divisors
from autoptd.runtime.engine.step import Step
from autoptd.runtime.guards.divided_dimension import find_divided
from autoptd.runtime.guards.mixed_precision import describe_unheeded
from autoptd.runtime.guards.nonfinite import explain_nonfinite
from autoptd.runtime.guards.norm_guard import Whole, check_elsewhere, clear_with, share_gradients, stand_in
from autoptd.runtime.guards.optimizer_watch import watch_divided, watch_steps
from autoptd.runtime.guards.parameter_watch import ParameterWatch, refuse_hooks
from autoptd.runtime.guards.pickle_guard import keep_unwritten, mark_slices
from autoptd.runtime.guards.state_marks import StateMarks
from autoptd.runtime.guards.step_agreement import Batch, compare_ranks, compare_shapes, compare_shards
from autoptd.runtime.guards.weight_agreement import Copies, StepLog
from autoptd.runtime.kernels.precision import HALF
from autoptd.runtime.module.persistence import Persistent
from autoptd.runtime.optimizer.gradient_buckets import DTYPES, share_loss
from autoptd.runtime.optimizer.loss_scale import LossScale
from autoptd.runtime.optimizer.zero1 import Shard, fill_groups, lay_out_shards
from autoptd.runtime.program.manifest import Manifest
from autoptd.runtime.program.schedule import Schedule
from autoptd.runtime.user_warnings import warn_caller
from autoptd.runtime.weights.slices import Constants, check_proved, hang_up, take_slices
from autoptd.runtime.weights.submodules import Part

OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)


class Parallel(Persistent):
    """This rank's part of the model, used as the whole: ``loss = parallel(**batch).loss; loss.backward()``.

    A call runs the schedule, forwards and backwards, and keeps the gradients; ``backward`` scales them by
    what it is given and hands them to ``.grad``. Every rank must call it, and gets the same loss. Under
    ``torch.no_grad()`` it runs the forwards only. Parameters have their names in the user's ``state_dict``.
    """

    def __init__(
        self,
        manifest: Manifest,
        connection: Connection,
        functions: Mapping[int, Callable[..., Any]],
        constants: Constants,
        schedule: Schedule,
        weights: Mapping[str, Tensor],
        drawn: bool = False,
        further: Sequence[ShapeProgram] = (),
    ) -> None:
        """Take this rank's slices of the whole `weights` (by the user's names) and bind the program to them.

        `functions` are this rank's stage functions by stage index, `constants` its program's own; `schedule` has the
        actions of all pipeline ranks. With `drawn`, parameters without values are initialised as the manifest says.
        `further` are the programs of further input shapes, with the same parameters in the same places.
        """
        super().__init__()
        self._manifest = manifest
        self._rank = connection.rank
        self._connection = connection
        self._device = connection.rank.device
        self._build_output = output_builder(manifest.output)
        self._loss_dtype: torch.dtype | None = None
        at = connection.rank.coordinates
        # Tensor ranks have the same labels: one of them says it.
        self._watches_labels = at.tensor == 0 and at.pipeline == manifest.mesh.pipeline - 1
        self._warns_precision = at == manifest.mesh.coordinates(0)  # until it has
        self._loss_scale = LossScale() if manifest.scales_loss else None
        self._saving: Saving | None = None
        slices = take_slices(manifest, self._rank, constants, weights, drawn)
        first = ShapeProgram(manifest, functions, constants, schedule, weights)
        self._shapes = [BoundShape(first, connection, {})]
        for program in further:
            own, known = program.manifest, manifest.parameters
            tensors = take_slices(own, self._rank, program.constants, program.weights, drawn, known)
            self._shapes.append(BoundShape(program, connection, tensors))
        self._manifests = [shape.manifest for shape in self._shapes]
        self._shape = self._shapes[0]
        # What the stages compute with of the half-precision weights, which are kept in float32.
        self._narrow = {
            name: x for name, x in slices.items() if x.dtype in HALF and manifest.parameters[name].is_trained
        }
        hang_up(self, manifest, {**slices, **{name: x.to(torch.float32) for name, x in self._narrow.items()}})
        self.train(manifest.training)
        self._steps = StepLog()
        self._copies = Copies(manifest, self._rank, dict(nn.Module.named_parameters(self)), self._steps)
        for part in self.modules():
            if isinstance(part, Part):
                part.arrive = WeakMethod(self._await_gathers)
        self._loss = self._norm = None
        self._gradients_everywhere = True
        self._whole: Whole | None = None  # whose gradients are shared
        # By which they are, by the names in `_leaves`.
        self._hooks: dict[str | int, tuple[RemovableHandle, ...]] = {}
        self._marks = StateMarks(manifest, self._rank)
        if manifest.mesh.size > 1:
            watch_steps(self, self._marks, self._steps)
        if manifest.mesh.tensor * manifest.mesh.pipeline > 1:
            watch_divided(self, self._marks)
            for part in self.modules():
                part.register_state_dict_post_hook(mark_slices)
            for _, parameter in nn.Module.named_parameters(self):
                keep_unwritten(parameter)
        self._share_steps(())
        self._buffer_versions = self._read_buffer_versions()

    def _share_steps(self, shards: Sequence[Shard]) -> None:
        """From now on the optimizer steps `shards`, and no parameter that is in one."""
        self._shards = tuple(shards)
        sharded = {name for shard in shards for name in shard.names}
        self._watch = ParameterWatch(self._manifest, self, sharded)
        self._marks.hold(self._watch.parameters, self._shards)
        self._narrow = {name: x for name, x in self._narrow.items() if name not in sharded}
        self._gathering: dict[Shard, Posted[Tensor]] = {}
        for shape in self._shapes:
            shape.share_steps(self._shards)
        if self._manifest.mesh.tensor * self._manifest.mesh.pipeline > 1 or shards:
            names = {index: shard.names for index, shard in enumerate(shards)}
            self._whole = Whole(
                WeakMethod(self._measure_norm),
                WeakMethod(self._leaves),
                WeakMethod(self._is_everywhere),
                names,
                find_divided(self._manifest, self._rank),
            )
            for hook in chain.from_iterable(self._hooks.values()):
                hook.remove()
            self._hooks = {}
            self._share_gradients(self._trained())
            stood = [handle for s in shards for handle in stand_in(s, self._named(s), self._whole)]
            self._watch.hooks = frozenset(handle.id for handle in stood)
        self._versions = self._read_versions()

    @property
    def sent_elements(self) -> Mapping[str, int]:
        """Elements this rank has sent so far over each stage boundary: "stage 0 -> 1", "stage 1 -> 0"."""
        return sum((shape.executor.sent for shape in self._shapes), Counter[str]())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step on this replica's batch, of a compiled shape; give what the model returns, with only the loss.

        With ``num_items_in_batch`` (see `weigh_items`) the loss is the sum over the labels divided by that number,
        for steps of several calls, whose counts of labels differ.
        """
        if self._connection.groups.broken:
            raise RuntimeError(
                "an earlier call broke off in the middle of its schedule, and the other ranks' messages of it would be "
                "taken for this one's: begin again in new processes, from the last checkpoint"
            )
        self._watch.check(self)
        self._check_unwritten()
        self._check_optimizers_own()
        if self._is_rebound():
            self._adopt_writes()
        if self._buffer_versions != self._read_buffer_versions():
            self._take_buffers()
        known = any(i.name == ITEMS for i in self._manifest.inputs)
        given = None if known else kwargs.pop(ITEMS, None)
        number, batch = bind_batch(self._manifests, args, kwargs, self._device)
        manifest = self._manifests[number]
        items = None if given is None else read_items(manifest, given, self._device)
        if self._warns_precision and (warning := describe_unheeded(self._manifest, self._device)):
            self._warns_precision = False  # once is enough
            warn_caller(warning)
        warning = unequal_counts(manifest, batch) if self._watches_labels else ""
        if warning:
            self._watches_labels = False
            warn_caller(warning)
        if torch.is_grad_enabled():
            # Makes the loss differentiable on a rank without parameters too.
            anchor = torch.zeros((), device=self._device, requires_grad=True)
            leaves = self._trained()
            self._share_gradients(leaves)
            sharded = [parameter for shard in self._shards for parameter in self._named(shard).values()]
            loss = Step.apply(self, number, batch, tuple(leaves), anchor, *leaves.values(), *sharded)  # type: ignore[no-untyped-call]
        else:
            # What is made now is there for later steps, which inference tensors are not.
            with (
                torch.inference_mode(False),
                torch.no_grad(),
                self._connection.position.call(training=False, shape=number),
            ):
                loss = self._run(number, batch, gradients=False)
        if items is not None:
            loss = loss * weigh_items(manifest, self._rank, batch, items).to(loss.dtype)
        return self._build_output(loss)

    def shard_optimizer(self, optimizer: OptimizerT) -> OptimizerT:
        """Divide what `optimizer` keeps and steps among the replicas (ZeRO's first stage), and give it back.

        Each replica then sums only its part of the gradients, steps it, and sends the new weights to the others while
        the next step begins; in half precision the float32 weights are divided too. The parameter groups stay, their
        parameters become flat parts of this replica's own, and only these have gradients with values: the ``.grad`` of
        the model's parameters is good for torch's norm and clipping. Every rank that has parameters must call it, with
        the like optimizer of ``parallel.parameters()``, before or between steps.

        Raises ValueError for an optimizer that may not step each element by itself, or has other parameters, for a
        parameter of it with a hook, and where one would be divided otherwise than by those that sum its gradients.
        """
        if self._shards:
            raise ValueError(
                "an optimizer of this parallel model is sharded already, and it can have one: go on with that "
                "(optimizer.state.clear() forgets what it knows), or bind again"
            )
        self._watch.check(self)
        manifest = self._manifest
        parameters = dict(self.named_parameters())
        dtypes = {name: manifest.parameters[name].dtype for name in parameters}
        rows = self._shapes[0].completion.rows
        trained = {p for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
        hooks = {handle.id for handle in chain.from_iterable(self._hooks.values())}
        for name in (name for row in rows for name in row if parameters.get(name) in trained):
            refuse_hooks(name, parameters[name], hooks)
        self._marks.check(optimizer)  # of what was loaded for these parameters, which get other places
        buckets = fill_groups(optimizer, parameters, dtypes, rows)
        with self._connection.position.during("comparison of what is sharded"):
            compare_shards(manifest, self._connection, rows, list(chain.from_iterable(buckets)))
        self._share_steps(lay_out_shards(optimizer, parameters, dtypes, buckets, self._rank.data))
        self._marks.mark(optimizer)
        optimizer.register_step_pre_hook(self._prepare_step)
        optimizer.register_step_post_hook(self._post_gathers)
        return optimizer

    def _share_gradients(self, leaves: Mapping[str | int, nn.Parameter]) -> None:
        """Let backward leave shares of the whole gradient, also in what was frozen until now and has no hook yet."""
        if self._whole is not None:
            new = {name: leaf for name, leaf in leaves.items() if name not in self._hooks}
            self._hooks |= share_gradients(new, self._whole)

    def _run(self, number: int, batch: Batch, gradients: bool) -> Tensor:
        """Run the step of the shape of this `number` and give the loss; with `gradients`, these are in its `sums`."""
        self._loss, self._shape = None, (shape := self._shapes[number])
        rank, manifest, executor, sums = self._rank, shape.manifest, shape.executor, shape.sums
        if len(self._shapes) > 1:
            compare_shapes(self._manifests, self._connection, number)
        rank.randomness.training = self.training
        for name, narrow in self._narrow.items():
            narrow.copy_(self._watch.parameters[name].detach())
        inputs = {i: split_batch(manifest, batch, manifest.stages[i].inputs) for i in executor.stages}
        divisors = self._find_divisors(shape, batch)
        pair, repeat = self._run_schedule(shape, inputs, divisors, gradients)
        scale = self._loss_scale
        before = None if scale is None else (scale.value, scale.finite_steps)
        judged = scale is not None
        while scale is not None and gradients and scale.unscale(rank, sums.gradients(), pair[0]):
            if before is not None and scale.is_exhausted:
                judged, (scale.value, scale.finite_steps) = False, before
                break
            pair, repeat = self._run_schedule(shape, inputs, divisors, gradients)
        if self._loss_dtype is None:
            self._loss_dtype = DTYPES[int(pair[1])]
        executor.measured.finish()
        self._connection.position.phase("agreement")
        # Of a scaled loss the scale has judged the gradients, but for those that no factor makes finite.
        summed = sums.gradients() if gradients and not judged else []
        trains = not gradients or bool(sums.gradients())
        changed = self._watch.find_trained() != self._watch.agreed
        nonfinite, lacking, self._watch.stale = compare_ranks(
            manifest, self._connection, batch, pair[0], summed, self._copies, trains=trains, changed=changed
        )
        if gradients:
            self._gradients_everywhere = not lacking
            if self._watch.stale:  # some rank froze others since: this step was of what all had agreed on
                if scale is not None and before is not None:
                    scale.value, scale.finite_steps = before
                return self._run(number, batch, gradients)
        if nonfinite and gradients:
            sums.clear()
            unlabelled = divisors.isinf().nonzero().flatten().tolist()
            with self._connection.exchange():
                why = explain_nonfinite(
                    manifest, self._connection, batch, pair[0], summed, unlabelled, repeat
                )
            raise FloatingPointError(why)
        if self.training:
            rank.randomness.call += 1
        self._loss, self._norm = pair[0], None
        return pair[0].to(self._loss_dtype)

    def _is_everywhere(self) -> bool:
        """Whether the last training call gave every rank gradients."""
        return self._gradients_everywhere

    def _run_schedule(
        self,
        shape: BoundShape,
        inputs: Mapping[int, Sequence[Sequence[Tensor]]],
        divisors: Tensor,
        gradients: bool,
    ) -> tuple[Tensor, Callable[[], object]]:
        """Run the schedule once, on `inputs` by stage; give what `share_loss` gives, and what runs it again.

        With `gradients` their sums are in the shape's; those of the repetition are not.
        """
        slices = {**self._watch.parameters, **self._watch.buffers(), **shape.slices, **self._narrow}
        trained = self._watch.agree(self._connection) if gradients else frozenset()
        # A stage has leaves of its own, on the same memory: a tied parameter's uses add up separately.
        weights = {
            index: {
                name: slices[name].detach().requires_grad_(name in trained)
                for name in shape.manifest.stages[index].parameters
            }
            for index in inputs
        }
        seeds = None
        if gradients:
            shape.sums.start(weights)
            scale = 1.0 if self._loss_scale is None else self._loss_scale.value
            seeds = (scale / divisors).unbind()
        run = partial(shape.executor.run, weights, inputs, seeds, self._await_stage)
        position = self._connection.position
        with self._connection.exchange():
            losses = run(shape.sums.end_stage)
            position.phase("loss")
            pair = share_loss(self._rank, losses, divisors)
            if gradients:
                position.phase("sum of gradients")
                shape.sums.finish()
        return pair, partial(run, lambda _: None)

    def _take_buffers(self) -> None:
        """Buffers were written, or are others: compute anew what is of them; ValueError where they are compiled in."""
        known, own = self._manifest.parameters, self._watch.buffers()
        for alias, name in self._manifest.aliases.items():
            if own.get(alias) is not own.get(name):
                raise ValueError(
                    f"the buffer {alias} was replaced after bind, and is one with {name}: write its values "
                    "(buffer.copy_), or replace both by one tensor"
                )
        found = {n: b for n, b in own.items() if n in known and tuple(b.shape) == known[n].shape}
        check_proved(self._manifest, found)
        self._refresh_constants()
        self._buffer_versions = self._read_buffer_versions()

    def _read_buffer_versions(self) -> list[tuple[int, int]]:
        """Which tensors the buffers are, and counts of the writes into them."""
        return [(id(b), 0 if b.is_inference() else b._version) for b in self._watch.buffers().values()]

    def _find_divisors(self, shape: BoundShape, batch: Batch) -> Tensor:
        """Those of the runtime's `weighting`, on the last pipeline rank, which has the labels; else of no use."""
        if len(self._manifest.stages) - 1 in shape.executor.stages:
            return find_divisors(shape.manifest, self._rank, batch)
        return torch.ones(self._manifest.num_microbatches, dtype=torch.float64, device=self._device)

    def _named(self, shard: Shard) -> dict[str, nn.Parameter]:
        """The parameters of a shard."""
        return {name: self._watch.parameters[name] for name in shard.names}

    @leave_uncompiled
    def _prepare_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """A sharded optimizer is about to step: let it have what was done to the model's parameters."""
        self._marks.check(optimizer)
        for shard in self._shards:
            check_elsewhere(self._named(shard))
            clear_with(shard.own, self._named(shard))
        self._adopt_writes()

    @leave_uncompiled
    def _post_gathers(self, *_: Any) -> None:
        """The optimizer has stepped: begin to share the new weights, in the order in which stages need them."""
        self._await_gathers()
        self._gathering = {shard: shard.post_gather() for shard in self._shards}

    def _await_stage(self, stage: int) -> None:
        """Wait for what `stage` computes with."""
        own = self._manifest.stages[stage].parameters
        for shard in [shard for shard in self._gathering if not set(own).isdisjoint(shard.names)]:
            self._gathering.pop(shard).wait()
