"""autoptd: compile a plain GPT into the program that trains it tensor, pipeline and data parallel.

The public names are looked up when first used, so that a rank which only runs a program imports no solver.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autoptd.calibration.fit import calibrate as calibrate
    from autoptd.check.program import ProgramError as ProgramError
    from autoptd.compiled import CompiledProgram as CompiledProgram
    from autoptd.compiled import load as load
    from autoptd.compiler import compile as compile
    from autoptd.difference import diff as diff
    from autoptd.passes.cost.cluster import Cluster as Cluster
    from autoptd.planning.plan import Plan as Plan
    from autoptd.planning.search import plan as plan
    from autoptd.runtime.checkpoint.error import CheckpointError as CheckpointError
    from autoptd.simulate.schedule import simulate_schedule as simulate_schedule
    from autoptd.simulate.step import Simulation as Simulation
    from autoptd.weights.safetensors_folder import SafetensorsFolder as SafetensorsFolder

# CUDA reads it when it starts. Among the 8 queues it has by itself, a graph comes to stand behind a message of the
# pipeline that waits for what the graph computes: seen with graphs on mesh (2, 2, 2), interleaved.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

_HOMES = {
    "CheckpointError": "autoptd.runtime.checkpoint.error",
    "Cluster": "autoptd.passes.cost.cluster",
    "Plan": "autoptd.planning.plan",
    "calibrate": "autoptd.calibration.fit",
    "diff": "autoptd.difference",
    "plan": "autoptd.planning.search",
    "CompiledProgram": "autoptd.compiled",
    "ProgramError": "autoptd.check.program",
    "SafetensorsFolder": "autoptd.weights.safetensors_folder",
    "Simulation": "autoptd.simulate.step",
    "compile": "autoptd.compiler",
    "load": "autoptd.compiled",
    "simulate_schedule": "autoptd.simulate.schedule",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'autoptd' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
