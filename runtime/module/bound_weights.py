"""The parameters and buffers of a rank; optimizers step parameters whole, or in shards of the replicas (ZeRO-1)."""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from autoptd.runtime.comm.connection import Connection
from autoptd.runtime.comm.groups import Posted
from autoptd.runtime.engine.dynamo import leave_uncompiled
from autoptd.runtime.engine.executor import Executor
from autoptd.runtime.engine.step import Handover
from autoptd.runtime.guards.gradient_placeholders import GradientPlaceholders
from autoptd.runtime.guards.optimizer_watch import StateMarks
from autoptd.runtime.guards.parameter_watch import ParameterWatch, refuse_hooks
from autoptd.runtime.guards.step_agreement import compare_shards
from autoptd.runtime.optimizer.gradient_sums import GradientSums
from autoptd.runtime.optimizer.whole_parameters import WholeParameters
from autoptd.runtime.optimizer.zero1 import FlatShard, OptimizerT, fill_groups, lay_out_shards
from autoptd.runtime.weights.slices import Slices, check_proof, hash_parts, refresh_constants


class BoundWeights:
    """The parameters and buffers of a parallel model on this rank, and the shards that an optimizer steps, if any.

    `watch` knows the parameters as they were bound, `marks` their places in the model. `narrow` are the half-precision
    tensors that the stages compute with where parameters are kept in float32. `leaves` are what an optimizer may step:
    parameters by name, and this replica's parts of shards by position. Frozen ones too: a parameter that was frozen
    after its backward has a gradient, by which it is stepped. `sharded` are the parameters of each shard, `whole` those
    that optimizers step whole, `sums` the gradients on their way.
    """

    leaves: dict[str | int, nn.Parameter]

    def __init__(self, module: nn.Module, connection: Connection, shapes: Sequence[Executor], narrow: Slices) -> None:
        self.manifest = shapes[0].manifest
        self.connection = connection
        self.shapes = shapes
        self.marks = StateMarks(self.manifest, connection.rank)
        self.narrow = narrow
        self.whole = WholeParameters(self.manifest, connection, dict(nn.Module.named_parameters(module)))
        self._share_steps(module, ())
        self._buffers = self._read_buffers()
        self.parts = hash_parts(self.manifest, self.watch.buffers)

    def _share_steps(self, module: nn.Module, shards: Sequence[FlatShard]) -> None:
        """Let the optimizer step `shards` from now on, and no parameter of `module` that is in one."""
        self.shards = tuple(shards)
        sharded = {name for shard in shards for name in shard.names}
        self.whole.taken = {name: here for name, here in self.whole.taken.items() if name not in sharded}
        self.watch = ParameterWatch(self.manifest, module, sharded)
        self.marks.hold(self.watch.parameters, self.shards, self.whole.taken)
        self.narrow = {name: x for name, x in self.narrow.items() if name not in sharded}
        self._gathering: dict[FlatShard, Posted[Tensor]] = {}  # the new weights on their way
        # All shapes have one schedule.
        self.sums = GradientSums(self.manifest, self.connection, self.shapes[0].complete, self.shards)
        parameters = self.watch.parameters
        self._placeholders = [GradientPlaceholders(shard, parameters) for shard in shards]
        parts = {index: shard.own for index, shard in enumerate(shards)}
        self.sharded = {index: each.parameters for index, each in enumerate(self._placeholders)}
        self.leaves = {name: p for name, p in parameters.items() if name not in sharded} | parts
        self.watch.hooks = frozenset(chain.from_iterable(each.hooks for each in self._placeholders))
        self._versions = self._read_versions()
        self._handover_of: object = None

    def find_handover(self) -> Handover:
        """Return the way of gradients to what is trained now; another one where a parameter has changed."""
        if self._handover_of is not self.watch.tensors:
            self._handover_of = self.watch.tensors
            leaves = {key: leaf for key, leaf in self.leaves.items() if leaf.requires_grad}
            self._handover = Handover(leaves, self.connection.rank.device)
        return self._handover

    def shard(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Divide the states and the step of `optimizer`, of parameters of `module`, among the replicas."""
        if self.shards:
            raise ValueError(
                "an optimizer of this parallel model is sharded already, and it can have only one: go on with it "
                "(optimizer.state.clear() forgets its states), or bind again"
            )
        self.watch.check(module)
        parameters, rows = self.watch.parameters, list(self.shapes[0].complete.values())
        known, group = self.manifest.parameters, self.connection.rank.group
        dtypes = {name: known[name].dtype for name in parameters}
        replicas = {name: group(known[name].placement.replicas) for name in parameters}
        trained = {p for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
        for name in (name for row in rows for name in row if parameters.get(name) in trained):
            refuse_hooks(name, parameters[name])
        self.marks.check(optimizer)  # states loaded for these parameters, which get other places
        kinds = {name: (dtypes[name], replicas[name]) for name in parameters}
        buckets = fill_groups(optimizer, parameters, kinds, rows)
        with self.connection.position.during("comparison of shards"):
            compare_shards(self.manifest, self.connection, rows, list(chain.from_iterable(buckets)))
        shards = lay_out_shards(optimizer, parameters, dtypes, buckets, replicas)
        self._share_steps(module, shards)
        self.marks.mark(optimizer)
        optimizer.register_step_pre_hook(self._prepare_step)
        optimizer.register_step_post_hook(self._post_gathers)

    def make_whole(self, make: Callable[..., OptimizerT], *args: Any, **options: Any) -> OptimizerT:
        """Return the optimizer that `make` makes, whose steps are of whole parameters."""
        with self.connection.position.during("whole parameters"):
            self.whole.open(name for name in self.leaves if isinstance(name, str))
            try:
                optimizer = make(*args, **options)
            finally:
                self.whole.close()
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError(
                "LBFGS looks for a direction of all parameters together, of which a rank has some: use an optimizer "
                "that steps each by itself"
            )
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for name, p in chain.from_iterable(own.items() for own in self.sharded.values()):
            if id(p) in held:
                raise ValueError(f"{name} is stepped by the sharded optimizer: leave it out of this one")
        self.whole.take(optimizer)
        self.marks.hold(self.watch.parameters, self.shards, self.whole.taken)
        self.marks.mark(optimizer)
        optimizer.register_step_pre_hook(self._begin_step)
        optimizer.register_step_post_hook(self._end_step)
        return optimizer

    def taken_by(self, optimizer: torch.optim.Optimizer) -> dict[str, bool]:
        """Return the parameters that an optimizer, or the one that it wraps, steps whole, by name: whether here."""
        hooks = getattr(getattr(optimizer, "optimizer", optimizer), "_optimizer_step_pre_hooks", {})
        return self.whole.taken if self._begin_step in hooks.values() else {}

    @leave_uncompiled
    def _begin_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """Call the closure of a step of whole parameters, if any, which needs the slices; then put them together."""
        if not self.marks.whole_steps:
            self.marks.check(optimizer)
            closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
            if callable(closure):
                with torch.enable_grad():
                    loss = closure()
                args, kwargs = (optimizer, *args[2:]), {**kwargs, "closure": self.whole.give_once(loss)}
            with self.connection.position.during("whole parameters"):
                self.whole.begin(optimizer)
        self.marks.whole_steps += 1
        return args, kwargs

    @leave_uncompiled
    def _end_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self.marks.whole_steps == 1:
            with self.connection.position.during("whole parameters"):
                self.whole.end(optimizer)
        self.marks.whole_steps -= 1

    def check(self, module: nn.Module) -> None:
        """Take over what was written since; ValueError where a call of `module` would not use its own tensors."""
        self._check_unwritten()
        if self.marks.whole_steps:
            raise ValueError(
                "an optimizer's step of whole parameters broke off, and left them whole: bind again from a checkpoint"
            )
        for shard in self.shards:
            if shard.is_own_written():
                raise ValueError(
                    f"the sharded optimizer's part of {shard.names[0]}, or of a parameter stepped with it, was written "
                    "outside of its step, where no stage sees it: write parallel.parameters() instead"
                )
        if self._find_rebound():
            self.adopt_writes()
        self.watch.check(module)
        if self._buffers != self._read_buffers():
            self._take_buffers()

    def adopt_writes(self) -> None:
        """Let a sharded optimizer step from the values written into parameters since, or given to them as ``p.data``.

        Raises ValueError as a call does where the memory given has another shape, dtype or device.
        """
        self.await_gathers()
        parameters, versions = self.watch.parameters, self._read_versions()
        if rebound := self._find_rebound():
            self.watch.check_bound(parameters)
            # Copies, all before the first write: two parameters may have been given each other's memory.
            values = [{name: parameters[name].detach().clone() for name in names} for names in rebound.values()]
            for shard, own in zip(rebound, values, strict=True):
                shard.bind_again(parameters, own)
        # Values show writes that versions do not count.
        written = [shard.is_written() for shard in self.shards]
        if rebound or versions != self._versions or (written and torch.stack(written).any()):
            self._versions = versions
            for shard in self.shards:
                shard.adopt()

    @leave_uncompiled
    def await_gathers(self) -> None:
        """Wait for all new weights on their way."""
        self._check_unwritten()
        for posted in self._gathering.values():
            posted.wait()
        self._gathering = {}

    def await_stage(self, stage: int) -> None:
        """Wait for the new weights of `stage`."""
        own = self.manifest.stages[stage].parameters
        for shard in [shard for shard in self._gathering if not set(own).isdisjoint(shard.names)]:
            self._gathering.pop(shard).wait()

    @leave_uncompiled
    def _prepare_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Hand changes of the model's parameters to a sharded `optimizer` that is about to step."""
        self.marks.check(optimizer)
        for placeholders in self._placeholders:
            placeholders.settle()
        self.adopt_writes()

    @leave_uncompiled
    def _post_gathers(self, *_: Any) -> None:
        """Begin to share the weights that the optimizer has stepped, in the order in which stages need them."""
        self.await_gathers()
        self._gathering = {shard: shard.post_gather() for shard in self.shards}

    def _read_versions(self) -> list[int]:
        """Count the writes into parameters that a sharded optimizer steps; new weights that arrive do not count."""
        return [self.watch.parameters[name]._version for shard in self.shards for name in shard.names]

    def _check_unwritten(self) -> None:
        """Raise ValueError where a parameter was written while its new values were on their way, which it now gets."""
        if self._gathering and self._read_versions() != self._versions:
            self._versions = self._read_versions()
            raise ValueError(
                "a parameter was written right after a sharded optimizer's step, before the other replicas' new "
                "weights arrived, which overwrite it: take it again from parallel.parameters(), which waits for them"
            )

    def _find_rebound(self) -> dict[FlatShard, list[str]]:
        """Return the names of sharded parameters with memory that their optimizer does not send new weights to."""
        return {shard: names for shard in self.shards if (names := shard.rebound(self.watch.parameters))}

    def _take_buffers(self) -> None:
        """Compute constants anew from buffers that were written or replaced. ValueError where they are compiled in."""
        own = self.watch.buffers
        for alias, name in self.manifest.aliases.items():
            if own.get(alias) is not own.get(name):
                raise ValueError(
                    f"the buffer {alias} was replaced after bind, and is one with {name}: write its values "
                    "(buffer.copy_), or replace both by one tensor"
                )
        check_proof(self.manifest, own, self.parts)
        self.refresh_constants()
        self._buffers = self._read_buffers()

    def refresh_constants(self) -> None:
        """Compute the constants of all shapes from the buffers as they are. A collective of the tensor ranks."""
        for shape in self.shapes:
            known = {**self.watch.tensors, **shape.slices}
            refresh_constants(shape.manifest, self.connection.rank, shape.constants, known)

    def _read_buffers(self) -> list[tuple[int, int, int]]:
        """Return the identities of the buffers, where they are, and the counts of the writes into them."""
        return [(id(b), b.data_ptr(), 0 if b.is_inference() else b._version) for b in self.watch.buffers.values()]
