"""Convert a call between its short form, for people, and its positional form with the overload, as a graph holds it."""

import inspect
import keyword
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, cast

import torch
from torch._ops import OpOverload, OpOverloadPacket

from autoptd.passes.ir.nodes import REQUIRED, nodes_in, parameters_of

Call = tuple[tuple[Any, ...], dict[str, Any]]


def shorten_call(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    """Drop the arguments that repeat their default, and pass options by name.

    ``sdpa(q, k, v, None, 0.0, True)`` becomes ``sdpa(q, k, v, is_causal=True)``; required arguments stay in place.
    """
    known = _positional(target)
    if known is None or len(args) > len(known):
        return tuple(args), dict(kwargs)
    defaults, is_operator = dict(known), isinstance(target, OpOverload)
    pairs = zip(defaults.values(), args, strict=False)
    stays = [bool(nodes_in(value)) or (default is REQUIRED and is_operator) for default, value in pairs]
    lead = [*stays, False].index(False)
    rest = {**dict(zip([*defaults][lead:], args[lead:], strict=False)), **kwargs}
    kept = (name for name, value in rest.items() if name not in defaults or not _same(value, defaults[name]))
    return tuple(args[:lead]), {name: rest[name] for name in kept}


def spread_call(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    """Pass every argument by position if possible; skipped ones get their default."""
    known = _positional(target)
    if known is None or len(args) > len(known):
        return tuple(args), dict(kwargs)
    last = max((index for index, (name, _) in enumerate(known) if name in kwargs), default=-1)
    spread = {name: kwargs.get(name, default) for name, default in known[len(args) : last + 1]}
    if any(value is REQUIRED for value in spread.values()):
        return tuple(args), dict(kwargs)
    return (*args, *spread.values()), {n: v for n, v in kwargs.items() if n not in spread}


@cache
def _positional(target: Any) -> tuple[tuple[str, Any], ...] | None:
    """Return name and default of each positional argument, or None if they cannot all be named."""
    if not (isinstance(target, OpOverload) or inspect.isfunction(target)):
        return None
    known = tuple((name, default) for name, default, positional in parameters_of(target) if positional)
    whole = isinstance(target, OpOverload) or len(known) == len(parameters_of(target))
    return known if whole and not any(keyword.iskeyword(name) for name, _ in known) else None


def _same(value: Any, default: Any) -> bool:
    # 1 == 1.0 == True, but as arguments they may differ.
    return type(value) is type(default) and bool(value == default)


def resolve_overload(packet: OpOverloadPacket, args: Sequence[Any], kwargs: Mapping[str, Any]) -> OpOverload:
    """Return the overload that ``packet(*args, **kwargs)`` would run; RuntimeError if none fits.

    Tensors may be on the meta device.
    """
    # Private, as torch has no public function for it; a call makes its choice here too.
    return cast(OpOverload, getattr(packet, torch._C._jit_resolve_packet(packet._qualified_op_name, *args, **kwargs)))
