"""Load a compiled program from the folder that it was saved in."""

from dataclasses import replace
from pathlib import Path

from torch import nn

from autoptd.capture.quantized_modules import read_quantized
from autoptd.check.program import check_program
from autoptd.compiled import CompiledProgram
from autoptd.description import write_title
from autoptd.input_shapes import naming_program
from autoptd.runtime.launch import end_with_launcher
from autoptd.text.folder import load_folder
from autoptd.text.reader import shape_folder, trace_program
from autoptd.weights.sources import check_parameters


def load(folder: str | Path, model: nn.Module | None = None) -> CompiledProgram:
    """Load the program that `CompiledProgram.save` wrote, edits included: stages are traced anew from the texts.

    `model` is the one that was compiled, for `verify`, `explain` and `bind`. Runs the texts' code. OSError for missing
    files, ValueError for a text that does not trace, or another model; `ProgramError` for contradictions.
    """
    end_with_launcher()
    name = Path(folder).resolve().name
    first = _load(Path(folder), name)
    further = (_load(Path(folder) / shape_folder(n), name) for n in range(1, first.manifest.num_shapes))
    result = replace(first, further=tuple(further), model=model)
    result.check_shapes()
    if model is not None:
        check_parameters(result.manifest, read_quantized(model))
    return result


def _load(folder: Path, name: str) -> CompiledProgram:
    texts, manifest, buffers = load_folder(folder)
    program = trace_program(texts, manifest, buffers=buffers)
    title = write_title(name, manifest.parameters)
    result = CompiledProgram(program.stages, program.log, texts, manifest, buffers, title)
    with naming_program(manifest):
        check_program(manifest, program.stages, result.schedule)
    return result
