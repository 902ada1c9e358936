"""Write the cut program down: one readable Python program per pipeline rank, which is what runs.

Stage k is a function ``stage_k`` of pipeline rank k mod p. The same program gives the same bytes.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import groupby
from math import prod
from typing import Any

from torch import Tensor, fx

from autoptd.passes.ir.node_info import info
from autoptd.passes.ir.nodes import walk
from autoptd.passes.ir.program import Program, Stage, recomputed_groups
from autoptd.runtime.comm.transfer import is_scattered
from autoptd.runtime.program.manifest import Boundary, Manifest, StageInterface
from autoptd.runtime.program.schedule import Action
from autoptd.runtime.program.schedule_text import format_schedule
from autoptd.text.comments import Headings, stage_bytes, write_bytes, write_shape, write_value_shape
from autoptd.text.expressions import Names, write_value
from autoptd.text.stage_body import write_body
from autoptd.text.statements import WIDTH, align, beside, write_calls, write_comment, write_heading

DEVICE = "rank.device"
ADVICE = (
    "This text is what runs. Edit it, and autoptd.load(folder) runs the edit; check() and verify() judge it."
)


def emit_texts(
    program: Program,
    manifest: Manifest,
    schedule: Sequence[Sequence[Action]],
    *,
    title: str,
    flops: Sequence[int] = (),
) -> tuple[str, ...]:
    """Write one program per pipeline rank of a cut `program`.

    `schedule` has one row of actions per pipeline rank; `title` names the model ("GPT-24, 16 heads"). `flops`, shown
    in the header if given, are each stage's forward floating-point operations for one microbatch on one rank. Raises
    ValueError for a node that cannot be written, or a stage that does not match its interface.
    """
    headings = Headings(program.stages)
    log = [line for entry in program.log for line in _wrap(entry, "    ")]
    return tuple(
        _write_program(program, manifest, schedule[rank], rank, headings, [title, *log], flops)
        for rank in range(program.mesh.pipeline)
    )


def _write_program(
    program: Program,
    manifest: Manifest,
    actions: Sequence[Action],
    rank: int,
    headings: Headings,
    notes: Sequence[str],
    flops: Sequence[int],
) -> str:
    indices = range(rank, len(program.stages), program.mesh.pipeline)
    functions = [_write_stage(program, manifest, index, headings) for index in indices]
    constants = _write_constants([program.stages[index] for index in indices])
    title, *log = notes
    totals = [line for index in indices for line in _stage_lines(program, index, headings, flops)]
    body = "\n".join(line for function in [*functions, constants] for line in ["", "", *function] if function)
    imports = ["import torch\n"] if "torch." in body else []
    modules = ["from autoptd.runtime import aten, collectives, kernels"]
    if any(recomputed_groups(program.stages[index].graph) for index in indices):
        modules.append("from autoptd.runtime.recomputation import recompute")
    return "\n".join(
        [
            *_docstring([*_first_lines(program, rank, title), *log, *totals, *_wrap(ADVICE)]),
            *imports,
            *modules,
            "",
            *['SCHEDULE = """', *format_schedule(actions).splitlines(), '"""'],
            body,
            "",
        ]
    )


def _first_lines(program: Program, rank: int, title: str) -> list[str]:
    mesh = program.mesh
    peers = f"{mesh.tensor} tensor x {mesh.data} data ranks"
    left = f"Pipeline rank {rank} of {mesh.pipeline}, on each of its {peers}."
    right = f"{title}, {mesh}" if title else str(mesh)
    fits = len(left) + len(right) + 6 <= WIDTH
    return [left + right.rjust(WIDTH - 3 - len(left))] if fits else [left, right]


def _stage_lines(program: Program, index: int, headings: Headings, flops: Sequence[int]) -> list[str]:
    held = f"{write_bytes(stage_bytes(program.stages[index], program.mesh.axes))} of parameters"
    work = f"{flops[index] / 1e9:.3g} GFLOP forward, " if flops else ""
    return _wrap(f"stage {index}: {headings.stage_range(index)}: {work}{held} per rank", "    ")


def _docstring(lines: Sequence[str]) -> list[str]:
    escaped = [line.replace("\\", "\\\\").replace('"', "'").rstrip() for line in lines]
    return [f'"""{escaped[0]}', *escaped[1:], '"""', ""]


def _wrap(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _write_stage(program: Program, manifest: Manifest, index: int, headings: Headings) -> list[str]:
    """Write the function of one stage, from its ``def`` to its ``return``."""
    interface, names = manifest.stages[index], Names()
    nodes = list(program.stages[index].graph.nodes)
    for node in nodes:
        names.add(node)
    lines = _write_signature(program, manifest, interface, [n for n in nodes if n.op == "placeholder"], names)
    lines += write_body(program.stages[index], names, headings, program.mesh, DEVICE)
    lines.append("")
    lines += _write_return(manifest, interface, nodes[-1], names)
    return lines


def _write_signature(
    program: Program,
    manifest: Manifest,
    interface: StageInterface,
    placeholders: Sequence[fx.Node],
    names: Names,
) -> list[str]:
    received, tensor = len(interface.receives), program.mesh.tensor
    values = placeholders[1:]
    if len(values) != received + len(interface.inputs) or info(placeholders[0]).role != "rank":
        found = ", ".join(f"{n.name} ({info(n).role})" for n in placeholders)
        raise ValueError(
            f"stage {interface.index} takes {found}; expected rank, {received} received values and the inputs "
            f"{', '.join(interface.inputs) or '(none)'}"
        )
    comments = []
    for number, node in enumerate(values):
        shape = write_value_shape(node, tensor)
        if number < received:
            crossing = _crossing(manifest, interface.receives[number], "gathered")
            note = f"from stage {interface.index - 1}, {crossing}"
        else:
            note = "batch"
        comments.append(write_comment(shape, note, columns=len(values) == 1))
    head = f"def stage_{interface.index}("
    if len(values) == 1:
        return [beside(f"{head}rank, p, {names[values[0]]}):", comments[0])]
    if not values:
        return [f"{head}rank, p):"]
    rows = align([(f"    {names[node]},", note) for node, note in zip(values, comments, strict=True)])
    return [head, "    rank,", "    p,", *rows, "):"]


def _crossing(manifest: Manifest, boundary: Boundary, done: str) -> str:
    """Return the bytes that cross per rank of a boundary tensor, and how: `done` is scattered or gathered."""
    size = boundary.dtype.itemsize * prod(boundary.shape)
    if is_scattered(boundary, manifest.mesh.tensor, manifest.scatter_gather):
        return f"{write_bytes(size // manifest.mesh.tensor)} per rank, {done}"
    return f"{write_bytes(size)} per rank"


def _write_return(manifest: Manifest, interface: StageInterface, output: fx.Node, names: Names) -> list[str]:
    value = output.args[0]
    values: list[Any] = list(value) if isinstance(value, (tuple, list)) else [value]
    text = write_value(tuple(values), names, DEVICE)[1:-1] if len(values) > 1 else ""
    text = text or write_value(value, names, DEVICE)
    tensor = manifest.mesh.tensor
    if not interface.sends:
        shape = write_value_shape(value, tensor) if isinstance(value, fx.Node) else ""
        return [beside(f"    return {text}", f"# {shape}".rstrip())]
    if len(values) != len(interface.sends):
        raise ValueError(f"stage {interface.index} returns {text}; expected {len(interface.sends)} values")
    notes = [
        write_comment(
            _node_shape(node, boundary, tensor),
            f"to stage {interface.index + 1}, {_crossing(manifest, boundary, 'scattered')}",
        )
        for node, boundary in zip(values, interface.sends, strict=True)
    ]
    if len(notes) == 1:
        return [beside(f"    return {text}", notes[0])]
    codes = [f"        {write_value(node, names, DEVICE)}," for node in values]
    return ["    return (", *align(list(zip(codes, notes, strict=True))), "    )"]


def _node_shape(node: object, boundary: Boundary, tensor: int) -> str:
    if isinstance(node, fx.Node) and isinstance(node.meta.get("val"), Tensor):
        return write_value_shape(node, tensor)
    return write_shape(boundary.dtype, boundary.shape)


def _write_constants(stages: Sequence[Stage]) -> list[str]:
    """Write ``constants(p)``: every constant of these stages once; empty if there is none."""
    names, lines = Names(), list[str]()
    result: dict[str, str] = {}
    for stage in stages:
        table: Any = next((n.args[0] for n in reversed(stage.constants.nodes) if n.op == "output"), {})
        wanted = {name: node for name, node in table.items() if name not in result}
        needed = set(walk(node for node in wanted.values() if isinstance(node, fx.Node)))
        members = [node for node in stage.constants.nodes if node in needed]
        for node in members:
            names.add(node)
        made = (node for node in members if node.op == "call_function")
        for path, run in groupby(made, lambda node: info(node).path):
            calls = list(run)
            lines += ["", write_heading(path or "model", info(calls[0]).line)]
            lines += write_calls(calls, names, 1, None)
        result.update({name: write_value(node, names, None) for name, node in wanted.items()})
    if not result:
        return []
    rows = [f"        {write_value(name, names, None)}: {value}," for name, value in result.items()]
    comment = "# runs once, when weights are bound"
    return [beside("def constants(p):", comment), *lines[1:], "", "    return {", *rows, "    }"]
