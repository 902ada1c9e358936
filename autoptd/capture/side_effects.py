"""The state of modules besides parameters and buffers: restore it, and refuse side effects of a forward on it."""

import copy
import operator
import pickle
import random
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import Any, NoReturn
from unittest.mock import patch

import torch
from torch import Tensor, nn

from autoptd.capture.scopes import Scope, find_scopes
from autoptd.capture.source_lines import CaptureError, user_line
from autoptd.runtime.user_warnings import warn_caller

NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)  # that depend on data: a trace knows all sizes
MOST = 256  # entries of what is looked into: data sets have more
_CONTAINERS = (dict, OrderedDict, defaultdict, list, deque, tuple)
_TORCH = frozenset(vars(nn.Module()))  # attributes that every module has


@contextmanager
def keeping_attributes(objective: nn.Module) -> Iterator[None]:
    """Restore after the block what modules and scopes held: attributes, buffers, hooks, modes, and their containers."""
    parts = list(objective.modules())
    own = (x for part in parts for x in (part._buffers, part._forward_hooks, part._forward_pre_hooks))
    holders: list[Any] = [vars(objective), *own]
    holders += [vars(held) if _is_object(held) else held for _, held in _holders(objective)]
    kept = [(h, h.read() if isinstance(h, Scope) else copy.copy(h)) for h in holders]
    try:
        yield
    finally:
        for holder, before in kept:
            if isinstance(holder, Scope):
                for name, value in holder.read().items():
                    if value is not before.get(name):
                        holder.assign(name, before.get(name))
                continue
            now, then = _flatten(holder), _flatten(before)
            if len(now) == len(then) and all(map(operator.is_, now, then)):
                continue  # others may be reading it
            holder.clear()
            (holder.update if isinstance(holder, dict) else holder.extend)(before)


def refuse_hooks(model: nn.Module) -> None:
    """Raise CaptureError for the first hook on a gradient, as a program's ranks have their own parameters."""
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise CaptureError(
                f"{name} has a hook on its gradient, which no trace shows: remove it (wandb.watch sets some), and "
                "register it after bind on the compiled model's own parameter, whose gradient is this rank's slice; to "
                "train some rows only, multiply by a mask in forward"
            )
    for path, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            name, way = path or type(model).__name__, "remove it, or write its effect in forward"
            raise CaptureError(f"{name} has a backward hook, which no trace shows: {way}")


@contextmanager
def refuse_side_effects(objective: nn.Module, assigned: dict[str, Tensor], left: dict[str, Any]) -> Iterator[None]:
    """Raise CaptureError if a forward in this block assigns buffers or draws from a foreign generator.

    Warns of numbers that forward changes. `assigned` gets the tensors that forward replaced, by their places, and
    `left` the tensors, and numbers read from these, that are at a place where they were not before.
    """
    buffers, held = _list_buffers(objective), _list_held(objective)
    drawn = _random_states(held)
    try:
        with refuse_new_hooks(), refuse_conversions(), patch.object(nn.Module, "__setattr__", _assign_view):
            yield
    finally:
        new = {place: value for place, value in _list_held(objective).items() if held.get(place) is not value}
        left |= {place: value for place, value in new.items() if isinstance(value, (Tensor, *NUMBERS))}
    now = _list_buffers(objective)
    # A new buffer keeps something for later calls, such as a table of positions.
    for place, buffer in buffers.items():
        if now.get(place) is not buffer:
            raise CaptureError(
                f"forward assigns the buffer {place!r}, which is not supported in a step: keep it constant, or update "
                "it outside forward; if only the first call fills it, make that call before compile; if it is a cache "
                "of earlier tokens, call forward without it"
            )
    for name, state in _random_states(held).items():
        if state != drawn.get(name, state):
            raise CaptureError(
                f"forward draws random numbers with {name}, and a program would repeat those of its capture; draw "
                "with torch, as dropout does, or outside forward (another thread that draws now looks the same)"
            )
    for place, value in new.items():
        before = held.get(place)
        numbers = type(before) in (int, float) and type(value) in (int, float)
        if numbers and value != before:  # nan is not itself
            kept = "a program keeps its value from the capture"
            warn_caller(f"forward changes {place} from {before} to {value}: {kept} in every step")
        elif isinstance(before, Tensor):
            assigned[place] = before


