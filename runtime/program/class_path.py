"""Find a class of the user's by its import path, "package.module:Class"."""

import importlib
from typing import Any


def find_class(path: str, role: str) -> type:
    """Return the class of a `path`; ValueError, which calls it the `role`, where there is none."""
    module, _, name = path.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        if not hasattr(found, part):
            raise ValueError(
                f"the {role} {name} is not found in module {module}: define it at a module's top level, where every "
                "rank can import it"
            )
        found = getattr(found, part)
    if not isinstance(found, type):
        raise ValueError(f"{path} is a {type(found).__name__}, expected the {role}")
    return found
