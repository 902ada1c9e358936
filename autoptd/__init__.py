"""autoptd: compile a plain GPT into the program that trains it tensor, pipeline and data parallel.

The public names are looked up when first used, so that a rank which only runs a program imports no solver.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autoptd.check import ProgramError
    from autoptd.compiled import CompiledProgram
    from autoptd.compiler import compile, load
    from autoptd.simulator import simulate_schedule

_HOMES = {
    "CompiledProgram": "autoptd.compiled",
    "ProgramError": "autoptd.check",
    "compile": "autoptd.compiler",
    "load": "autoptd.compiler",
    "simulate_schedule": "autoptd.simulator",
}

__all__ = ["CompiledProgram", "ProgramError", "compile", "load", "simulate_schedule"]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'autoptd' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
