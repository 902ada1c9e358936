"""The state of modules besides parameters and buffers: attributes, and lists, dicts and objects in them."""

from __future__ import annotations

import copy
import operator
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from torch import Tensor, nn

MOST = 256  # entries of what is looked into: data sets have more
_CONTAINERS = (dict, OrderedDict, defaultdict, list, deque, tuple)
_TORCH = frozenset(vars(nn.Module()))  # attributes that every module has


def list_held(objective: nn.Module) -> dict[str, Any]:
    """Return all values by their places, "h.0.count" or "state['count']", without those of `objective` itself."""
    return {
        f"{path}{name}".removeprefix("captured").removeprefix("."): value
        for path, holder in _holders(objective)
        for name, value in _entries(holder)
    }


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