def _assign_view(module: nn.Module, name: str, value: Any, assign: Any = nn.Module.__setattr__) -> None:
    """Assign an attribute as any module does; of a tensor with a gradient a view, by which it is seen to be read."""
    if getattr(value, "grad_fn", None) is not None:
        with torch.enable_grad(), torch._C.DisableTorchFunction():  # it is no call of the user's
            value = value.view(value.shape)
    assign(module, name, value)


def refuse_conversions() -> AbstractContextManager[Any]:
    """Raise CaptureError if a forward in this block converts a module's tensors, as ``module.to(dtype)`` may."""

    def convert(module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        for name, tensor in (*module.named_parameters(recurse=recurse), *module.named_buffers(recurse=recurse)):
            if (made := function(tensor)) is not tensor:
                raise CaptureError(
                    f"{user_line()}: forward converts {name} of a {type(module).__name__} from {tensor.dtype} to "
                    f"{made.dtype}, which changes the model: convert it before compile, or compute with a cast of it"
                )
        return module

    return patch.object(nn.Module, "_apply", convert)


def judge_left(results: Iterable[Tensor], left: Mapping[str, Any], varies: Callable[[Any], bool]) -> list[str]:
    """Raise CaptureError for a tensor with a gradient that forward has `left` beside the `results` of the step.

    Returns the places of what else is left and `varies`: numbers, detached tensors, lists that the loss is made of.
    """
    inside, pending = set(), [result.grad_fn for result in results]
    while pending:
        if (function := pending.pop()) is not None and function not in inside:
            inside.add(function)
            pending += [following for following, _ in function.next_functions]
    varying = []
    for place, value in left.items():
        function = getattr(value, "grad_fn", None)
        if function is not None and function not in inside:
            raise CaptureError(
                f"forward leaves {place}, a tensor with a gradient that the loss does not read there, and a step sets "
                "nothing: what reads it after the call would miss it in silence. Add it to the loss in forward, return "
                "it beside the loss and name it in outputs=, or keep its .detach()"
            )
        # A number that is added to the loss needs nobody to read it.
        if isinstance(value, NUMBERS) or ((function is None or value.dim()) and varies(value)):
            varying.append(place)
    return varying


def refuse_new_hooks() -> AbstractContextManager[Any]:
    """Raise CaptureError if a forward in this block registers a hook on a gradient."""
    return patch.multiple(Tensor, register_hook=_refuse_hook, register_post_accumulate_grad_hook=_refuse_hook)


def _refuse_hook(*_: object, **__: object) -> NoReturn:
    place = user_line()
    raise CaptureError(
        f"{place}: a hook on a gradient, which no trace shows; write its effect in forward: "
        "x * factor + (x * (1 - factor)).detach() has the value of x, and its gradient times factor"
    )


def _list_buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name.removeprefix("captured."): buffer for name, buffer in model.named_buffers(remove_duplicate=False)}


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
    """Yield every module but `objective`, scope of their functions, and container in one, each once, with its path."""
    seen: set[int] = set()
    pending: list[tuple[str, Any]] = [(path, part) for path, part in objective.named_modules() if path]
    pending += find_scopes(objective)
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
    module = type(value).__module__
    foreign = isinstance(value, (Tensor, type, ModuleType)) or module.startswith(("torch.", "logging"))
    plain = hasattr(value, "__dict__") and not callable(value) and not foreign
    return isinstance(value, nn.Module) or plain


def _entries(holder: Any) -> Iterator[tuple[str, Any]]:
    """Yield the entries of `holder`, each named as written after the holder's own name."""
    if isinstance(holder, Scope):
        yield from ((f".{name}", value) for name, value in holder.read().items())
    elif _is_object(holder):
        own = _TORCH if isinstance(holder, nn.Module) else ()
        yield from ((f".{name}", value) for name, value in list(vars(holder).items()) if name not in own)
    else:
        pairs = holder.items() if isinstance(holder, dict) else enumerate(holder)
        yield from ((f"[{key!r}]", value) for key, value in list(pairs))
