"""What differs between two plans or programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from autoptd.compiled import CompiledProgram
from autoptd.ranking import Plan


@dataclass(frozen=True)
class Difference:
    """`rows` has what differs, by name: the value of the one and of the other (None: it has none)."""

    rows: Mapping[str, tuple[object, object]]

    def __bool__(self) -> bool:
        return bool(self.rows)

    def __str__(self) -> str:
        if not self.rows:
            return "no difference"
        return "\n".join(
            f"{name}: {_show(one)} -> {_show(other)}" for name, (one, other) in self.rows.items()
        )


def diff(a: Plan | CompiledProgram, b: Plan | CompiledProgram) -> Difference:
    """Compare two plans, two programs, or a plan with the program that was made of it. TypeError for others."""
    one, other = _describe(a), _describe(b)
    names = [*one, *(name for name in other if name not in one)]
    if type(a) is not type(b):
        names = [name for name in names if name in one and name in other]
    return Difference({n: (one.get(n), other.get(n)) for n in names if one.get(n) != other.get(n)})


def _describe(given: object) -> dict[str, object]:
    if isinstance(given, Plan):
        least = "" if given.simulated else "least "
        sizes = {f"{least}{name}": getattr(given, name) for name in ("step_seconds", "memory_bytes")}
        found = {**given.options, **sizes}
        found.update((f"seconds of {name}", seconds) for name, seconds in given.breakdown.items())
    elif isinstance(given, CompiledProgram):
        found = _describe_program(given)
    else:
        raise TypeError(f"diff compares plans and programs, and was given a {type(given).__name__}")
    mesh = found.pop("mesh")
    return {"mesh": str(mesh), **found}


def _describe_program(program: CompiledProgram) -> dict[str, object]:
    manifest = program.manifest
    found: dict[str, object] = {
        "mesh": manifest.mesh,
        "schedule": manifest.schedule,
        "num_model_chunks": manifest.num_model_chunks,
        "microbatch_size": manifest.microbatch_size,
        "num_microbatches": manifest.num_microbatches,
        "scatter_gather": manifest.scatter_gather,
    }
    if program.options is not None:
        found["recompute"] = program.options.recompute
    for rank in range(manifest.mesh.pipeline):
        names = {
            name for stage in manifest.stages[rank :: manifest.mesh.pipeline] for name in stage.parameters
        }
        held = [manifest.parameters[name] for name in names]
        local = (prod(p.placement.local_shape(p.shape, manifest.mesh.tensor)) for p in held)
        found[f"parameters on pipeline rank {rank}"] = sum(local)
    for stage in manifest.stages[:-1]:
        found[f"stage {stage.index} sends"] = tuple((value.name, value.shape) for value in stage.sends)
    for index, entry in enumerate(program.log):
        found[f"pass {index}"] = entry
    return found


def _show(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
