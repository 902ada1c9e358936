"""The variables outside of modules that a forward can read or assign: global ones, those of classes and closures."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from torch import nn

from autoptd.capture.source_lines import is_foreign


class Scope(NamedTuple):
    """The `names` among variables, with the function that assigns one of them; a closure's are in cells."""

    variables: Mapping[str, Any]
    names: frozenset[str]
    assign: Callable[[str, Any], object]

    def read(self) -> dict[str, Any]:
        """Return the variables that have a value."""
        held = {name: self.variables[name] for name in self.names if name in self.variables}
        # An empty cell is equal to another one.
        filled = {n: x for n, x in held.items() if not isinstance(x, CellType) or x != CellType()}
        return {n: x.cell_contents if isinstance(x, CellType) else x for n, x in filled.items()}


def find_scopes(objective: nn.Module) -> Iterator[tuple[str, Scope]]:
    """Yield the scopes of the user's functions that the forwards of an objective's modules can call, with their paths.

    A function calls what its code names: global functions, those of a Python module or class, and its class's own.
    """
    parts = list(objective.modules())
    pending: list[tuple[Any, type | None]] = [(type(part).forward, type(part)) for part in parts]
    pending += [(value, None) for part in parts for value in vars(part).values()]
    seen = set()
    for called, kind in pending:
        function = inspect.unwrap(called.__func__ if isinstance(called, MethodType) else called)
        if not isinstance(function, FunctionType) or function in seen or is_foreign(function.__code__.co_filename):
            continue
        seen.add(function)
        names, held = frozenset(_list_names(function.__code__)), function.__globals__
        yield function.__module__, Scope(held, names, held.__setitem__)
        if function.__closure__:
            cells = dict(zip(function.__code__.co_freevars, function.__closure__, strict=True))
            yield function.__qualname__, Scope(cells, frozenset(cells), partial(_fill, cells))
            pending += [(cell.cell_contents, None) for cell in cells.values() if cell != CellType()]
        pending += [(held[name], None) for name in names if name in held]
        owners = [held[name] for name in names if isinstance(held.get(name), ModuleType | type)]
        for owner in dict.fromkeys([*owners, *(kind.__mro__ if kind else ())]):
            if not is_foreign(getattr(inspect.getmodule(owner), "__file__", None) or "<"):
                yield owner.__name__, Scope(vars(owner), names, partial(setattr, owner))
                inner = owner if isinstance(owner, type) else None
                pending += [(vars(owner)[name], inner) for name in names if name in vars(owner)]


def _fill(cells: Mapping[str, CellType], name: str, value: Any) -> None:
    cells[name].cell_contents = value


def _list_names(code: CodeType) -> Iterator[str]:
    """Yield the names that a function's code, and code in it, reads or assigns globally or as an attribute."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _list_names(inner)
