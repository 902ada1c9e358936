"""Cut the graph of one input shape where that of another was cut, so that the same stages have the same parameters."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher

from autoptd.passes.ir.node_info import info
from autoptd.passes.ir.nodes import where
from autoptd.passes.ir.program import Program
from autoptd.passes.structure.linear_order import Row


def align_cut(program: Program, first: Program, positions: Sequence[int]) -> tuple[int, ...]:
    """Return the cut of the one stage of `program` that corresponds to `positions` in `first`, of another input shape.

    Both are positions of a `Row`'s items, which are matched by their modules and operators, in order. Raises
    ValueError for a cut that is not allowed at its counterpart.
    """
    own, other = Row(program.stages[0]), Row(first.stages[0])
    allowed, aligned = own.allowed(), [0]
    matched = dict(_match(other, own))
    for position in positions:
        before = max((to for at, to in matched.items() if at < position), default=-1)
        behind = min((to for at, to in matched.items() if at >= position), default=len(own.items))
        fit = [i for i in range(before + 1, behind + 1) if aligned[-1] < i < len(allowed) and allowed[i]]
        if not fit:
            raise ValueError(
                f"the first shape's graph is cut before {where(other.items[position])}, and this one cannot be cut "
                "there: compile it alone, or for fewer stages"
            )
        aligned.append(fit[0])
    return tuple(aligned[1:])


def _match(first: Row, own: Row) -> list[tuple[int, int]]:
    """Positions of items that are the same call, in both orders ascending."""
    one, other = ([(info(node).path, node.target) for node in row.items] for row in (first, own))
    blocks = SequenceMatcher(None, one, other, autojunk=False).get_matching_blocks()
    return [(block.a + i, block.b + i) for block in blocks for i in range(block.size)]
