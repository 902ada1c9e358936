"""Write one readable Python program per pipeline rank, which is what runs, and a text after each pass.

Stage k is a function ``stage_k`` of pipeline rank k mod p. The same program gives the same bytes.
"""

import os
import textwrap
from collections.abc import Mapping, Sequence
from itertools import groupby
from math import prod
from pathlib import Path

from torch import fx

from autoptd.passes.cost.work import forward_work
from autoptd.passes.ir.nodes import info, module_path, nodes_in, walk
from autoptd.passes.ir.program import Program, Stage, constants_made, recomputed_groups
from autoptd.runtime.comm.transfer import is_scattered
from autoptd.runtime.program.manifest import Boundary, Manifest, StageInterface
from autoptd.runtime.program.mesh import Mesh
from autoptd.runtime.program.schedule import Schedule
from autoptd.runtime.program.schedule_text import format_schedule
from autoptd.text.comments import find_headings, write_bytes, write_value_shape
from autoptd.text.expressions import Names, quote, write_value
from autoptd.text.statements import WIDTH, align, write_body, write_calls, write_comment, write_heading

ADVICE = "This text is what runs. Edit it, and autoptd.load(folder) runs the edit; check() and verify() judge it."


def emit_texts(program: Program, manifest: Manifest, schedule: Schedule, *, title: str) -> tuple[str, ...]:
    """Write one program per pipeline rank of a cut `program`.

    `schedule` has one row of actions per pipeline rank; `title` names the model ("GPT-24, 16 heads"). ValueError for
    what it cannot write.
    """
    headings, mesh = find_headings(program.stages), program.mesh
    log = [line for entry in program.log for line in _wrap(entry, "    ")]
    totals = []
    for index, stage in enumerate(program.stages):
        size = sum(prod(p.local_shape(mesh.sizes)) * p.dtype.itemsize for p in stage.parameters.values())
        work = sum(forward_work(node).flops for node in stage.graph.nodes) / 1e9
        held = f"{work:.3g} GFLOP forward, {write_bytes(size)} of parameters per rank"
        totals.append(_wrap(f"stage {index}: {_find_range(stage)}: {held}", "    "))
    texts = []
    for rank in range(mesh.pipeline):
        indices = range(rank, len(program.stages), mesh.pipeline)
        functions = [_write_stage(program.stages[index], manifest, index, headings) for index in indices]
        functions.append(_write_constants([program.stages[index] for index in indices]))
        body = [line for function in functions if function for line in ["", "", *function]]
        lead = [*_first_lines(mesh, rank, title), *log, *(line for i in indices for line in totals[i])]
        lead = [line.replace("\\", "\\\\").replace('"', "'").rstrip() for line in [*lead, *_wrap(ADVICE)]]
        lines = [f'"""{lead[0]}', *lead[1:], '"""', ""]
        lines += ["import torch", ""] if any("torch." in line for line in body) else []
        lines.append("from autoptd.runtime import aten, collectives, kernels")
        if any(recomputed_groups(program.stages[index].graph) for index in indices):
            lines.append("from autoptd.runtime.recomputation import recompute")
        lines += ["", 'SCHEDULE = """', *format_schedule(schedule[rank]).splitlines(), '"""', *body, ""]
        texts.append("\n".join(lines))
    return tuple(texts)


def _first_lines(mesh: Mesh, rank: int, title: str) -> list[str]:
    peers = f"{mesh.tensor} tensor x {mesh.data} data ranks"
    left = f"Pipeline rank {rank} of {mesh.pipeline}, on each of its {peers}."
    right = f"{title}, {mesh}" if title else str(mesh)
    fits = len(left) + len(right) + 6 <= WIDTH
    return [left + right.rjust(WIDTH - 3 - len(left))] if fits else [left, right]


def _wrap(text: str, inner: str = "") -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent=inner, break_long_words=False, break_on_hyphens=False)


def _find_range(stage: Stage) -> str:
    """Return the first and the last module of a stage: ``h.6.ln_1 - h.11.mlp``."""
    paths = [path for node in stage.graph.nodes if (path := module_path(node))]
    return " - ".join(dict.fromkeys([*paths[:1], *paths[-1:]])) or "loss"


