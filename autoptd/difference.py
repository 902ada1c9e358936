"""Compare two plans or programs."""

from difflib import unified_diff

from autoptd.compiled import CompiledProgram
from autoptd.planning.plan import Plan
from autoptd.runtime.program.manifest_json import to_json
from autoptd.runtime.weights.slices import hash_values
from autoptd.text.reader import text_filename


def diff(a: Plan | CompiledProgram, b: Plan | CompiledProgram) -> str:
    """Return the lines in which two plans, or two programs, differ, as a unified diff; "" if none do.

    Of programs it has options, log, manifest, texts, and hashes of buffers.
    """
    one, other = _describe(a), _describe(b)
    return "\n".join(
        line
        for name in one | other
        for line in unified_diff(one.get(name, []), other.get(name, []), name, name, n=0, lineterm="")
    )


def _describe(given: Plan | CompiledProgram) -> dict[str, list[str]]:
    """Return lines by where they stand."""
    if isinstance(given, Plan):
        return {"plan": [f"{name}: {value}" for name, value in vars(given).items()]}
    options = {} if given.options is None else vars(given.options)
    found = {"options": [f"{name}: {value}" for name, value in options.items()], "log": [*given.log]}
    for number, shape in enumerate(given.shapes):
        found[f"manifest {number}"] = to_json(shape.manifest).splitlines()
        found[f"buffers {number}"] = [f"{name}: {hash_values(b, b.dtype)}" for name, b in shape.buffers.items()]
        found |= {text_filename(shape.manifest, r): text.splitlines() for r, text in enumerate(shape.texts)}
    return found
