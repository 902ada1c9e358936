"""Find a class of the user's by its import path, "package.module:Class"."""

import pkgutil


def find_class(path: str, role: str) -> type:
    """Return the class of a `path`; ValueError, which calls it the `role`, where there is none."""
    try:
        return pkgutil.resolve_name(path)  # type: ignore[no-any-return]
    except (AttributeError, ValueError) as error:  # ValueError: of a name such as f.<locals>.C
        module, _, name = path.partition(":")
        raise ValueError(
            f"the {role} {name} is not found in module {module}: define it at a module's top level, where every rank "
            "can import it"
        ) from error
