"""Compile every wild model for two tensor ranks and verify it, or see it refused with a way out; print the table.

python -m samples.wild              # the table
python -m samples.wild --write      # and keep it in samples/wild/README.md
"""

from __future__ import annotations

import argparse
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

import autoptd
from autoptd.compiled import CompiledProgram
from autoptd.passes.cost.work import forward_work
from samples.wild import blocks, flex, habits, losses
from samples.wild.decoder import Case, make_inputs

CASES = (*losses.CASES, *blocks.CASES, *flex.CASES, *habits.CASES)
PAGE = Path(__file__).with_name("README.md")
ABOUT = """\
Small models in the styles of public code bases, each for a kind of thing that people write.

A share above one half is work that both tensor ranks do: the norms, and the routers of mixtures, at most 0.510. Two
models do more, for reasons that their programs' logs give. In "reversed gradients" (0.521) the lone linear in the
residual stays whole, because a layer norm normalises over its result. In "a loss with its gradient in forward" (0.530)
the head stays whole, because its logits go straight into a function with its own backward, which no rule divides.
"""


@dataclass(frozen=True)
class Found:
    """What became of a case: the `share` of FLOPs on one of two tensor ranks and the worst error, or the refusal."""

    share: float = 0.0
    error: float = 0.0
    refused: str = ""


def judge(case: Case) -> Found:
    """Compile a case for the meshes (1, 1, 1) and (2, 1, 1), and verify the second."""
    torch.manual_seed(0)
    model = case.make()
    options = {"example_inputs": make_inputs(), "num_microbatches": 2, **case.options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            alone, divided = (autoptd.compile(model, (t, 1, 1), **options) for t in (1, 2))
        except (ValueError, TypeError) as error:
            return Found(refused=str(error))
        report = divided.verify()
    return Found(count_flops(divided) / count_flops(alone), max(report.errors.values()))


def count_flops(program: CompiledProgram) -> int:
    """Return the FLOPs of one rank's forward."""
    return sum(forward_work(node).flops for stage in program.stages for node in stage.graph.nodes)


def list_rows() -> Iterator[str]:
    """Yield the rows of the table."""
    for case in CASES:
        found = judge(case)
        result = found.refused or f"{found.share:.3f} | {found.error:.0e}"
        shown = re.sub(r"\S*/", "", result.replace("\n", " ")).replace("|", "\\|") if found.refused else result
        yield f"| {case.name} | {case.style} | {case.written} | {f'refused: {shown} | ' if found.refused else shown} |"


def main() -> None:
    """Print the table, and write it with ``--write``."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help=f"keep the table in {PAGE.name}")
    write = parser.parse_args().write
    lines = ["| model | in the style of | lines written | share of FLOPs at t = 2 | verify |", "| --- " * 5 + "|"]
    print("\n".join(lines))
    for row in list_rows():
        lines.append(row)
        print(row, flush=True)
    if write:
        PAGE.write_text(f"# Wild models\n\n{ABOUT}\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
