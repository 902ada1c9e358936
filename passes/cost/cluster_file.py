"""The TOML file of a cluster: wrong values are refused by name, and every value is written with its source."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from difflib import get_close_matches
from typing import Any, TypeVar, get_type_hints

SMALLEST, LARGEST = 1e-30, 1e30  # bounds of a value, so that no time vanishes or overflows
Made = TypeVar("Made")


def read_record(table: Mapping[str, Any], kind: type[Made], source: str, place: str = "") -> Made:
    """Read a `kind` from a table that has a value for each of its fields without a default, and no others."""
    types = get_type_hints(kind)
    for key in table:
        if key not in types:
            known = ", ".join(types)
            raise ValueError(f"{source}: unknown key {place}{key}{suggest(key, types)}: expected {known}")
    missing = [place + key for key in types if key not in table and not hasattr(kind, key)]
    if missing:
        raise ValueError(f"{source} lacks {', '.join(missing)}: expected a value for each")
    return kind(**{key: _read(value, types[key], source, place + key) for key, value in table.items()})


def _read(value: Any, wanted: Any, source: str, name: str) -> Any:
    if wanted in (int, float):
        return _read_number(value, wanted, source, name)
    expected: Any = str if wanted is str else dict
    if not isinstance(value, expected):
        noun = "a text" if wanted is str else "a table"
        raise ValueError(f"{source}: {name} = {value!r}: expected {noun}")
    if wanted is str:
        return value
    if isinstance(wanted, type) and is_dataclass(wanted):
        return read_record(value, wanted, source, f"{name}.")
    return {key: _read_number(number, float, source, f"{name}.{key}") for key, number in value.items()}


def _read_number(value: Any, kind: type, source: str, name: str) -> Any:
    share = name.endswith("efficiency")
    fits = isinstance(value, int if kind is int else (int, float)) and not isinstance(value, bool)
    most = 1.0 if share else LARGEST
    if not fits or not SMALLEST <= value <= most:
        noun = "share" if share else "whole number" if kind is int else "number"
        least = 1 if kind is int else SMALLEST
        raise ValueError(
            f"{source}: {name} = {value!r}: expected a {noun} above 0, from {least:g} to {most:g}"
        )
    return kind(value)


def suggest(name: str, known: Iterable[str]) -> str:
    """Return " (did you mean x?)" if one of `known` resembles `name`, else ""."""
    near = get_close_matches(name, list(known), 1)
    return f" (did you mean {near[0]}?)" if near else ""


def write_tables(record: Any, source: str, others: Mapping[str, str], place: str = "") -> Iterator[str]:
    """Yield the lines of a dataclass as TOML: its own values first, then a table for each dataclass or mapping in it.

    A value's source is in `others` by its name, or by its table's, or it is `source`. A 0 is left out: no file has one.
    """
    values = {k: v for k, v in (record if isinstance(record, Mapping) else vars(record)).items() if v != 0}
    tables = {k: value for k, value in values.items() if isinstance(value, Mapping) or is_dataclass(value)}
    if place:
        yield f"\n[{place}]"
    for key, value in values.items():
        if key not in tables:
            quoted = isinstance(value, str)
            text = _escape(json.dumps(value, ensure_ascii=False)) if quoted else f"{value:.6g}"
            yield f"{f'{key} = {text}':<35} # {_escape(others.get(key, source))}"
    for key, table in tables.items():
        yield from write_tables(table, others.get(key, source), others, f"{place}.{key}" if place else key)


def _escape(text: str) -> str:
    """Escape control characters, which neither TOML strings nor comments may have."""
    return re.sub(r"[\x00-\x1f\x7f]", lambda found: f"\\u{ord(found[0]):04x}", text)