def _write_stage(stage: Stage, manifest: Manifest, index: int, headings: Mapping[str, str]) -> list[str]:
    nodes = list(stage.graph.nodes)
    names = Names(nodes)
    lines = _write_signature(manifest, index, [n for n in nodes if n.op == "placeholder"], names)
    lines += [*write_body(stage, names, headings, manifest.mesh), ""]
    return lines + _write_return(manifest, manifest.stages[index], nodes[-1], names)


def _write_signature(manifest: Manifest, index: int, taken: Sequence[fx.Node], names: Names) -> list[str]:
    interface, values = manifest.stages[index], taken[1:]
    came = [f"from stage {index - 1}, {_crossing(manifest, b, 'gathered')}" for b in interface.receives]
    shapes = [write_value_shape(node, manifest.mesh) for node in values]
    pairs = zip(shapes, [*came, *["batch"] * len(interface.inputs)], strict=True)
    comments = [write_comment(*pair, columns=len(values) == 1) for pair in pairs]
    head = f"def stage_{index}("
    if len(values) < 2:
        arguments = ", ".join(["rank", "p", *(names[node] for node in values)])
        return align([(f"{head}{arguments}):", "".join(comments))])
    rows = align([(f"    {names[node]},", note) for node, note in zip(values, comments, strict=True)])
    return [head, "    rank,", "    p,", *rows, "):"]


def _crossing(manifest: Manifest, boundary: Boundary, done: str) -> str:
    """Return the bytes that cross per rank of a boundary tensor, and how: `done` is scattered or gathered."""
    if is_scattered(boundary, manifest.mesh.tensor, manifest.scatter_gather):
        return f"{write_bytes(boundary.bytes // manifest.mesh.tensor)} per rank, {done}"
    return f"{write_bytes(boundary.bytes)} per rank"


def _write_return(manifest: Manifest, interface: StageInterface, output: fx.Node, names: Names) -> list[str]:
    values = nodes_in(output.args[0])
    codes = [write_value(node, names) for node in values]
    to = f"to stage {interface.index + 1}, "
    notes = [to + _crossing(manifest, boundary, "scattered") for boundary in interface.sends] or [""]
    notes += [f"output {result.name}" for result in interface.outputs]
    shapes = [write_value_shape(node, manifest.mesh) for node in values]
    comments = [write_comment(shape, note) for shape, note in zip(shapes, notes, strict=True)]
    if len(values) == 1:
        return align([(f"    return {codes[0]}", comments[0])])
    rows = [(f"        {code},", comment) for code, comment in zip(codes, comments, strict=True)]
    return ["    return (", *align(rows), "    )"]


def _write_constants(stages: Sequence[Stage]) -> list[str]:
    """Write ``constants(p)``: every constant of these stages once; empty if there is none."""
    names, lines = Names(device=None), list[str]()
    result: dict[str, str] = {}
    for stage in stages:
        wanted = {n: node for n, node in constants_made(stage.constants).items() if n not in result}
        needed = set(walk(nodes_in(wanted)))
        members = [node for node in stage.constants.nodes if node in needed]
        for node in members:
            names.add(node)
        made = (node for node in members if node.op == "call_function")
        for path, run in groupby(made, lambda node: info(node).path):
            calls = list(run)
            lines += ["", write_heading(path or "model", info(calls[0]).line)]
            lines += write_calls(calls, names, Mesh(1, 1, 1))
        result.update({name: write_value(node, names) for name, node in wanted.items()})
    if not result:
        return []
    rows = [f"        {quote(name)}: {value}," for name, value in result.items()]
    head = align([("def constants(p):", "# runs once, when weights are bound")])
    return [*head, *lines[1:], "", "    return {", *rows, "    }"]


def keep_text(program: Program, name: str) -> None:
    """Write log and stages after the pass `name` into the folder of AUTOPTD_PASSES, if set; only rank 0 does."""
    if (folder := os.environ.get("AUTOPTD_PASSES")) and os.environ.get("RANK", "0") == "0":
        Path(folder).mkdir(parents=True, exist_ok=True)
        headings, lines = find_headings(program.stages), [*program.log]
        for index, stage in enumerate(program.stages):
            lines += ["", f"stage {index}", "", *write_body(stage, Names(stage.graph.nodes), headings, program.mesh)]
        number = len(list(Path(folder).glob("*.txt")))
        path = Path(folder) / f"{number:02d}_{name.replace(' ', '_')}.txt"
        path.write_text("\n".join([*lines, ""]), encoding="utf-8")
