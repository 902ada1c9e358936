"""The steps of a rank: a batch in, the schedule of its shape run, a loss and gradients out."""

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from autoptd.runtime.comm.timings import Measured
from autoptd.runtime.engine.batch import bind_batch, output_builder, split_batch, unequal_counts
from autoptd.runtime.engine.executor import Executor, Inputs
from autoptd.runtime.engine.label_weights import ITEMS, find_divisors, read_items, weigh_items
from autoptd.runtime.engine.lazy_output import LazyOutput, RankPart
from autoptd.runtime.engine.step import Step
from autoptd.runtime.guards.nonfinite import explain_nonfinite
from autoptd.runtime.guards.parameter_watch import describe_unheeded
from autoptd.runtime.guards.step_agreement import Batch, compare_ranks, compare_shapes
from autoptd.runtime.guards.weight_agreement import Copies, StepLog
from autoptd.runtime.module.bound_weights import BoundWeights
from autoptd.runtime.optimizer.gradient_buckets import DTYPES, share_loss
from autoptd.runtime.optimizer.gradient_sums import Row
from autoptd.runtime.optimizer.loss_scale import LEAST, LossScale
from autoptd.runtime.user_warnings import warn_caller


class StepRunner:
    """The programs of all compiled input shapes on this rank, run on the batches of calls.

    `shape` is the input shape of the last call, `loss` its loss (None where it failed), and `norm` that of its
    gradients where they were clipped. `gradients_everywhere`: the last training call gave every rank gradients.
    """

    def __init__(self, weights: BoundWeights) -> None:
        self.weights = weights
        self.steps = StepLog()
        manifest, self._connection = weights.manifest, weights.connection
        self._manifest = manifest
        self._manifests = [shape.manifest for shape in weights.shapes]
        self._rank = self._connection.rank
        self._copies = Copies(manifest, self._rank, weights.watch.parameters, self.steps)
        self._build_output = output_builder(manifest.output)
        self._loss_dtype: torch.dtype | None = None
        self.loss_scale = LossScale() if manifest.scales_loss else None
        at = self._rank.coordinates
        # Tensor ranks have the same labels: one of them warns. Each warning is given once.
        self._warns_labels = at.tensor == 0 and at.pipeline == manifest.mesh.pipeline - 1
        self._warns_precision = self._rank.number == 0
        self.shape = weights.shapes[0]
        self.loss: Tensor | None = None
        self.norm: Tensor | None = None
        self.gradients_everywhere = True

    def call(self, module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run the step on the batch in `args` and `kwargs`; return the model's output: the loss and what was asked for.

        `module` is the parallel model. RuntimeError where an earlier call broke off between its messages.
        """
        if self._connection.groups.broken:
            raise RuntimeError(
                "an earlier call broke off in the middle of its schedule, and the other ranks' messages of it would be "
                "taken for this one's: begin again in new processes, from the last checkpoint"
            )
        self.weights.check(module)
        given = None if any(i.name == ITEMS for i in self._manifest.inputs) else kwargs.pop(ITEMS, None)
        number, batch = bind_batch(self._manifests, args, kwargs, self._rank.device)
        manifest = self._manifests[number]
        items = None if given is None else read_items(manifest, given, self._rank.device)
        if self._warns_precision and (warning := describe_unheeded(self._manifest, self._rank.device)):
            self._warns_precision = False
            warn_caller(warning)
        self._rank.randomness.training = module.training
        if torch.is_grad_enabled():
            handover = self.weights.find_handover()
            run = partial(self._train, number, batch)
            handover.note_scale = None if self._manifest.mesh.size == 1 else self.steps.scale
            loss: Tensor = Step.apply(run, handover, handover.link)  # type: ignore[no-untyped-call]
        else:
            # Tensors made here are there for later steps, which inference tensors are not.
            with torch.inference_mode(False), torch.no_grad(), self._connection.position.call(training=False):
                loss = self._run(number, batch, gradients=False)
        # Now, since on a GPU it waits for the step.
        if self._warns_labels and (warning := unequal_counts(manifest, batch)):
            self._warns_labels = False
            warn_caller(warning)
        if items is not None:
            loss = loss * weigh_items(manifest, self._rank, batch, items).to(loss.dtype)
        return self._build_output(loss, dict(self._take_outputs()))

    def _take_outputs(self) -> Iterator[tuple[tuple[str, ...], Tensor]]:
        """Yield the outputs of the last call by their paths; nothing of them has been sent."""
        made, manifest = self.shape.outputs, self.shape.manifest
        for stage in manifest.stages:
            for result in stage.outputs:
                source, local = stage.index % manifest.mesh.pipeline, made.pop(result.path, None)
                part = RankPart(result, manifest.num_microbatches, source, self._connection, local)
                yield result.path, LazyOutput.of(part)

    def _train(self, number: int, batch: Batch) -> tuple[Tensor, list[Row]]:
        with self._connection.position.call(training=True):
            loss = self._run(number, batch, gradients=True)
        return loss, self.weights.sums.take()

    def _run(self, number: int, batch: Batch, gradients: bool) -> Tensor:
        """Run the step of the shape of this `number`; return its loss, and leave `gradients` in the sums."""
        self.loss, self.shape = None, (shape := self.weights.shapes[number])
        rank, manifest, sums = self._rank, shape.manifest, self.weights.sums
        if len(self._manifests) > 1:
            compare_shapes(self._manifests, self._connection, number)
        watch = self.weights.watch
        if narrow := self.weights.narrow:
            torch._foreach_copy_(list(narrow.values()), list(map(watch.tensors.__getitem__, narrow)))
        inputs = {i: split_batch(manifest, batch, manifest.stages[i].inputs) for i in shape.stages}
        divisors = find_divisors(manifest, rank, batch)
        pair, repeat = self._run_schedule(shape, inputs, divisors, gradients)
        scale, before = self.loss_scale if gradients else None, copy(self.loss_scale)
        while scale is not None and scale.unscale(rank, sums.gradients(), pair[0]):
            if scale.value < LEAST:
                self.loss_scale, scale = before, None
            else:
                pair, repeat = self._run_schedule(shape, inputs, divisors, gradients)
        if self._loss_dtype is None:
            self._loss_dtype = DTYPES[int(pair[1])]
        shape.measured.end = shape.measured.mark()
        self._connection.position.phase("agreement")
        # Of a scaled loss the scale has judged the gradients, but for those that no factor makes finite.
        summed = sums.gradients() if gradients and scale is None else []
        flags = gradients and not sums.gradients(), watch.trained != watch.agreed, shape.captures.wants
        known = manifest, self._connection, batch, pair[0], summed
        nonfinite, lacking, watch.stale, wanted = compare_ranks(*known, self._copies, flags)
        shape.captures.agree(wanted)
        if gradients:
            self.gradients_everywhere = not lacking
            if watch.stale:  # some rank froze others since: this step was of what all had agreed on
                self.loss_scale = before
                return self._run(number, batch, gradients)
        if nonfinite and gradients:
            sums.start((), shape.measured)  # the repetition would find an old infinity in a sum
            unlabelled = divisors.isinf().nonzero().flatten().tolist()
            with self._connection.exchange():
                why = explain_nonfinite(*known, unlabelled, repeat)
            raise FloatingPointError(why)
        if rank.randomness.training:
            rank.randomness.call += 1
        self.loss, self.norm = pair[0], None
        return pair[0].to(self._loss_dtype)

    def _run_schedule(
        self, shape: Executor, inputs: Inputs, divisors: Tensor, gradients: bool
    ) -> tuple[Tensor, Callable[[], object]]:
        """Run the schedule once, on `inputs` by stage; return the result of `share_loss`, and a repetition of it.

        With `gradients` the sums have them; they do not have those of the repetition.
        """
        watch = self.weights.watch
        trained = watch.agree(self._connection) if gradients else watch.agreed
        sums, seeds = self.weights.sums, None
        shape.renew_leaves(watch.tensors, self.weights.narrow, trained, sums)
        if gradients:
            sums.start((p.grad for p in self.weights.leaves.values() if p.grad is not None), shape.measured)
            seeds = (1.0 if self.loss_scale is None else self.loss_scale.value) / divisors
        run = partial(shape.run, inputs, seeds, self.weights.await_stage)
        position = self._connection.position
        with self._connection.exchange():
            losses = run(sums)
            position.phase("loss")
            pair = share_loss(self._rank, losses, divisors)
            if gradients:
                position.phase("sum of gradients")
                sums.finish()
        return pair, run

    def read_measured(self, asked: str) -> tuple[Measured, Tensor]:
        """Return the times and the loss of the last call, which `asked` needs; RuntimeError where no step has run."""
        measured = self.shape.measured
        if self.loss is None or not measured.spans:
            raise RuntimeError(f"no step has run, or the last failed: call the parallel model before {asked}")
        return measured, self.loss
