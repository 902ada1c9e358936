"""Python values as JSON and back, exactly: floats, tuples, counters, dictionaries in their order, single numbers.

JSON has no tuple, no infinity and only text as keys; such a value is {"!": its kind, "of": what it holds}.
"""

import reprlib
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

TAG = "!"
_KINDS = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
DTYPES = {name: getattr(torch, name) for name in _KINDS}
show = reprlib.repr  # short, whatever a file holds
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_TABLES: dict[str, Callable[[Any], Any]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}


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
    if kind in _TABLES.values():
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
    kind, inner = value[TAG], value.get("of")
    if set(value) == {TAG, "of"} and isinstance(kind, str):
        if kind == "float" and inner in ("inf", "-inf", "nan"):
            return float(inner)
        if kind == "tuple" and isinstance(inner, list):
            return tuple(decode_value(inner, place))
        if kind in _TABLES and isinstance(inner, list) and all(map(_is_pair, inner)):
            pairs = decode_value(inner, place)
            try:
                return _TABLES[kind](dict(pairs))
            except TypeError as error:
                raise ValueError(f"{place} has a key that can be none: {error}") from None
        if kind in DTYPES:
            return _decode_number(decode_value(inner, place), kind, place)
    raise ValueError(f"{place} is {show(value)}, which is no tagged value")


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2


def _decode_number(value: Any, kind: str, place: str) -> Tensor:
    dtype = DTYPES[kind]
    expected = bool if kind == "bool" else float if dtype.is_floating_point else int
    if type(value) is not expected:
        raise ValueError(f"{place} is {show(value)}, expected a number of {dtype}")
    try:
        return torch.tensor(value, dtype=dtype)
    except (RuntimeError, OverflowError) as error:
        raise ValueError(f"{place} is {show(value)}, which is outside {dtype}") from error
