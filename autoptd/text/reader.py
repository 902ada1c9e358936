"""Read program texts back into stages by running each of their functions once on traced values.

An edited program is thus checked like any other: the text is judged, never a stored graph.
"""

import ast
import inspect
from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor, fx

from autoptd.check.program import check_manifest
from autoptd.passes.ir.nodes import Propagation, Role, change_info
from autoptd.passes.ir.program import Program, Stage, constants_graph, constants_made
from autoptd.runtime.program.manifest import Boundary, Input, Manifest
from autoptd.runtime.program.program_text import ProgramText, read_program
from autoptd.text.recorder import META, Recorder, Targets


def trace_program(texts: Sequence[str], manifest: Manifest, *, buffers: Mapping[str, Tensor] | None = None) -> Program:
    """Rebuild the cut program from its `texts`, one per pipeline rank, with meta tensors as values.

    This runs the texts' code. ``constants(p)`` may read `buffers` besides the manifest's own. The ``line`` of a node is
    its place in the text; its ``path`` and ``placement`` keep their defaults, as a text does not have them. Raises
    ValueError, with file and line, for an untraceable text, and `ProgramError` for a manifest that no text can follow.
    """
    return trace_texts(read_texts(texts, manifest), manifest, buffers or {})


def read_texts(texts: Sequence[str], manifest: Manifest) -> tuple[ProgramText, ...]:
    """Read the texts of all pipeline ranks. This runs their code."""
    return tuple(read_text(text, manifest, rank) for rank, text in enumerate(texts))


def read_text(text: str, manifest: Manifest, pipeline_rank: int) -> ProgramText:
    """Read the text of one pipeline rank. This runs its code."""
    return read_program(text, text_filename(manifest, pipeline_rank))


def trace_texts(texts: Sequence[ProgramText], manifest: Manifest, buffers: Mapping[str, Tensor]) -> Program:
    """Rebuild the cut program from texts that were read; see `trace_program`."""
    check_manifest(manifest)
    propagation = Propagation(manifest.mesh, META)
    whole = {name: _meta(buffer.shape, buffer.dtype) for name, buffer in buffers.items()}
    whole |= {n: _meta(p.shape, p.dtype) for n, p in manifest.parameters.items() if p.kind != "constant"}
    stages: dict[int, Stage] = {}
    for rank, program in enumerate(texts):
        expected = [s.index for s in manifest.stages if s.index % manifest.mesh.pipeline == rank]
        if list(program.stages) != expected:
            found, wanted = (", ".join(f"stage_{i}" for i in own) for own in (program.stages, expected))
            raise ValueError(f"{program.filename} has {found}; expected {wanted} on pipeline rank {rank}")
        recorder = Recorder(program.filename, _find_targets(program.text), whole, propagation)
        constants = constants_made(recorder.record(program.constants, recorder.parameters))
        for index in program.stages:
            graph = _trace_stage(program, index, manifest, propagation)
            parameters = {name: manifest.parameters[name] for name in manifest.stages[index].parameters}
            stages[index] = Stage(graph, parameters, constants_graph(constants, parameters))
    ordered = tuple(stages[index] for index in range(len(manifest.stages)))
    log = (f"read {len(texts)} program texts",)
    return Program(manifest.mesh, ordered, manifest.inputs, manifest.output, manifest.aliases, log, buffers)


def program_filename(pipeline_rank: int, num_pipeline_ranks: int) -> str:
    """Return ``program_07.py``: the file of a pipeline rank's program."""
    width = max(2, len(str(num_pipeline_ranks - 1)))
    return f"program_{pipeline_rank:0{width}}.py"


def shape_folder(number: int) -> str:
    """Return ``shape_1``: the subfolder of a further input shape's program."""
    return f"shape_{number}"


def text_filename(manifest: Manifest, pipeline_rank: int) -> str:
    """Return the name of a pipeline rank's text in messages: its file in the folder of the first shape."""
    name = program_filename(pipeline_rank, manifest.mesh.pipeline)
    return f"{shape_folder(manifest.shape)}/{name}" if manifest.shape else name


def trace_stages(program: ProgramText, manifest: Manifest) -> dict[int, fx.Graph]:
    """Return the graphs of one text's stages by index; see `trace_program`."""
    propagation = Propagation(manifest.mesh, META)
    return {index: _trace_stage(program, index, manifest, propagation) for index in program.stages}


def _trace_stage(program: ProgramText, index: int, manifest: Manifest, propagation: Propagation) -> fx.Graph:
    function, interface = program.stages[index], manifest.stages[index]
    inputs = {value.name: value for value in manifest.inputs}
    values: list[Boundary | Input] = [*interface.receives, *(inputs[name] for name in interface.inputs)]
    names = list(inspect.signature(function).parameters)
    if len(names) != 2 + len(values):
        expected = ", ".join(["rank", "p", *(value.name for value in values)])
        raise ValueError(
            f"{program.filename}:{function.__code__.co_firstlineno}: stage_{index} takes ({', '.join(names)}); "
            f"expected {2 + len(values)} arguments ({expected})"
        )
    tensors = {name: manifest.parameters[name] for name in interface.parameters}
    parameters = {name: _meta(p.local_shape(manifest.mesh.sizes), p.dtype) for name, p in tensors.items()}
    recorder = Recorder(program.filename, _find_targets(program.text), parameters, propagation)
    rank = recorder.placeholder("rank", "rank", "rank", propagation.rank)
    traced = []
    for name, value in zip(names[2:], values, strict=True):
        role: Role = "boundary" if isinstance(value, Boundary) else "input"
        traced.append(recorder.placeholder(name, value.name, role, _meta(value.shape, value.dtype)))
        if isinstance(value, Boundary):
            change_info(traced[-1].node, requires_grad=value.requires_grad)
    graph = recorder.record(function, rank, recorder.parameters, *traced)
    change_info(graph.output_node(), outputs=interface.outputs)
    return graph


def _meta(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


@lru_cache(maxsize=1)
def _find_targets(text: str) -> Targets:
    """Return the names that each line of the text assigns to."""
    found: dict[int, tuple[str, ...]] = {}
    for statement in ast.walk(ast.parse(text)):
        if isinstance(statement, ast.Assign):
            names = tuple(part.id for part in ast.walk(statement.targets[0]) if isinstance(part, ast.Name))
            lines = range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)
            found.update(dict.fromkeys(lines, names))
    return found
