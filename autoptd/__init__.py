"""autoptd: compile a plain GPT into the program that trains it tensor, pipeline and data parallel.

The public names are looked up when first used, so that a rank which only runs a program imports no solver.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autoptd.calibration import calibrate
    from autoptd.check import ProgramError
    from autoptd.compiled import CompiledProgram
    from autoptd.compiler import compile, load
    from autoptd.difference import diff
    from autoptd.passes.cluster import Cluster
    from autoptd.planner import plan
    from autoptd.ranking import Plan
    from autoptd.runtime.checkpoint_error import CheckpointError
    from autoptd.safetensors_folder import SafetensorsFolder
    from autoptd.simulation import Simulation
    from autoptd.simulator import simulate_schedule

_HOMES = {
    "CheckpointError": "autoptd.runtime.checkpoint_error",
    "Cluster": "autoptd.passes.cluster",
    "Plan": "autoptd.ranking",
    "calibrate": "autoptd.calibration",
    "diff": "autoptd.difference",
    "plan": "autoptd.planner",
    "CompiledProgram": "autoptd.compiled",
    "ProgramError": "autoptd.check",
    "SafetensorsFolder": "autoptd.safetensors_folder",
    "Simulation": "autoptd.simulation",
    "compile": "autoptd.compiler",
    "load": "autoptd.compiler",
    "simulate_schedule": "autoptd.simulator",
}

__all__ = [
    "CheckpointError",
    "Cluster",
    "CompiledProgram",
    "Plan",
    "ProgramError",
    "SafetensorsFolder",
    "Simulation",
    "calibrate",
    "compile",
    "diff",
    "load",
    "plan",
    "simulate_schedule",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'autoptd' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
