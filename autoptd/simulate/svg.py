"""A simulated step as a picture like SC21 Figure 4."""

from collections.abc import Iterator, Sequence
from colorsys import hls_to_rgb
from pathlib import Path

from autoptd.runtime.comm.trace import WORDS, Phase, Rows, TimelineEntry
from autoptd.runtime.program.schedule import Action, Kind

WIDTH, ROW, GAP, MARGIN = 1200.0, 22.0, 4.0, 56.0
Colours = Sequence[tuple[str, str]]  # fill and ink, see `box_colours`
PHASES = {"data": "#d97a2b", "optimizer": "#8064a2"}


def write_svg(path: str | Path, rows: Rows, phases: Sequence[Phase]) -> None:
    """Write the step as a picture: a row per pipeline rank, time to the right, microbatch numbers where they fit.

    As in SC21 Figure 4, forwards are blue, backwards green, and later chunks of a rank lighter.
    """
    last = max([row[-1].end for row in rows] + [phase.end for phase in phases])
    scale = (WIDTH - MARGIN) / last
    height = len(rows) * (ROW + GAP) + 2 * ROW
    colours = box_colours(1 + max(entry.action.stage for row in rows for entry in row) // len(rows))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH:g}" height="{height:g}" '
        f'viewBox="0 0 {WIDTH:g} {height:g}" font-family="sans-serif" font-size="10">',
        f'<rect width="{WIDTH:g}" height="{height:g}" fill="white"/>',
    ]
    for rank, row in enumerate(rows):
        top = rank * (ROW + GAP) + GAP
        lines.append(f'<text x="4" y="{top + 15:g}">rank {rank}</text>')
        spans = [_draw_phase(phase, top, scale) for phase in phases if phase.rank == rank]
        lines += [*_draw_row(row, len(rows), colours, top, scale), *spans]
    lines += _draw_legend(colours, len(rows) * (ROW + GAP) + GAP, last)
    Path(path).write_text("\n".join([*lines, "</svg>"]) + "\n")


def box_colours(chunks: int) -> list[tuple[str, str]]:
    """Return fill and ink of chunk 0's forward, its backward, chunk 1's forward, …; later chunks are lighter."""
    found = []
    for chunk in range(chunks):
        light = 0.36 + 0.36 * chunk / (chunks - 1) if chunks > 1 else 0.42
        for hue, saturation in ((213 / 360, 0.55), (95 / 360, 0.38)):
            red, green, blue = (round(255 * part) for part in hls_to_rgb(hue, light, saturation))
            dark = 0.299 * red + 0.587 * green + 0.114 * blue < 140  # as the eye weighs them
            found.append((f"#{red:02x}{green:02x}{blue:02x}", "#ffffff" if dark else "#111111"))
    return found


def box_code(action: Action, num_ranks: int) -> int:
    """Return the index of a forward or backward in `box_colours`."""
    return 2 * (action.stage // num_ranks) + (action.kind is Kind.BACKWARD)


def _draw_row(
    row: Sequence[TimelineEntry], num_ranks: int, colours: Colours, top: float, scale: float
) -> Iterator[str]:
    entries = [entry for entry in row if entry.action.kind.computes]
    stroke = ' stroke="white" stroke-width="0.6"' * (len(entries) < WIDTH / 4)  # which would hide thinner boxes
    paths: dict[int, list[str]] = {}
    labels = []
    for _, action, start, end in entries:
        left, width = MARGIN + start * scale, (end - start) * scale
        code = box_code(action, num_ranks)
        paths.setdefault(code, []).append(f"M{left:.2f} {top:g}h{width:.2f}v{ROW:g}h-{width:.2f}z")
        if width > 6 * len(str(action.microbatch)) + 2:
            place = f'x="{left + width / 2:.2f}" y="{top + 15:g}" text-anchor="middle"'
            labels.append(f'<text {place} fill="{colours[code][1]}">{action.microbatch}</text>')
    for code, boxes in paths.items():
        yield f'<path d="{"".join(boxes)}" fill="{colours[code][0]}"{stroke}/>'
    yield from labels


def _draw_phase(phase: Phase, top: float, scale: float) -> str:
    left, width = MARGIN + phase.start * scale, (phase.end - phase.start) * scale
    fill = PHASES[phase.name]
    return f'<rect x="{left:.2f}" y="{top:g}" width="{width:.2f}" height="{ROW:g}" fill="{fill}"/>'


def _draw_legend(colours: Colours, top: float, last: float) -> Iterator[str]:
    kinds = {"forward": colours[::2], "backward": colours[1::2]}
    left = MARGIN
    for words, fills in (kinds | {WORDS[name]: [(fill, "")] for name, fill in PHASES.items()}).items():
        for fill, _ in fills:
            yield f'<rect x="{left:g}" y="{top:g}" width="12" height="12" fill="{fill}"/>'
            left += 15
        yield f'<text x="{left + 2:g}" y="{top + 10:g}">{words}</text>'
        left += 24 + 5 * len(words)
    yield f'<text x="{WIDTH - 4:g}" y="{top + 10:g}" text-anchor="end">{last:.4g} s</text>'
