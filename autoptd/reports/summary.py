"""The text of ``print(program)``: the decisions, and their costs."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from textwrap import wrap

from autoptd.reports.overview import Overview, StageOverview
from autoptd.runtime.program.mesh import Mesh
from autoptd.simulate.step import Simulation
from autoptd.text.comments import write_bytes

SHOWN_STAGES = 16  # of a longer table, equal neighbours are left out
SHOWN_NAMES = 3
PATH_WIDTH = 22
WIDTH = 110

Row = tuple[str, ...]


def summarize(program: Overview) -> str:
    """Write mesh, schedule, stages, communication, tied parameters and the passes' log as plain text.

    Bytes and FLOPs are one rank's, of one microbatch; FLOPs of the forward alone.
    """
    lines = [*headline(program), "", *_table(program.stages), "", *_describe_all(program)]
    if program.log:
        lines += ["", "passes", *(f"  {entry}" for entry in program.log)]
    return "\n".join(line for long in lines for line in _wrap(long))


def headline(program: Overview) -> Iterator[str]:
    """Return the lines of the model, its mesh and its schedule."""
    mesh, m, v = Mesh(*program.mesh), program.num_microbatches, program.num_model_chunks
    yield program.title
    yield f"{mesh}: {mesh.size} rank{'s' * (mesh.size > 1)}"
    yield (
        f"schedule {program.schedule}: {m} microbatches of {program.microbatch_size} per replica and "
        f"step, {program.global_batch} sequences in all; {v} model chunk{'s' * (v > 1)} per pipeline rank"
    )
    parts = "(v*m)" if v > 1 else "m"
    yield f"ideal bubble (p-1)/{parts} = {mesh.pipeline - 1}/{v * m} = {program.ideal_bubble:.1%}"
    if len(program.shapes) > 1:
        yield f"{len(program.shapes)} input shapes, the first here: microbatches of {'; or '.join(program.shapes)}"


# Stages

_HEAD: Row = ("stage", "rank", "modules", "", "parameters", "GFLOP", "sends", "unscattered")


def _table(stages: Sequence[StageOverview]) -> Iterator[str]:
    shown = [list(map(_shorten, row)) for row in (_HEAD, *_list_stages(stages))]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    for row in shown:
        cells = (f"{cell:{'<' if i in (2, 3) else '>'}{widths[i]}}" for i, cell in enumerate(row))
        yield "  ".join(cells)


def _list_stages(stages: Sequence[StageOverview]) -> list[Row]:
    """Return a row per stage under `_HEAD`; in a long table, equal neighbours are one row of dots."""
    rows, dots = [list_cells(stage) for stage in stages], ("...",) * len(_HEAD)
    if len(rows) <= SHOWN_STAGES:
        return rows
    shown = rows[:1]
    for before, row, behind in zip(rows, rows[1:], rows[2:], strict=False):
        shown.append(dots if before[4:] == row[4:] == behind[4:] else row)
    shown.append(rows[-1])
    return [row for row, _ in groupby(shown)]


def list_cells(stage: StageOverview) -> Row:
    """Return the cells of a stage's row, under `_HEAD`."""
    sends = (stage.sent_bytes, stage.unscattered_bytes)
    return (
        str(stage.index),
        str(stage.pipeline_rank),
        stage.first,
        stage.last,
        f"{stage.parameters:,}",
        format_number(stage.flops / 1e9),
        *(write_bytes(size) if stage.unscattered_bytes else "" for size in sends),
    )


def _shorten(path: str) -> str:
    return path if len(path) <= PATH_WIDTH else f"..{path[2 - PATH_WIDTH :]}"


def format_seconds(seconds: float) -> str:
    """Format "1.5 ms"."""
    unit, size = next((u for u in (("s", 1.0), ("ms", 1e-3)) if seconds >= u[1]), ("µs", 1e-6))
    return f"{format_number(seconds / size)} {unit}"


def format_number(number: float) -> str:
    """Format "1,234", "177", "0.0123": three digits, and all before the point."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def list_numbers(simulation: Simulation) -> dict[str, str]:
    """Return the numbers of a simulated step in words."""
    return {
        "step": format_seconds(simulation.step_seconds),
        "TFLOP/s per device": format_number(simulation.tflops_per_device),
        "model FLOPs utilisation": f"{simulation.mfu:.1%}",
        "bubble over work": f"{simulation.bubble_fraction:.1%}",
    }


# Communication


def _describe_all(program: Overview) -> Iterator[str]:
    """Yield the lines of communication, ties, recomputation and CUDA graphs."""
    if program.mesh[0] > 1:
        communication = program.communication
        traffics = communication.tensor_forward, communication.tensor_backward, communication.tensor_repeated
        forward, backward, again = (f"{one.count} ({write_bytes(one.bytes)})" for one in traffics)
        yield (
            f"tensor collectives per microbatch: forward {forward}, backward {backward}"
            + f", of which recomputation repeats {again}" * bool(communication.tensor_repeated.count)
            + "; the loss reduces three numbers a token" * communication.loss
        )
    yield from describe_sums(program)
    size = write_bytes(most := max(program.slot_bytes))
    rank = program.slot_bytes.index(most)
    yield f"CUDA graphs: slots of microbatches in flight hold at most {size} all the time, on pipeline rank {rank}"


def describe_sums(program: Overview) -> Iterator[str]:
    """Yield the lines of gradient sums over ranks, and of recomputation."""
    partial, (_, _, data) = program.communication.partial, program.mesh
    if partial:
        more = f" and {len(partial) - SHOWN_NAMES} more" if len(partial) > SHOWN_NAMES else ""
        names = ", ".join(partial[:SHOWN_NAMES]) + more
        yield f"summed over the tensor ranks once a step: the gradients of {names}"
    if data > 1:
        yield f"gradients are summed over {data} replicas once a step, then divided"
    for tied in program.tied:
        also = f" (also {', '.join(tied.aliases)})" if tied.aliases else ""
        ranks = ", ".join(map(str, tied.pipeline_ranks))
        yield f"tied: {tied.name}{also} on pipeline ranks {ranks}, gradients summed over them"
    if program.recomputation.groups:
        kept, whole = program.recomputation.kept_bytes, program.recomputation.whole_bytes
        yield (
            f"recomputed in the backward: {program.recomputation.groups} groups; all stages keep "
            f"{write_bytes(kept)} of {write_bytes(whole)} of activations for it"
        )


def _wrap(line: str) -> list[str]:
    """Break a line between words into pieces of at most `WIDTH`, all but the first indented."""
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    return wrap(line, WIDTH, subsequent_indent=indent, break_on_hyphens=False) or [""]
