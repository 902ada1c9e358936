"""The states and hyperparameters of an optimizer, by the names of its parameters on this rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autoptd.runtime.checkpoint.error import CheckpointError
from autoptd.runtime.guards.state_marks import MARK
from autoptd.runtime.optimizer.zero1 import FlatShard, join_states, split_states

States = dict[str, dict[str, Any]]
_OWN_KEYS = ("params", "param_names", MARK)  # keys of a group that differ between ranks


@dataclass(frozen=True)
class Group:
    """The hyperparameters of an optimizer's group, and the names of its parameters."""

    options: dict[str, Any]
    params: tuple[str, ...]


def take_states(
    names: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, shards: Sequence[FlatShard] = ()
) -> States:
    """Return the states that `optimizer` keeps of each parameter in `names`, by the parameter's name, then the state's.

    A state is a tensor shaped as this rank's slice of the parameter, or a single value; CheckpointError for others. For
    parameters that `shards` divide it is a row of this replica's elements.
    """
    states: States = {}
    for group in optimizer.param_groups:
        for stepped in _list_stepped(names, group, shards):
            state = optimizer.state.get(stepped.tensor, {})
            _check_shapes(stepped, state, optimizer)
            if stepped.shard is None:
                states[stepped.names[0]] = dict(state)
            else:
                states |= split_states(stepped.shard, state)
    return states


def join_shards(shards: Sequence[FlatShard], states: States) -> dict[FlatShard, dict[str, Any]]:
    """Take the states of the `shards` out of `states`. ValueError if the states within one shard disagree."""
    parts = {}
    for shard in shards:
        own = {name: states.pop(name, {}) for name in shard.names}
        parts[shard] = join_states(shard, {name: state for name, state in own.items() if state})
    return parts


def put_states(
    names: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
    states: States,
    parts: Mapping[FlatShard, Mapping[str, Any]] | None = None,
) -> None:
    """Replace the states of `optimizer`, those of shards by `parts`; tensors go to the device where it keeps them."""
    parts = parts or {}
    for group in optimizer.param_groups:
        on_device = group.get("capturable") or group.get("fused")
        for stepped in _list_stepped(names, group, tuple(parts)):
            own = states[stepped.names[0]] if stepped.shard is None else parts[stepped.shard]
            optimizer.state.pop(stepped.tensor, None)
            if own:
                optimizer.state[stepped.tensor] = {
                    # A step count stays on the CPU, where reading it does not wait for the device.
                    key: value.to("cpu" if key == "step" and not on_device else stepped.tensor.device)
                    if isinstance(value, Tensor)
                    else value
                    for key, value in own.items()
                }


def take_groups(
    names: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, shards: Sequence[FlatShard] = ()
) -> list[Group]:
    """Return the optimizer's groups, with names for parameters. CheckpointError for parameters without a name."""
    return [
        Group(
            {key: value for key, value in group.items() if key not in _OWN_KEYS},
            tuple(name for stepped in _list_stepped(names, group, shards) for name in stepped.names),
        )
        for group in optimizer.param_groups
    ]


def put_groups(optimizer: torch.optim.Optimizer, options: list[dict[str, Any]]) -> None:
    """Set each group's hyperparameters; one that an older torch did not save keeps its value."""
    for group, values in zip(optimizer.param_groups, options, strict=True):
        group.pop(MARK, None)  # it marks states that are gone now
        for key, value in values.items():
            own = group.get(key)
            group[key] = (
                value.to(own.device) if isinstance(own, Tensor) and isinstance(value, Tensor) else value
            )


def name_kind(optimizer: torch.optim.Optimizer) -> str:
    """Return the optimizer's kind, which must be equal where its states are saved and loaded."""
    return type(optimizer).__name__


class _Stepped(NamedTuple):
    """A tensor that an optimizer steps: one parameter, or a `shard` of several."""

    names: tuple[str, ...]
    tensor: Tensor
    shard: FlatShard | None


def _list_stepped(
    names: Mapping[str, Tensor], group: Mapping[str, Any], shards: Sequence[FlatShard]
) -> list[_Stepped]:
    known = {id(tensor): _Stepped((name,), tensor, None) for name, tensor in names.items()}
    known |= {id(shard.own): _Stepped(shard.names, shard.own, shard) for shard in shards}
    for parameter in group["params"]:
        if id(parameter) not in known:
            raise CheckpointError(
                f"the optimizer holds a parameter of shape {list(parameter.shape)} that is not of this model: make the "
                "optimizer of parallel.parameters()"
            )
    return [known[id(parameter)] for parameter in group["params"]]


def _check_shapes(stepped: _Stepped, state: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> None:
    for key, value in state.items():
        if isinstance(value, Tensor) and value.dim() and value.shape != stepped.tensor.shape:
            raise CheckpointError(
                f"the optimizer's state {key!r} of {', '.join(stepped.names[:3])} has shape {list(value.shape)}, and "
                f"the parameter {list(stepped.tensor.shape)}: checkpoints move between meshes, so they hold only "
                "states that are divided as their parameters are; leave optimizer= out, or keep "
                f"{name_kind(optimizer)}'s own state_dict"
            )
