"""The distributed optimizer (ZeRO-1): each replica steps its part of the parameters, and all share the result."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn, optim
from torch.utils.dlpack import from_dlpack

from autoptd.runtime.comm.groups import Group, Posted
from autoptd.runtime.optimizer.gradient_buckets import fill_buckets

OptimizerT = TypeVar("OptimizerT", bound=optim.Optimizer)
Parameters = Mapping[str, nn.Parameter]  # of a model, by name
Dtypes = Mapping[str, torch.dtype]
Buckets = list[list[list[str]]]  # names of parameters, in buckets, of each group

# Their step changes an element by that element's gradient and state alone, so that a part may be stepped by itself.
ELEMENTWISE = (
    *(optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam, optim.Adagrad, optim.Adadelta),
    *(optim.RMSprop, optim.Rprop, optim.SGD, optim.ASGD),
)
KNOWN = ", ".join(kind.__name__ for kind in ELEMENTWISE)
# Of their states those that are one number for all elements that are stepped together.
SINGLE = ("step", "mu_product", "eta", "mu")


class FlatShard:
    """This replica's part of some parameters in a row: `own` [n] of `flat` [size · n], for `size` replicas.

    `flat` has the parameters' elements in the order of `names`, then zeros; the parameters are views of it. `own` is
    what the optimizer steps, in float32 where `flat` is in half precision.
    """

    def __init__(self, weights: Mapping[str, Tensor], dtype: torch.dtype, group: Group) -> None:
        """Lay out `weights`, as the optimizer has them, for stages that compute in `dtype`."""
        self.names = tuple(weights)
        self.shapes = [weight.shape for weight in weights.values()]
        self._group = group
        self._used = sum(shape.numel() for shape in self.shapes)
        rows = [weight.detach().reshape(-1) for weight in weights.values()]
        wide = torch.cat([*rows, rows[0].new_zeros(-self._used % group.size)])
        self.flat = wide.to(dtype)
        self._views = self._view()
        self.own = nn.Parameter(self.part(wide).clone())
        self._version = self.own._version

    def part(self, flat: Tensor) -> Tensor:
        """Return a view of this replica's elements of a `flat` row."""
        return flat.view(self._group.size, len(flat) // self._group.size)[self._group.index]

    def _view(self) -> dict[str, Tensor]:
        """Return the parts of `flat`, each its own storage: a file gets a common one once, as that of tied weights."""
        rows = self.flat[: self._used].split([shape.numel() for shape in self.shapes])
        views = {name: row.view(shape) for name, row, shape in zip(self.names, rows, self.shapes, strict=True)}
        self._addresses = {name: view.data_ptr() for name, view in views.items()}
        return {name: from_dlpack(view) for name, view in views.items()}

    def rebound(self, parameters: Mapping[str, Tensor]) -> list[str]:
        """Return the names of its `parameters` that are no views of `flat` any more, as after ``p.data = ...``.

        Also of those whose storage has moved, with all that shares it: torch.multiprocessing moves it to shared memory.
        """
        moved = {name for name, view in self._views.items() if view.data_ptr() != self._addresses[name]}
        return [name for name, view in self._views.items() if name in moved or not parameters[name].is_set_to(view)]

    def bind(self, parameters: Mapping[str, Tensor]) -> None:
        """Make its `parameters` views of `flat`, whatever they were."""
        for name, view in self._views.items():
            parameters[name].data = view

    def bind_again(self, parameters: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
        """Make its `parameters` views of new memory, some with new `values`, which `own` has after `adopt`.

        The old memory is left to those who kept views of it: a parameter that is bound to again later may be one.
        """
        self.flat = self.flat.clone()
        self._views = self._view()
        for name, value in values.items():
            self._views[name].copy_(value)
        self.bind(parameters)

    def is_own_written(self) -> bool:
        """Return whether somebody has written into `own` since it was shared, or taken over."""
        return self.own._version != self._version

    def is_written(self) -> Tensor:
        """Return whether the parameters differ from the narrowed `own`, as after ``p.data.mul_(...)``: a bool.

        No version counts that. Not asked of an `own` that was written itself.
        """
        part, own = self.part(self.flat), self.own.detach()
        return (own.to(part.dtype) != part).any() & (not self.is_own_written())

    def fill(self, row: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        """Fill a `row` like `own` from the parameters' `tensors`, whole ones or this replica's elements of them."""
        for name, (inside, part) in self.ranges().items():
            elements = tensors[name].reshape(-1)
            row[inside] = elements if len(elements) == part.stop - part.start else elements[part]
        return row

    def restore(self, tensors: Mapping[str, Tensor]) -> Posted[Tensor]:
        """Let `own` be these `tensors`, as in `fill`, and begin to share them: a collective of the data group."""
        with torch.no_grad():
            self.fill(self.own, tensors)
        return self.post_gather()

    def adopt(self) -> None:
        """Take the parameters' values into `own` where they differ from the narrowed `own`, as they were written then.

        ValueError where `own` was written too, so that nobody knows which counts.
        """
        if self.is_own_written():
            raise ValueError(
                f"{self.names[0]}, or one stepped with it, was written in the model and in the optimizer's parameter "
                "groups: write only one of them, parallel.parameters()"
            )
        part = self.part(self.flat)
        with torch.no_grad():
            written = self.own.to(part.dtype) != part
            self.own.copy_(torch.where(written, part.to(self.own.dtype), self.own))
        self._version = self.own._version

    def ranges(self) -> dict[str, tuple[slice, slice]]:
        """Return the places of each parameter in `own`, and its elements there (row-major), where it has any."""
        found = {}
        first = self._group.index * self.own.numel()
        begin = 0
        for name, shape in zip(self.names, self.shapes, strict=True):
            low, high = max(first, begin), min(first + self.own.numel(), begin + shape.numel())
            if low < high:
                found[name] = slice(low - first, high - first), slice(low - begin, high - begin)
            begin += shape.numel()
        return found

    def post_gather(self) -> Posted[Tensor]:
        """Begin to bring every replica's part, as it has been stepped, into the parameters."""
        self._version = self.own._version
        return self._group.post_all_gather(self.own.detach().to(self.flat.dtype), self.flat)

    def split_own(self, row: Tensor) -> dict[str, Tensor]:
        """Return views of each parameter's elements in a `row` like `own`; there may be none."""
        held = self.ranges()
        return {name: row[held[name][0]] if name in held else row[:0] for name in self.names}


def join_states(shard: FlatShard, states: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Join the states of a shard's parameters, as in `fill`, to those of its own part; ValueError if steps differ."""
    # A tensor without elements needs no state; states of one without dimensions look like single values.
    sizes = {name: len(shape) for shape, name in zip(shard.shapes, shard.names, strict=True) if shape.numel()}
    states = {name: state for name, state in states.items() if name in sizes}
    if not states:
        return {}
    if len(states) < len(sizes):
        missing = next(name for name in sizes if name not in states)
        raise ValueError(f"{missing} has no optimizer state, but {next(iter(states))} has: step both or none")
    joined = {}
    largest = max(sizes, key=lambda name: sizes[name])
    for key, first in states[largest].items():
        values = {name: state[key] for name, state in states.items()}
        if is_shaped(first) or (sizes[largest] == 0 and isinstance(first, Tensor) and key not in SINGLE):
            joined[key] = shard.fill(first.new_zeros(shard.own.shape), values)
            continue
        if any(not torch.equal(torch.as_tensor(v), torch.as_tensor(first)) for v in values.values()):
            raise ValueError(
                f"the optimizer's {key} differs among {', '.join(shard.names[:5])}, which one shard has in common: "
                "shard it before the first step"
            )
        joined[key] = first
    return joined


def split_states(shard: FlatShard, state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Split the states of a shard's own part into those of each of its parameters, in a row."""
    rows = {key: shard.split_own(x) if is_shaped(x) else dict.fromkeys(shard.names, x) for key, x in state.items()}
    return {name: {key: own[name] for key, own in rows.items()} for name in shard.names}


def is_shaped(value: Any) -> bool:
    """Return whether a state has an entry for each element that is stepped, and is no single value."""
    return isinstance(value, Tensor) and value.dim() > 0


def fill_groups(
    optimizer: optim.Optimizer, parameters: Parameters, kinds: Mapping[str, object], rows: Sequence[Sequence[str]]
) -> Buckets:
    """Return the trained `parameters` of each group of `optimizer` in buckets, one for each shard.

    A bucket's parameters are of one of the `rows`, whose gradients are whole together, and of one of `kinds`: those
    that the same ranks step, in one dtype. ValueError where the step of `optimizer` may not be divided anywhere, and
    for parameters that are not among the model's `parameters`.
    """
    kind = type(optimizer)
    if kind not in ELEMENTWISE:
        raise ValueError(
            f"{kind.__name__} is not known to step each element by itself, so that its states cannot be divided among "
            f"the replicas: use one of {KNOWN}, or let it step whole parameters "
            f"(parallel.whole_optimizer({kind.__name__}, parameters, ...))"
        )
    names = {parameter: name for name, parameter in parameters.items()}
    groups: Buckets = []
    for number, settings in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(settings["params"]):
            if parameter not in names:
                raise ValueError(
                    f"parameter {position} of the optimizer's group {number}, {list(parameter.shape)}, is not one of "
                    "this parallel model's: make the optimizer from parallel.parameters(), and shard it once"
                )
        own = {names[p] for p in settings["params"] if p.requires_grad}
        trained = ({name: parameters[name] for name in row if name in own} for row in rows)
        groups.append([bucket for row in trained for bucket in fill_buckets(row, kinds)])
    return groups


def lay_out_shards(
    optimizer: optim.Optimizer, parameters: Parameters, dtypes: Dtypes, buckets: Buckets, replicas: Mapping[str, Group]
) -> list[FlatShard]:
    """Make shards of the `buckets` of each group of `optimizer`, which steps these from now on, with their states.

    Those who hold a parameter together, its `replicas`, divide the shard among themselves.

    ValueError, with nothing changed, for states that cannot be joined.
    """

    def make(bucket: Sequence[str]) -> tuple[FlatShard, dict[str, Any]]:
        shard = FlatShard({name: parameters[name] for name in bucket}, dtypes[bucket[0]], replicas[bucket[0]])
        states = {name: state for name in bucket if (state := optimizer.state.get(parameters[name]))}
        return shard, join_states(shard, states)

    layout = [[make(bucket) for bucket in own] for own in buckets]
    for settings, made in zip(optimizer.param_groups, layout, strict=True):
        sharded = {parameters[name] for shard, _ in made for name in shard.names}
        # Parameters that are frozen, or used by no stage, never have a gradient, and are not stepped.
        settings["params"] = [p for p in settings["params"] if p not in sharded]
        for parameter in sharded:
            optimizer.state.pop(parameter, None)
        for shard, state in made:
            shard.bind(parameters)
            if state:
                optimizer.state[shard.own] = state
            settings["params"].append(shard.own)
    return [shard for made in layout for shard, _ in made]
