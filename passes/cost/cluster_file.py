"""The TOML file of a cluster: wrong values are refused by name, and every value is written with its source."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from typing import Any


def read_table(table: Mapping[str, Any], kind: type, source: str, place: str) -> dict[str, Any]:
    """Read a table that has a value for each field of `kind`, and no others."""
    types = {field.name: str(field.type) for field in fields(kind)}
    for key in table:
        if key not in types:
            raise ValueError(
                f"{source}: unknown key {place}{key}{suggest(key, types)}: expected {', '.join(types)}"
            )
    missing = [place + key for key in types if key not in table]
    if missing:
        raise ValueError(f"{source}: {', '.join(missing)} missing: expected a value for each")
    values: dict[str, Any] = {}
    for key, wanted in types.items():
        if wanted in ("int", "float"):
            values[key] = read_number(table[key], int if wanted == "int" else float, source, place + key)
        else:
            expected = str if wanted == "str" else dict
            if not isinstance(table[key], expected):
                noun = "a text" if expected is str else "a table"
                raise ValueError(f"{source}: {place}{key} = {table[key]!r}: expected {noun}")
            values[key] = table[key]
    return values


SMALLEST, LARGEST = 1e-30, 1e30  # bounds of a value, so that no time vanishes or overflows


def read_number(value: object, kind: type, source: str, name: str) -> Any:
    share = name.endswith("efficiency")
    fits = isinstance(value, int if kind is int else (int, float)) and not isinstance(value, bool)
    most = 1.0 if share else LARGEST
    if not fits or not SMALLEST <= value <= most:  # type: ignore[operator]
        noun = "share" if share else "whole number" if kind is int else "number"
        least = 1 if kind is int else SMALLEST
        raise ValueError(
            f"{source}: {name} = {value!r}: expected a {noun} above 0, from {least:g} to {most:g}"
        )
    return kind(value)


def suggest(name: str, known: Sequence[str] | Mapping[str, object]) -> str:
    near = get_close_matches(name, list(known), 1)
    return f" (did you mean {near[0]}?)" if near else ""


def write_tables(record: Any, source: str, others: Mapping[str, str]) -> str:
    """Write the dataclass `record` as TOML: its own values first, then a table for each dataclass or mapping in it.

    A value's source is in `others` by its name, or by its table's, or it is `source`.
    """
    return "\n".join(_write_table(record, "", source, others)) + "\n"


def _write_table(record: Any, place: str, source: str, others: Mapping[str, str]) -> Iterator[str]:
    values = (
        record if isinstance(record, Mapping) else {f.name: getattr(record, f.name) for f in fields(record)}
    )
    tables = {
        key: value for key, value in values.items() if isinstance(value, Mapping) or is_dataclass(value)
    }
    if place:
        yield f"\n[{place}]"
    for key, value in values.items():
        if key not in tables:
            text = (
                _escape(json.dumps(value, ensure_ascii=False)) if isinstance(value, str) else f"{value:.6g}"
            )
            yield f"{f'{key} = {text}':<35} # {_escape(others.get(key, source))}"
    for key, table in tables.items():
        yield from _write_table(table, f"{place}.{key}" if place else key, others.get(key, source), others)


def _escape(text: str) -> str:
    """Escape control characters, which neither TOML strings nor comments may have."""
    return re.sub(r"[\x00-\x1f\x7f]", lambda found: f"\\u{ord(found[0]):04x}", text)
