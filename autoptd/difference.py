"""Compare two plans or programs."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest
from math import prod

from autoptd.compiled import CompiledProgram
from autoptd.planning.plan import Plan
from autoptd.runtime.weights.slices import hash_values

TEXT = "text of pipeline rank"


@dataclass(frozen=True)
class Difference:
    """The rows that differ, by name: the value on either side, None if there is none."""

    rows: Mapping[str, tuple[object, object]]

    def __bool__(self) -> bool:
        return bool(self.rows)

    def __str__(self) -> str:
        if not self.rows:
            return "no difference"
        return "\n".join(f"{n}: {_show(one)} -> {_show(other)}" for n, (one, other) in self.rows.items())


def diff(a: Plan | CompiledProgram, b: Plan | CompiledProgram) -> Difference:
    """Compare two plans, two programs, or a plan with the program made from it. Raises TypeError for others."""
    one, other = _describe(a), _describe(b)
    names = [*one, *(name for name in other if name not in one)]
    if type(a) is not type(b):
        names = [name for name in names if name in one and name in other]
    rows = {n: (one.get(n), other.get(n)) for n in names if one.get(n) != other.get(n)}
    return Difference({n: _first_lines(*row) if n.startswith(TEXT) else row for n, row in rows.items()})


def _first_lines(*texts: object) -> tuple[object, object]:
    """Return the first lines in which two texts differ, with their number; None where a text has ended."""
    lines = (enumerate(str(text).split("\n") if text else (), 1) for text in texts)
    pairs = zip_longest(*([f"line {number}: {line}" for number, line in own] for own in lines))
    one, other = next(pair for pair in pairs if pair[0] != pair[1])
    return one, other


def _describe(given: object) -> dict[str, object]:
    if isinstance(given, Plan):
        least = "" if given.simulated else "least "
        sizes = {f"{least}{name}": getattr(given, name) for name in ("step_seconds", "memory_bytes")}
        found = {**given.options, **sizes}
        found.update((f"seconds of {name}", seconds) for name, seconds in given.breakdown.items())
    elif isinstance(given, CompiledProgram):
        found = _describe_program(given)
    else:
        raise TypeError(f"diff compares plans and programs, not a {type(given).__name__}")
    return found | {"mesh": str(found["mesh"])}


def _describe_program(program: CompiledProgram) -> dict[str, object]:
    manifest, mesh = program.manifest, program.mesh
    names = ["mesh", "schedule", "num_model_chunks", "microbatch_size", "num_microbatches"]
    names += ["scatter_gather", "seed", "autocast"]
    found: dict[str, object] = {name: getattr(manifest, name) for name in names}
    found |= {} if program.options is None else vars(program.options)
    for rank in range(mesh.pipeline):
        own = {name for stage in manifest.stages[rank :: mesh.pipeline] for name in stage.parameters}
        held = (p for p in map(manifest.parameters.__getitem__, own) if p.kind == "parameter")
        found[f"parameters on pipeline rank {rank}"] = sum(prod(p.local_shape(mesh.axes)) for p in held)
    for stage in manifest.stages[:-1]:
        found[f"stage {stage.index} sends"] = tuple((value.name, value.shape) for value in stage.sends)
    for entry in program.log:
        name = f"pass {entry.split()[0].rstrip(':')}"
        found[name] = f"{found[name]}; {entry}" if name in found else entry
    for index, shape in enumerate(program.shapes):
        behind = f" of shape {index}" * (index > 0)
        found.update((f"input {i.name}{behind}", i) for i in shape.manifest.inputs)
        found.update((f"argument {name}{behind}", value) for name, value in shape.manifest.fixed.items())
        found.update((f"values of {n}{behind}", hash_values(b, b.dtype)) for n, b in shape.buffers.items())
        found.update((f"{TEXT} {rank}{behind}", text) for rank, text in enumerate(shape.texts))
    return found


def _show(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
