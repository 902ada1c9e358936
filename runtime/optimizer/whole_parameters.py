"""Whole parameters for optimizers that look at more than an element: each is put together on a rank that steps it."""

from collections.abc import Callable, Iterable, Mapping
from itertools import product
from math import prod

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autoptd.runtime.comm.connection import Connection
from autoptd.runtime.comm.groups import Group
from autoptd.runtime.program.manifest import Manifest


class WholeParameters:
    """The `parameters` of this rank, by name, each of which an optimizer steps whole on one rank of those that hold it.

    The largest first, on the tensor rank and replica that has least so far; of pipeline ranks that tie a parameter, on
    the first. `taken` are those that such optimizers have: by name, whether this rank steps them.
    """

    def __init__(self, manifest: Manifest, connection: Connection, parameters: Mapping[str, nn.Parameter]) -> None:
        self._known, self._parameters = manifest.parameters, parameters
        self._tensor, self._data = map(connection.rank.group, ("tensor", "data"))
        self._here = self._data.index, self._tensor.index
        self._steppers: dict[str, tuple[int, int]] = {}  # of those that this pipeline rank steps
        self._tied: dict[str, Group] = {}
        loads = dict.fromkeys(product(range(self._data.size), range(self._tensor.size)), 0)
        for name in sorted(parameters, key=lambda name: prod(self._known[name].shape), reverse=True):
            homes = manifest.homes(name)
            if len(homes) > 1:
                self._tied[name] = connection.tied[homes]
            if homes[0] == connection.rank.coordinates.pipeline:
                self._steppers[name] = place = min(loads, key=loads.__getitem__)
                loads[place] += prod(self._known[name].shape) * self._known[name].is_trained
        self.taken: dict[str, bool] = {}
        self._memory: dict[str, Tensor] = {}  # lasts, since optimizers may keep views of parameters
        self._kept: dict[str, tuple[Tensor, Tensor | None]] = {}
        self._groups: list[list[nn.Parameter]] = []

    def take(self, optimizer: Optimizer) -> list[str]:
        """Let `optimizer` have the states of what this rank steps alone; return all that it may step, in our order."""
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        known = self._parameters.items()
        names = [name for name, p in known if id(p) in held and (p.requires_grad or p.grad is not None)]
        for name in names:
            self.taken[name] = self._steppers.get(name) == self._here
            if not self.taken[name]:
                optimizer.state.pop(self._parameters[name], None)
        return names

    def give_once(self, loss: Tensor) -> Callable[[], Tensor]:
        """Return a closure that gives `loss`; it raises ValueError where parameters have changed since."""
        versions = [p._version for p in self._parameters.values()]

        def closure() -> Tensor:
            if versions != [p._version for p in self._parameters.values()]:
                raise ValueError(
                    "the optimizer evaluates its closure at weights that it has changed, and a model cannot be called "
                    "while its parameters are whole: compute all gradients before the step"
                )
            return loss

        return closure

    def begin(self, optimizer: Optimizer) -> None:
        """Make the parameters whole that `optimizer` is about to step, and leave it those that this rank steps."""
        self.open(self.take(optimizer))
        others = {id(self._parameters[name]) for name in self._kept if not self.taken[name]}
        self._groups = [group["params"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if id(p) not in others]

    def end(self, optimizer: Optimizer) -> None:
        """Send what `optimizer` has stepped to all ranks that hold rows of it."""
        for group, parameters in zip(optimizer.param_groups, self._groups, strict=True):
            group["params"] = parameters
        for name, whole in self.close().items():
            own, on_tensor = self._parameters[name].detach(), self._known[name].placement["tensor"]
            if name in self._steppers:
                replica, index = self._steppers[name]
                if replica == self._data.index:
                    whole = self._tensor.broadcast(whole.contiguous(), index)
                    own = on_tensor.take(whole, self._tensor.size, self._tensor.index)
                own = self._data.broadcast(own, replica)
            if name in self._tied:
                own = self._tied[name].broadcast(own, 0)
            with torch.no_grad():
                self._parameters[name].copy_(own)

    def open(self, names: Iterable[str]) -> None:
        """Make `names` whole, with gradients, where this rank steps them; elsewhere they have the whole shape alone."""
        for name in names:
            if "expert" in self._known[name].placement:
                way = "let another optimizer step it, or compile without expert="
                raise ValueError(f"{name} has experts on other data ranks, and is whole on none: {way}")
            p, on_tensor = self._parameters[name], self._known[name].placement["tensor"]
            divided = on_tensor.dim is not None and self._tensor.size > 1
            self._kept[name] = slices = p.data, p.grad
            p.grad, p.data = None, p.new_zeros(()).expand(self._known[name].shape)
            if name in self._steppers and self._steppers[name][0] == self._data.index:
                own = (x for x in slices if x is not None)
                whole, *gradient = (on_tensor.join(self._tensor.all_gather(x)) if divided else x for x in own)
                if self._steppers[name] == self._here:
                    p.data = self._memory.setdefault(name, whole).copy_(whole)
                    p.grad = gradient[0] if gradient else None

    def close(self) -> dict[str, Tensor]:
        """Put the slices, and their gradients, in the place of what `open` made; return that."""
        wholes = {name: self._parameters[name].data for name in self._kept}
        for name, (data, gradient) in self._kept.items():
            p = self._parameters[name]
            p.grad, p.data = None, data
            p.grad = gradient
        self._kept = {}
        return wholes
