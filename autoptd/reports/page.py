"""A simulated step as one page for a browser: report.html with the numbers inserted, which needs no network."""

import base64
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path

from autoptd.passes.cost.call_work import describe_uncounted
from autoptd.passes.cost.throughput import format_speed
from autoptd.reports.overview import Overview, StageOverview
from autoptd.reports.summary import describe_sums, format_seconds, headline, list_cells, list_numbers
from autoptd.runtime.comm.trace import TimelineEntry, box_code, box_colours
from autoptd.simulate.step import Simulation
from autoptd.text.comments import write_bytes

TEMPLATE = Path(__file__).parent / "report.html"
TICKS = 10**6  # of a step, in the drawing
MOMENTS = 500  # of a step, in the course of memory
LEVELS = 2000  # of memory, up to the fullest rank's peak
COMMUNICATION = {
    "tensor_forward": "collectives of tensor ranks, forward",
    "tensor_backward": "collectives of tensor ranks, backward",
    "pipeline_forward": "messages between stages, forward",
    "pipeline_backward": "messages between stages, backward",
}


def write_page(
    path: str | Path, program: Overview, simulation: Simulation, reasons: Sequence[str], texts: Sequence[str]
) -> None:
    """Write the page of `program` with its simulated step, the `reasons` that explain it, and its rank `texts`."""
    first, *rest = headline(program)
    reasons = [*reasons, *describe_uncounted(simulation.uncounted)]
    parts = {
        "title": escape(first),
        "headline": "".join(f"<p>{escape(line)}</p>" for line in rest),
        "tiles": "".join(_tiles(simulation)),
        "breakdown": "".join(_breakdown(simulation)),
        "explanation": "".join(f"<li>{escape(line)}</li>" for line in reasons),
        "held": "".join(_held(simulation)),
        "communication": "".join(_communication(program)),
        "stages": "".join(_stages(program.stages, simulation.critical_rank)),
        "log": "\n".join(map(escape, program.log)),
        "data": _pack(_drawing(program, simulation)),
        "texts": _pack(list(texts)),
    }
    page = re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], TEMPLATE.read_text(encoding="utf-8"))
    Path(path).write_text(page, encoding="utf-8", newline="\n")


# Tables


def _tiles(simulation: Simulation) -> Iterator[str]:
    fullest, size = max(simulation.memory_bytes), simulation.cluster.device.usable_bytes
    verdict = "fits" if simulation.fits else "does not fit"
    shown = {
        **list_numbers(simulation),
        **format_speed(simulation.throughput.describe()),
        f"peak memory, {verdict} in {write_bytes(round(size))}": write_bytes(fullest),
        f"predicted, {simulation.dtype}": simulation.cluster.name,
    }
    for words, value in shown.items():
        kind = "" if simulation.fits or "memory" not in words else ' class="bad"'
        yield f"<div{kind}><b>{escape(value)}</b><span>{escape(words)}</span></div>"


def _breakdown(simulation: Simulation) -> Iterator[str]:
    spent = simulation.breakdown
    shares = {name: max(0.0, seconds) / simulation.step_seconds for name, seconds in spent.items()}
    yield f"<p>Pipeline rank {simulation.critical_rank}, which works most.</p><div class='bar'>"
    for name, share in shares.items():
        yield f'<i class="{escape(name)}" style="flex-grow:{share:.5f}" title="{escape(name)}"></i>'
    yield "</div><table>"
    for name, share in shares.items():
        swatch = f'<td><i class="swatch {escape(name)}"></i>{escape(name)}</td>'
        yield f"<tr>{swatch}{_numbers([format_seconds(spent[name]), f'{share:.1%}'])}</tr>"
    yield "</table>"


def _held(simulation: Simulation) -> Iterator[str]:
    rank = simulation.memory_bytes.index(max(simulation.memory_bytes))
    yield f"<p>Pipeline rank {rank} at its peak, the fullest.</p><table>"
    for name, size in simulation.held_bytes.items():
        yield f"<tr><td>{escape(name)}</td>{_numbers([write_bytes(size)])}</tr>"
    yield "</table>"


