"""One table on the terminal and, when asked, the same table as a file beside the script."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from autoptd.calibration.fit import describe_processor

RESULTS = Path(__file__).parent / "results"


def describe_machine() -> str:
    """Date, processor, cores, GPU and versions, in one line."""
    card = f"{torch.cuda.get_device_name()}; " if torch.cuda.is_available() else ""
    return (
        f"{datetime.now(UTC):%d %B %Y}; {describe_processor()}, {os.cpu_count()} cores; {card}"
        f"Python {platform.python_version()}, torch {torch.__version__}"
    )


def publish(
    name: str,
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    notes: Sequence[str],
    write: bool,
    *,
    script: str | None = None,
) -> None:
    """Print the table; with `write` also keep it, and how to make it again, as results/<name>.md."""
    table = Table(title=title, caption="\n".join(notes), caption_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    if not write:
        return
    lines = [
        f"# {title}",
        "",
        describe_machine(),
        "",
        f"Again: `python -m samples.benchmarks.{shlex.join([script or name, *sys.argv[1:]])}`",
        "",
    ]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in (columns, ["---"] * len(columns), *rows)]
    lines += ["", *(f"- {note}" for note in notes)]
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.md").write_text("\n".join(lines) + "\n")
