"""Write the program as a text after each pass into the folder named by AUTOPTD_PASSES."""

from __future__ import annotations

import os
from pathlib import Path

from autoptd.passes.ir.program import Program
from autoptd.text.comments import Headings
from autoptd.text.expressions import Names
from autoptd.text.stage_body import write_body
from autoptd.text.writer import DEVICE


def keep_text(program: Program, name: str) -> None:
    """Write the result of the pass `name`, numbered, into the folder of AUTOPTD_PASSES, if set; only rank 0 does."""
    folder = os.environ.get("AUTOPTD_PASSES")
    if folder and os.environ.get("RANK", "0") == "0":
        Path(folder).mkdir(parents=True, exist_ok=True)
        number = len(list(Path(folder).glob("*.txt")))
        path = Path(folder) / f"{number:02d}_{name.replace(' ', '_')}.txt"
        path.write_text(write_stages(program), encoding="utf-8")


def write_stages(program: Program) -> str:
    """Write the log of the passes so far, and the lines of all stages as a rank program has them."""
    headings, lines = Headings(program.stages), [*program.log]
    for index, stage in enumerate(program.stages):
        names = Names()
        for node in stage.graph.nodes:
            names.add(node)
        lines += ["", f"stage {index}", "", *write_body(stage, names, headings, program.mesh, DEVICE)]
    return "\n".join([*lines, ""])
