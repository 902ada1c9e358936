"""Find the overload that an operator's packet (``aten.add``) takes for given arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket

_resolved: dict[tuple[object, ...], OpOverload] = {}


def resolve_overload(packet: OpOverloadPacket, args: Sequence[Any], kwargs: Mapping[str, Any]) -> OpOverload:
    """Return the overload that ``packet(*args, **kwargs)`` would run; tensors may be on the meta device.

    Raises RuntimeError if none fits. Each kind of arguments is looked up once.
    """
    key = (packet, _kind(tuple(args)), _kind(kwargs))
    found = _resolved.get(key)
    if found is None:
        # Private, as torch has no public function for it; a call makes its choice here too.
        name = torch._C._jit_resolve_packet(packet._qualified_op_name, *args, **kwargs)
        found = _resolved[key] = cast(OpOverload, getattr(packet, name))
    return found


def _kind(value: object) -> object:
    if isinstance(value, Tensor):
        return Tensor, value.dim() == 0, value.dtype.is_floating_point
    if isinstance(value, (list, tuple)):
        return type(value), tuple(_kind(item) for item in value)
    if isinstance(value, Mapping):
        return tuple((name, _kind(item)) for name, item in value.items())
    return type(value)
