"""The prose: docstrings are sentences, and those of functions are imperative."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.test_house import PACKAGE, parse

# "Return the ..." instead of "The ...", "Return whether ..." instead of "Whether ...".
NOT_IMPERATIVE = {"The", "What", "Whether", "Which", "How", "That", "Where", "A", "An"}
FREE_RELATIVES = NOT_IMPERATIVE - {"The", "Whether", "A", "An"}  # a property is a noun, and may be one of these


def list_docstrings() -> Iterator[tuple[str, str, str]]:
    """Yield the kind, the place and the first sentence of every public docstring of the package."""
    for file in PACKAGE:
        for node in ast.walk(parse(file)):
            if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
                continue
            text = ast.get_docstring(node)
            if text is not None:
                decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
                kind = "property" if decorators & {"property", "cached_property"} else type(node).__name__
                first = " ".join(text.split("\n\n")[0].split())
                yield kind, f"{file}:{node.lineno}: {node.name}: {first}", first


def test_docstrings_are_sentences() -> None:
    found = [
        place
        for _, place, first in list_docstrings()
        if not (first[:1].isupper() or first.startswith("``")) or not first.endswith(".")
    ]
    assert found == [], "begin with a capital and end with a period"


def test_docstrings_of_functions_are_imperative() -> None:
    refused = {"FunctionDef": NOT_IMPERATIVE, "property": FREE_RELATIVES, "ClassDef": FREE_RELATIVES}
    found = [place for kind, place, first in list_docstrings() if first.split(" ", 1)[0].rstrip(":,") in refused[kind]]
    assert found == [], "say what the function does: Return ..., Split ..., Raise ... if ..."
