"""The state of modules besides parameters and buffers: restore it, and refuse side effects of a forward on it."""

import copy
import operator
import pickle
import random
import sys
import traceback
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NoReturn
from unittest.mock import patch

from torch import Tensor, nn

from autoptd.capture.source_lines import user_line
from autoptd.runtime.user_warnings import warn_caller

MOST = 256  # entries of what is looked into: data sets have more
_CONTAINERS = (dict, OrderedDict, defaultdict, list, deque, tuple)
_TORCH = frozenset(vars(nn.Module()))  # attributes that every module has


class SideEffectError(ValueError):
    """A side effect that a traced program cannot repeat in every step."""


@contextmanager
def keeping_attributes(objective: nn.Module) -> Iterator[None]:
    """Restore after the block what all modules held: attributes, buffers, modes, and their containers."""
    parts = list(objective.modules())
    holders = [vars(objective), *(part._buffers for part in parts)]
    holders += [vars(held) if _is_object(held) else held for _, held in _holders(objective)]
    kept = [(holder, copy.copy(holder)) for holder in holders]
    try:
        yield
    finally:
        for holder, before in kept:
            now, then = _flatten(holder), _flatten(before)
            if len(now) == len(then) and all(map(operator.is_, now, then)):
                continue  # others may be reading it
            holder.clear()
            if isinstance(holder, dict):
                holder.update(before)
            else:
                holder.extend(before)


def refuse_hooks(model: nn.Module) -> None:
    """Raise SideEffectError for the first hook on a gradient, as a program's ranks have their own parameters."""
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise SideEffectError(
                f"{name} has a hook on its gradient, which no trace shows: remove it (wandb.watch sets some), and "
                "register it after bind on the compiled model's own parameter, whose gradient is this rank's slice; to "
                "train some rows only, multiply by a mask in forward"
            )
    for path, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise SideEffectError(
                f"{path or type(model).__name__} has a backward hook, which no trace shows: remove it, or write its "
                "effect on gradients in forward"
            )


@contextmanager
def refuse_side_effects(objective: nn.Module, assigned: dict[str, Tensor]) -> Iterator[None]:
    """Raise SideEffectError if a forward in this block assigns buffers or draws from a foreign generator.

    Warns of numbers that forward changes. `assigned` gets the tensors that forward replaced, by their places.
    """
    buffers, held = _list_buffers(objective), _list_held(objective)
    drawn = _random_states(held)
    with refuse_new_hooks():
        yield
    now = _list_buffers(objective)
    # A new buffer keeps something for later calls, such as a table of positions.
    for place, buffer in buffers.items():
        if now.get(place) is not buffer:
            raise SideEffectError(
                f"forward assigns the buffer {place!r}, which is not supported in a step: keep it constant, or update "
                "it outside forward; if only the first call fills it, make that call before compile"
            )
    for name, state in _random_states(held).items():
        if state != drawn.get(name, state):
            raise SideEffectError(
                f"forward draws random numbers with {name}, and a program would repeat those of its capture in every "
                "step; draw with torch, as dropout does, or outside forward (another thread that draws at the same "
                "time looks the same)"
            )
    for place, value in _list_held(objective).items():
        before = held.get(place)
        numbers = type(before) in (int, float) and type(value) in (int, float)
        if numbers and value is not before and value != before:  # nan is not itself
            warn_caller(
                f"forward changes {place} from {before} to {value}: a program keeps its value from the capture in "
                "every step"
            )
        elif isinstance(before, Tensor) and value is not before:
            assigned[place] = before


@contextmanager
def refuse_new_hooks() -> Iterator[None]:
    """Raise SideEffectError if a forward in this block registers a hook on a gradient."""
    with patch.multiple(Tensor, register_hook=_refuse_hook, register_post_accumulate_grad_hook=_refuse_hook):
        yield


def _refuse_hook(*_: object, **__: object) -> NoReturn:
    place = user_line(traceback.extract_stack())
    raise SideEffectError(
        f"{place}: a hook on a gradient, which no trace shows; write its effect in forward: "
        "x * factor + (x * (1 - factor)).detach() has the value of x, and its gradient times factor"
    )


def _list_buffers(model: nn.Module) -> dict[str, Tensor]:
    found = model.named_buffers(remove_duplicate=False)
    return {name.removeprefix("captured."): buffer for name, buffer in found}


def _random_states(held: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states of Python's generator, numpy's if in use, and those in `held`."""
    states: dict[str, Any] = {"Python's random": random.getstate()}
    kinds: tuple[Any, ...] = (random.Random,)
    if (numpy := sys.modules.get("numpy")) is not None:
        states["numpy.random"] = pickle.dumps(numpy.random.get_state(legacy=False))
        kinds = (*kinds, numpy.random.Generator, numpy.random.RandomState)
    return states | {f"the model's {place}": pickle.dumps(x) for place, x in held.items() if type(x) in kinds}


def _list_held(objective: nn.Module) -> dict[str, Any]:
    """Return all values by their places, "h.0.count" or "state['count']", without those of `objective` itself."""
    return {
        f"{path}{name}".removeprefix("captured").removeprefix("."): value
        for path, holder in _holders(objective)
        for name, value in _entries(holder)
    }


def _flatten(holder: Any) -> list[Any]:
    return [x for pair in holder.items() for x in pair] if isinstance(holder, dict) else list(holder)


def _holders(objective: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield every module but `objective`, and every container in one, each once, with its path."""
    seen: set[int] = set()
    pending: list[tuple[str, Any]] = [(path, part) for path, part in objective.named_modules() if path]
    for path, holder in pending:
        if id(holder) in seen:
            continue
        seen.add(id(holder))
        yield path, holder
        for name, value in _entries(holder):
            if not isinstance(value, nn.Module) and _holds(value):
                pending.append((f"{path}{name}", value))


def _holds(value: object) -> bool:
    if type(value) in _CONTAINERS:
        return len(value) <= MOST  # type: ignore[arg-type]
    return _is_object(value) and len(vars(value)) <= MOST


def _is_object(value: object) -> bool:
    """Return whether a value has attributes of the user's: a module, a configuration."""
    foreign = isinstance(value, (Tensor, type, ModuleType)) or type(value).__module__.startswith("torch.")
    plain = hasattr(value, "__dict__") and not callable(value) and not foreign
    return isinstance(value, nn.Module) or plain


def _entries(holder: Any) -> Iterator[tuple[str, Any]]:
    """Yield the entries of `holder`, each named as written after the holder's own name."""
    if _is_object(holder):
        own = _TORCH if isinstance(holder, nn.Module) else ()
        yield from ((f".{name}", value) for name, value in list(vars(holder).items()) if name not in own)
    else:
        pairs = holder.items() if isinstance(holder, dict) else enumerate(holder)
        yield from ((f"[{key!r}]", value) for key, value in list(pairs))