def _communication(program: Overview) -> Iterator[str]:
    yield "<table><tr><th>each microbatch, one tensor rank, all stages</th>"
    yield '<th class="number">number</th><th class="number">bytes</th></tr>'
    for field, words in COMMUNICATION.items():
        traffic = getattr(program.communication, field)
        if traffic.count:
            yield f"<tr><td>{words}</td>{_numbers([f'{traffic.count:,}', write_bytes(traffic.bytes)])}</tr>"
    if program.communication.gradient_bytes:
        size = write_bytes(program.communication.gradient_bytes)
        yield f"<tr><td>gradients over the replicas, once a step, at most a rank</td>{_numbers(['1', size])}</tr>"
    yield "</table>"
    yield from (f"<p>{escape(line)}</p>" for line in describe_sums(program))


def _stages(stages: Sequence[StageOverview], critical_rank: int) -> Iterator[str]:
    """Yield a row for each stage; the page keeps in view the largest one of the critical rank."""
    critical = max((own for own in stages if own.pipeline_rank == critical_rank), key=lambda own: own.flops)
    for stage in stages:
        index, rank, first, last, *numbers = list_cells(stage)
        names, mark = f"<td>{escape(first)}</td><td>{escape(last)}</td>", ' class="critical"' * (stage is critical)
        yield f"<tr{mark}>{_numbers([index, rank])}{names}{_numbers(numbers)}</tr>\n"


def _numbers(cells: Iterable[object]) -> str:
    return "".join(f'<td class="number">{cell}</td>' for cell in cells)


# Pictures: the page's script draws them from numbers


def _drawing(program: Overview, simulation: Simulation) -> dict[str, object]:
    """Return the data that the script draws. Times are tick differences, so that equal steps compress well."""
    tick = simulation.step_seconds / TICKS
    unit = max(simulation.memory_bytes) / LEVELS
    phases, p = simulation.phases, len(simulation.timeline)
    return {
        "seconds": simulation.step_seconds,
        "ticks": TICKS,
        "colours": box_colours(program.num_model_chunks),
        "capacity": simulation.cluster.device.memory_bytes,
        "rows": [_row(row, p, tick) for row in simulation.timeline],
        "phases": [[own.rank, own.name, round(own.start / tick), round(own.end / tick)] for own in phases],
        "moments": MOMENTS,
        "unit": unit,
        "memory": [_course(course, simulation.step_seconds, unit) for course in simulation.memory],
    }


def _row(row: Sequence[TimelineEntry], num_ranks: int, tick: float) -> dict[str, list[int]]:
    """Return one rank's forwards and backwards in columns: `box_code`, microbatch, gap, length."""
    boxes = [entry for entry in row if entry.action.kind.computes]
    begins, ends = [round(box.start / tick) for box in boxes], [round(box.end / tick) for box in boxes]
    return {
        "code": [box_code(box.action, num_ranks) for box in boxes],
        "microbatch": [box.action.microbatch for box in boxes],
        "gap": [begin - last for begin, last in zip(begins, [0, *ends[:-1]], strict=True)],
        "length": [end - begin for begin, end in zip(begins, ends, strict=True)],
    }


def _course(course: Sequence[tuple[float, int]], step_seconds: float, unit: float) -> list[int]:
    """Return the largest memory in each of `MOMENTS` equal parts of the step, in units."""
    most = [0.0] * MOMENTS
    at, held = 0, course[0][1]
    for seconds, after in (*course, (step_seconds, course[-1][1])):
        place = min(int(seconds / step_seconds * MOMENTS), MOMENTS - 1)
        for moment in range(at, place + 1):
            most[moment] = max(most[moment], held)
        most[place] = max(most[place], after)
        at, held = place, after
    return [round(size / unit) for size in most]


def _pack(value: object) -> str:
    """Compress with zlib and base64 for the page's script: a page of 64 texts stays small."""
    data = json.dumps(value, separators=(",", ":")).encode()
    return base64.b64encode(zlib.compress(data, 9)).decode()
