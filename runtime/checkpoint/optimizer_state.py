"""An optimizer of this rank, with its states and hyperparameters by the names of the model's parameters."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from autoptd.runtime.checkpoint.error import CheckpointError
from autoptd.runtime.checkpoint.record import StoredGroup, StoredOptimizer
from autoptd.runtime.guards.optimizer_watch import MARK
from autoptd.runtime.optimizer.zero1 import FlatShard, is_shaped, join_states, split_states
from autoptd.runtime.program.tagged_json import encode_value

States = dict[str, dict[str, Any]]  # by the parameter's name, then the state's
_Stepped = tuple[tuple[str, ...], Tensor, FlatShard | None]  # one parameter, or a shard of several, by names
_OWN_KEYS = ("params", "param_names", MARK)  # keys of a group that differ between ranks


@dataclass(frozen=True)
class NamedOptimizer:
    """An `optimizer` of tensors that have `names`, and of the `shards` that stand for several of them.

    Of parameters in `whole` one rank steps all; the value says whether this one does.
    Its methods raise CheckpointError for a parameter that has no name.
    """

    optimizer: torch.optim.Optimizer
    names: Mapping[str, Tensor]
    shards: Sequence[FlatShard] = ()
    whole: Mapping[str, bool] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """The optimizer's kind, which must be equal where its states are saved and loaded."""
        return type(self.optimizer).__name__

    def groups(self) -> tuple[StoredGroup, ...]:
        """Return the parameter groups. TypeError for hyperparameters that JSON cannot hold."""
        groups = []
        for group in self.optimizer.param_groups:
            names = (name for own, *_ in self._list_stepped(group["params"]) for name in own)
            options = {key: value for key, value in group.items() if key not in _OWN_KEYS}
            groups.append(StoredGroup(tuple(names), encode_value(options, "a group of the optimizer")))
        return tuple(groups)

    def states(self) -> States:
        """Return the optimizer's states of each parameter.

        A state is a tensor shaped as this rank's slice, or a single value; CheckpointError for others. For parameters
        that shards divide it is a row of this replica's elements; of one stepped whole any tensor, where it is stepped.
        """
        states: States = {}
        for names, tensor, shard in self._list_stepped(self._parameters()):
            own = self.optimizer.state.get(tensor, {})
            if (here := self.whole.get(names[0])) is False:
                continue
            if here is None:
                self._check_shapes(names, tensor.shape, own)
            states |= {names[0]: dict(own)} if shard is None else split_states(shard, own)
        return states

    def describe(self, states: States) -> StoredOptimizer:
        """Return everything but the tensors of `states`. TypeError for values that JSON cannot hold."""
        values: dict[str, dict[str, Any]] = {name: {} for name in states}
        for name, of in states.items():
            for state, value in of.items():
                if not is_shaped(value):
                    values[name][state] = encode_value(value, f"the optimizer's state {state!r} of {name}")
        return StoredOptimizer(self.kind, self.groups(), values)

    def join(self, states: States) -> dict[Tensor, dict[str, Any]]:
        """Take the states of all stepped tensors out of `states`. ValueError if those within one shard disagree."""
        joined = {}
        for names, tensor, shard in self._list_stepped(self._parameters()):
            own = {name: states.pop(name, {}) for name in names}
            held = {name: state for name, state in own.items() if state}
            joined[tensor] = own[names[0]] if shard is None else join_states(shard, held)
        return joined

    def put(self, states: Mapping[Tensor, Mapping[str, Any]], options: Sequence[Mapping[str, Any]]) -> None:
        """Replace the states, whose tensors go to the device where the optimizer keeps them, and the hyperparameters.

        One that an older torch did not save keeps its value.
        """
        for group, values in zip(self.optimizer.param_groups, options, strict=True):
            on_device = group.get("capturable") or group.get("fused")
            for tensor in group["params"]:
                self.optimizer.state.pop(tensor, None)
                if states[tensor]:
                    self.optimizer.state[tensor] = {
                        # A step count stays on the CPU, where reading it does not wait for the device.
                        key: value.to("cpu" if key == "step" and not on_device else tensor.device)
                        if isinstance(value, Tensor)
                        else value
                        for key, value in states[tensor].items()
                    }
            group.pop(MARK, None)  # it marks states that are gone now
            for key, value in values.items():
                own = group.get(key)
                if isinstance(own, Tensor) and isinstance(value, Tensor):
                    value = value.to(own.device)
                group[key] = value

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def _list_stepped(self, parameters: Iterable[Tensor]) -> Iterator[_Stepped]:
        known: dict[int, _Stepped] = {id(x): ((name,), x, None) for name, x in self.names.items()}
        known |= {id(shard.own): (shard.names, shard.own, shard) for shard in self.shards}
        for parameter in parameters:
            if id(parameter) not in known:
                raise CheckpointError(
                    f"the optimizer holds a parameter of shape {list(parameter.shape)} that is not of this model: make "
                    "the optimizer of parallel.parameters()"
                )
            yield known[id(parameter)]

    def _check_shapes(self, names: Sequence[str], shape: torch.Size, state: Mapping[str, Any]) -> None:
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dim() and value.shape != shape:
                raise CheckpointError(
                    f"the optimizer's state {key!r} of {', '.join(names[:3])} has shape {list(value.shape)}, "
                    f"and the parameter {list(shape)}: checkpoints move between meshes, so they hold "
                    "only states that are divided as their parameters are, unless these are stepped whole: make the "
                    f"optimizer by parallel.whole_optimizer({self.kind}, ...), or leave optimizer= out"
                )
