"""The TOML file of a cluster: impossible values are refused by name, and each is written with its source."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from difflib import get_close_matches
from typing import Any

SMALLEST, LARGEST = 1e-30, 1e30  # bounds of a value, so that no time vanishes or overflows


def check_values(record: Any, place: str) -> None:
    """Raise ValueError for the first number in a dataclass or mapping that is out of bounds and not its default."""
    for name, value in (record if isinstance(record, Mapping) else vars(record)).items():
        if isinstance(value, Mapping) or is_dataclass(value):
            check_values(value, f"{place}: {name}")
        elif not isinstance(value, str) and value != getattr(type(record), name, None):
            noun, most = ("share", 1.0) if name.endswith("efficiency") else ("number", LARGEST)
            if not SMALLEST <= value <= most:
                bounds = f"from {SMALLEST:g} to {most:g}"
                raise ValueError(f"{place}: {name} is {value!r}, expected a {noun} above 0, {bounds}")


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
