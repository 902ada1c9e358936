"""Switch dropout off, whatever mode the modules are in."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

aten = torch.ops.aten
# Functions that return their first argument without dropout.
DROPPING = frozenset(
    [
        *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout),
        *(torch.dropout, torch.feature_dropout, torch.alpha_dropout, torch.feature_alpha_dropout),
        *(aten.dropout.default, aten.feature_dropout.default, aten.alpha_dropout.default),
    ]
)
SDPA = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
MULTI_HEAD = tuple(inspect.signature(F.multi_head_attention_forward).parameters)
# Attention: the names of its arguments, and the options that switch its dropout off.
ATTENTIONS: Mapping[Any, tuple[Sequence[str], Mapping[str, Any]]] = {
    F.scaled_dot_product_attention: (SDPA, {"dropout_p": 0.0}),
    aten.scaled_dot_product_attention.default: (SDPA, {"dropout_p": 0.0}),
    F.multi_head_attention_forward: (MULTI_HEAD, {"training": False}),
}


def drops(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call applies one of the dropouts that programs support."""
    if func in (F.dropout, torch.dropout, aten.dropout.default):
        given = {**dict(zip(("input", "p", "train"), args, strict=False)), **kwargs}
        return bool(given.get("p", 0.5) and given.get("train", given.get("training", True)))
    if func in ATTENTIONS:
        given = {**dict(zip(ATTENTIONS[func][0], args, strict=False)), **kwargs}
        return bool(given.get("dropout_p") and given.get("training", True))
    return False


class DropoutOff(TorchFunctionMode):
    """A mode in which dropouts return their input and attention drops nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if func in DROPPING:
            return args[0] if args else options["input"]
        if func is aten.native_dropout.default:
            return args[0], torch.ones_like(args[0], dtype=torch.bool)
        if func in ATTENTIONS:
            names, off = ATTENTIONS[func]
            return func(**{**dict(zip(names, args, strict=False)), **options, **off})
        return func(*args, **options)
