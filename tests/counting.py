"""The calls of groups and the elements of their tensors, and those of messages: conftest has all counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from autoptd.runtime.comm.groups import Group, ProcessGroup, ThreadGroup
from autoptd.runtime.comm.point_to_point import ProcessChannel, ThreadChannel
from autoptd.runtime.comm.transfer import SendBuffer

_CALLS: WeakKeyDictionary[Group, Counter[str]] = WeakKeyDictionary()
_ELEMENTS: WeakKeyDictionary[Group, Counter[str]] = WeakKeyDictionary()
_SENT: WeakKeyDictionary[object, int] = WeakKeyDictionary()  # elements, by channel and by boundary's buffer


def calls(group: Group) -> Counter[str]:
    """The calls of a group so far: "all_reduce", "all_gather", "broadcast" and "reduce_scatter"."""
    return _CALLS.setdefault(group, Counter())


def elements(group: Group) -> Counter[str]:
    """The elements of the tensors that a group's calls were given."""
    return _ELEMENTS.setdefault(group, Counter())


def sent_by(buffer: SendBuffer) -> int:
    """The elements that a boundary's buffer has sent."""
    return _SENT.get(buffer, 0)


def sent_elements(parallel: Any) -> Counter[str]:
    """The elements that a rank has sent over each stage boundary: "stage 0 -> 1", and "stage 1 -> 0" of gradients."""
    found: Counter[str] = Counter()
    for buffer in (own for shape in parallel._shapes for stage in shape.stages.values() for own in stage.puts.values()):
        if isinstance(buffer, SendBuffer):
            found[buffer.label] += sent_by(buffer)
    return found


def count_all() -> None:
    """Count the calls of all groups of more than one rank, and what is sent, from now on."""
    ThreadChannel.send = _summed(ThreadChannel.send)  # type: ignore[method-assign, assignment]
    ProcessChannel.send = _summed(ProcessChannel.send)  # type: ignore[method-assign, assignment]
    send = SendBuffer.send

    def counted(buffer: SendBuffer, microbatch: int) -> None:
        before = _SENT.get(buffer.channel, 0)
        send(buffer, microbatch)
        _SENT[buffer] = _SENT.get(buffer, 0) + _SENT[buffer.channel] - before

    SendBuffer.send = counted  # type: ignore[method-assign, assignment]
    for cls in (ProcessGroup, ThreadGroup, Group):
        for name in ("all_reduce", "all_gather", "broadcast"):
            setattr(cls, name, _counted(name, getattr(cls, name)))
    for name in ("all_reduce", "all_gather", "reduce_scatter"):
        setattr(ProcessGroup, f"post_{name}", _counted(name, getattr(ProcessGroup, f"post_{name}")))


def _summed(send: Callable[[Any, Tensor], None]) -> Callable[[Any, Tensor], None]:
    @wraps(send)
    def summed(channel: Any, x: Tensor) -> None:
        _SENT[channel] = _SENT.get(channel, 0) + x.numel()
        send(channel, x)

    return summed


def _counted(kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def counted(group: Group, given: Tensor | Sequence[Tensor], *rest: Any) -> Any:
        if group.size > 1:
            calls(group)[kind] += 1
            elements(group)[kind] += sum(x.numel() for x in ([given] if isinstance(given, Tensor) else given))
        return call(group, given, *rest)

    return counted
