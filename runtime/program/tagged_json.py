"""Python values as JSON and back, exactly: floats, tuples, counters, dictionaries in their order, single numbers.

JSON has no tuple, no infinity and only text as keys; such a value is {"!": its kind, "of": what it holds}.
"""

import reprlib
from collections import Counter, OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

TAG = "!"
_KINDS = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
show = reprlib.repr  # short, whatever a file holds
_NAMES: dict[torch.dtype, str] = {getattr(torch, name): name for name in _KINDS}
_TABLES = (dict, OrderedDict, Counter)
# What makes a value of what it holds, by its kind.
_MAKERS: dict[str, Callable[[Any], Any]] = {
    **{"float": float, "tuple": tuple, "dict": dict, "OrderedDict": OrderedDict},
    "Counter": lambda pairs: Counter(dict(pairs)),
    **{name: partial(torch.tensor, dtype=dtype) for dtype, name in _NAMES.items()},
}


def encode_value(value: Any, place: str) -> Any:
    """Return a JSON value for `value`; raise TypeError, naming the `place`, for one that would not come back equal."""
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if value - value == 0 else {TAG: "float", "of": repr(value)}
    if kind is list:
        return [encode_value(item, f"{place}[{i}]") for i, item in enumerate(value)]
    if kind is tuple:
        return {TAG: "tuple", "of": encode_value(list(value), place)}
    if kind in _TABLES:
        items = {key: encode_value(item, f"{place}[{key!r}]") for key, item in value.items()}
        if kind is dict and all(type(key) is str for key in value) and TAG not in value:
            return items
        return {TAG: kind.__name__, "of": [[encode_value(key, f"{place}: key"), item] for key, item in items.items()]}
    if kind is Tensor and value.dim() == 0 and value.dtype in _NAMES:
        return {TAG: _NAMES[value.dtype], "of": encode_value(value.item(), place)}
    shape = f" of shape {list(value.shape)} and {value.dtype}" if isinstance(value, Tensor) else ""
    raise TypeError(
        f"{place} is a {kind.__module__}.{kind.__qualname__}{shape}, which JSON cannot hold as it is: "
        "give None, bool, int, float, str, list, tuple, dict, or a tensor of no dimension"
    )


def decode_value(value: Any, place: str) -> Any:
    """Return the value that `encode_value` turned into this JSON; raise ValueError for anything else."""
    if isinstance(value, list):
        return [decode_value(item, f"{place}[{i}]") for i, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if TAG not in value:
        return {key: decode_value(item, f"{place}[{key!r}]") for key, item in value.items()}
    inner, kind = decode_value(value.get("of"), place), value[TAG] if value.keys() == {TAG, "of"} else ""
    try:
        return _MAKERS[kind](inner)
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"{place} is {show(value)}, which is no tagged value") from error
