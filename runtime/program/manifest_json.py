"""The manifest as JSON text and back: every field by its name, those at their default left out."""

import dataclasses
import difflib
import json
import types
from collections.abc import Mapping
from functools import cache
from inspect import signature
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch

from autoptd.runtime.program.manifest import Manifest
from autoptd.runtime.program.mesh import Mesh
from autoptd.runtime.program.placement import AxisPlacement, Partial, Placement, Replicate, Shard

FORMAT = "autoptd 7"
_ON_AXIS = {kind.__name__.lower(): kind for kind in (Replicate, Shard, Partial)}


def to_json(manifest: Manifest) -> str:
    """Write the manifest as JSON, with a line per input, stage and parameter, so that versions compare."""
    return write_fields({"format": FORMAT, **encode(manifest)})


def write_fields(fields: Mapping[str, Any]) -> str:
    """Write a JSON object, with a line for each field and for each item of one."""
    lines = []
    for name, value in fields.items():
        if isinstance(value, (dict, list)) and value and name != "mesh":
            (opening, closing), rows = "[]", [json.dumps(item) for item in value]
            if isinstance(value, dict):
                opening, closing = "{}"
                rows = [f"{key}: {json.dumps(item)}" for key, item in zip(rows, value.values(), strict=True)]
            text = f"{opening}\n  " + ",\n  ".join(rows) + f"\n {closing}"
        else:
            text = json.dumps(value)
        lines.append(f" {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def from_json(text: str, filename: str = "manifest.json") -> Manifest:
    """Read a manifest back. Raises ValueError naming the file and the field for what is not one."""
    try:
        fields = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{filename}:{error.lineno}: not JSON: {error.msg}") from error
    found = fields.pop("format", None) if isinstance(fields, dict) else None
    if found != FORMAT:
        raise ValueError(f"{filename}: format is {found!r}, expected {FORMAT!r}; save the program again")
    return decode(Manifest, fields, filename)  # type: ignore[no-any-return]


def encode(value: Any) -> Any:
    """Return a JSON value for a dataclass, and for the values of its fields."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, Mesh):
        axes = dict(tuple(value.axes.items())[::-1])  # the innermost first, as in mesh=(t, p, d)
        axes |= {"expert": value.expert} if value.expert > value.tensor else {}
        return axes if value.ranks is None else {**axes, "ranks": list(value.ranks)}
    if dataclasses.is_dataclass(value):
        kind = {"kind": type(value).__name__.lower()} if isinstance(value, AxisPlacement) else {}
        fields = ((field, getattr(value, field.name)) for field in dataclasses.fields(value))
        return kind | {field.name: encode(own) for field, own in fields if own != field.default}
    if isinstance(value, Mapping):
        return {key: encode(item) for key, item in value.items()}
    return [encode(item) for item in value] if isinstance(value, (tuple, list)) else value


def decode(kind: Any, value: Any, place: str) -> Any:
    """Return the field of type `kind` from its JSON `value`; `place` names it in messages. Raises ValueError."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if kind is Placement:
        return Placement(**decode(dict[str, AxisPlacement], value, place))
    if kind is AxisPlacement:
        fields = dict(_expect(value, dict, place))
        found = decode(Literal[*_ON_AXIS], fields.pop("kind", None), f"{place}: kind")
        return _decode_fields(_ON_AXIS[found], fields, place)
    if dataclasses.is_dataclass(kind):
        return _decode_fields(kind, _expect(value, dict, place), place)
    if kind is torch.dtype:
        dtype = getattr(torch, _expect(value, str, place), None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{place} is {value!r}, expected the name of a torch dtype, such as 'float32'")
        return dtype
    if origin in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        (kind,) = (argument for argument in arguments if argument is not type(None))
        return decode(kind, value, place)
    if origin is Literal:
        if value not in arguments:
            raise ValueError(f"{place} is {value!r}, expected one of {', '.join(map(repr, arguments))}")
        return value
    if origin is tuple:
        return tuple(decode(arguments[0], item, f"{place}[{i}]") for i, item in enumerate(_expect(value, list, place)))
    if origin is not None:
        table = _expect(value, dict, place)
        return {key: decode(arguments[1], item, f"{place}[{key!r}]") for key, item in table.items()}
    return _expect(value, kind, place)


def _decode_fields(kind: Any, table: dict[str, Any], place: str) -> Any:
    types_by_name, required = _fields(kind)
    for key in table:
        if key not in types_by_name:
            near = difflib.get_close_matches(key, types_by_name, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(types_by_name)}"
            raise ValueError(f"{place}: unknown key {key!r}; {hint}")
    if missing := [name for name in required if name not in table]:
        raise ValueError(f"{place}: missing {', '.join(map(repr, missing))}")
    return kind(**{key: decode(types_by_name[key], value, f"{place}: {key}") for key, value in table.items()})


@cache
def _fields(kind: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The type of each field of a dataclass, and the names of those without a default."""
    return get_type_hints(kind), tuple(p.name for p in signature(kind).parameters.values() if p.default is p.empty)


def _expect(value: Any, kind: type, place: str) -> Any:
    # JSON's true is an int to Python, and 80 is no float.
    given = type(value) if kind in (int, float) else None
    if given is int and kind is float:
        return float(value)
    if not isinstance(value, kind) or given is bool:
        raise ValueError(f"{place} is {value!r}, expected {kind.__name__}")
    return value
