"""Refuse optimizers of the model that was compiled, and those that may step slices otherwise than whole tensors.

An optimizer's ``state_dict`` gets marks of the slices that it belongs to: torch would load it by position alone.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from autoptd.runtime.comm.rank import Rank
from autoptd.runtime.engine.dynamo import leave_uncompiled
from autoptd.runtime.guards.weight_agreement import StepLog
from autoptd.runtime.optimizer.zero1 import ELEMENTWISE, KNOWN, FlatShard
from autoptd.runtime.program.manifest import Manifest
from autoptd.runtime.program.placement import Parameter

MARK = "autoptd_slices"  # of a group in a state_dict: for each of its parameters, what that has of the model
SHOWN = 3  # parameters
# Options that do not say what a step does, but how.
IMPLEMENTATIONS = frozenset(["foreach", "fused", "capturable", "differentiable"])


class StepHooks:
    """Hooks on every optimizer's step in this process, each for as long as its parallel model lives.

    torch goes through its own hooks while they run, and ends the step in a RuntimeError if one is removed meanwhile;
    the collector may free a parallel model at any time. So torch has one hook for good, which goes through a copy.
    """

    def __init__(self, register: Callable[[Any], Any]) -> None:
        self._hooks: dict[object, Callable[[Optimizer, Any, Any], None]] = {}
        register(self._call)

    def add(self, parallel: nn.Module, hook: Callable[[Optimizer, Any, Any], None]) -> None:
        """Call `hook` from now on; it keeps no reference to `parallel`."""
        key = object()
        self._hooks[key] = hook
        weakref.finalize(parallel, self._hooks.pop, key)

    @leave_uncompiled
    def _call(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for hook in list(self._hooks.values()):
            hook(optimizer, args, kwargs)


BEFORE = StepHooks(register_optimizer_step_pre_hook)
AFTER = StepHooks(register_optimizer_step_post_hook)


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
        self.marked: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self.whole_steps = 0  # that run now, one inside of the other

    def hold(self, parameters: Mapping[str, Tensor], shards: Sequence[FlatShard], whole: Mapping[str, bool]) -> None:
        """Take `parameters` and `shards` as the tensors that optimizers step; they live until the next call.

        Of those in `whole` this rank steps all, or nothing.
        """
        slices = self._slices | {n: f"{'all' if here else 'nothing'} of {n}" for n, here in whole.items()}
        self._held = {id(p): ((name,), [slices[name]]) for name, p in parameters.items()}
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
        """Mark the ``state_dict`` of an `optimizer`, which may step the parameters, from now on."""
        # A wrapper of an optimizer may lack torch's own hooks: the optimizer inside marks its states.
        if optimizer not in self.marked and hasattr(optimizer, "_optimizer_state_dict_post_hooks"):
            optimizer.register_state_dict_post_hook(self._write)
        self.marked.add(optimizer)

    def check(self, optimizer: Optimizer) -> None:
        """Raise ValueError where a state was loaded into `optimizer` whose marks are of other slices.

        Marks are read once: what a group gets later has no place in the state. Another model's stay, for it to read.
        """
        for number, group in enumerate(optimizer.param_groups):
            loaded = list(zip(group["params"], group.get(MARK, ()), strict=False))
            for position, (tensor, found) in enumerate(loaded):
                own = self.find(tensor)
                if found is not None and own is not None and found != own:
                    raise ValueError(self._describe_other(number, position, found, own))
            group.pop(MARK, None)
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


def refuse_forgotten(parallel: nn.Module, plain: Iterable[tuple[str, Tensor]]) -> None:
    """Refuse from now on the step of an optimizer that has parameters of the `plain` model instead of `parallel`'s.

    The step raises ValueError where none of these has a gradient, and it would change nothing, while `parallel` has
    some. So whoever trains the plain model too, whose backward gives it gradients, is not disturbed.
    """
    known = {id(parameter): (name, weakref.ref(parameter)) for name, parameter in plain}
    own = weakref.ref(parallel)

    def check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        held = [p for group in optimizer.param_groups for p in group["params"]]
        # An id may have passed on to another tensor.
        found = [known[id(p)][0] for p in held if id(p) in known and known[id(p)][1]() is p]
        module = own()
        if not found or module is None or any(p.grad is not None for p in held):
            return
        if any(p.grad is not None for p in module.parameters()):
            listed = ", ".join(found[:SHOWN]) + ", ..." * (len(found) > SHOWN)
            kind = type(optimizer).__name__
            raise ValueError(
                f"the optimizer has {len(found)} parameters of the model that was compiled ({listed}); the parallel "
                "model has copies of its own, so this would train nothing. Make it after bind, from these: "
                f"optimizer = {kind}(parallel.parameters(), ...)"
            )

    BEFORE.add(parallel, check)


def watch_steps(parallel: nn.Module, marks: StateMarks, steps: StepLog) -> None:
    """Note in `steps` from now on which parameters of `parallel` an optimizer steps by gradients, and its options."""

    def note(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Note a step that was made: one that broke off may be tried again; one inside of another is of that."""
        options = [key for key in optimizer.defaults if key not in IMPLEMENTATIONS]
        for group in optimizer.param_groups:
            names = [name for p in group["params"] if p.grad is not None for name in marks.names(p)]
            if names and not marks.whole_steps:
                steps.add(names, {key: group[key] for key in options if key in group})

    AFTER.add(parallel, note)


def watch_divided(parallel: nn.Module, marks: StateMarks) -> None:
    """Judge each optimizer from now on that steps parameters of `parallel`, which are slices of the model's.

    The step raises ValueError for one that is not known to step each element by itself, and is not made to step whole
    parameters, and where a state was loaded whose `marks` are of other slices.
    """

    def check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # Of every optimizer in the process: this neither looks through modules nor waits for weights on their way.
        if not any(marks.names(p) for group in optimizer.param_groups for p in group["params"]):
            return
        marks.check(optimizer)
        if not marks.whole_steps and optimizer not in marks.marked and type(optimizer) not in ELEMENTWISE:
            kind = type(optimizer).__name__
            raise ValueError(
                f"{kind} is not known to step each element by itself, as {KNOWN} do, and on this mesh a "
                "rank has slices of parameters: computations over a whole one would train otherwise than on one "
                f"device. Let it have them whole: optimizer = parallel.whole_optimizer({kind}, parameters, ...)"
            )
        marks.mark(optimizer)

    BEFORE.add(parallel, check)


def _describe(parameter: Parameter, rank: Rank) -> str:
    on_axis, at = rank.holds(parameter.placement)
    local = f"{parameter.name}{list(parameter.local_shape(rank.mesh.sizes))}"
    if on_axis.dim is None or at.size == 1:
        return local
    rows = ", ".join(f"{first}:{end}" for first, end in on_axis.runs(at.size, at.index))
    return f"{local} ({rows} of dimension {on_axis.dim})"
