"""The calls of groups and the elements of their tensors, by kind: conftest has every group's counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from autoptd.runtime.comm.groups import Group, ProcessGroup, ThreadGroup

_CALLS: WeakKeyDictionary[Group, Counter[str]] = WeakKeyDictionary()
_ELEMENTS: WeakKeyDictionary[Group, Counter[str]] = WeakKeyDictionary()


def calls(group: Group) -> Counter[str]:
    """The calls of a group so far: "all_reduce", "all_gather", "broadcast" and "reduce_scatter"."""
    return _CALLS.setdefault(group, Counter())


def elements(group: Group) -> Counter[str]:
    """The elements of the tensors that a group's calls were given."""
    return _ELEMENTS.setdefault(group, Counter())


def count_all() -> None:
    """Count the calls of all groups of more than one rank from now on."""
    for cls in (ProcessGroup, ThreadGroup, Group):
        for name in ("all_reduce", "all_gather", "broadcast"):
            setattr(cls, name, _counted(name, getattr(cls, name)))
    for name in ("all_reduce", "all_gather", "reduce_scatter"):
        setattr(ProcessGroup, f"post_{name}", _counted(name, getattr(ProcessGroup, f"post_{name}")))


def _counted(kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def counted(group: Group, given: Tensor | Sequence[Tensor], *rest: Any) -> Any:
        if group.size > 1:
            calls(group)[kind] += 1
            elements(group)[kind] += sum(x.numel() for x in ([given] if isinstance(given, Tensor) else given))
        return call(group, given, *rest)

    return counted
