"""Cut the model into p * v pipeline stages at any operators, balanced by cost (SC21 §2.2).

What depends on batch inputs and constants alone (masks, shifted labels, position ids) is computed in every
stage that reads it and never sent. All other operators are one row of items, cut by `cut_sequence`; what
lives across a cut is sent, and passed on by stages in between.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from itertools import pairwise

from torch import fx

from autoptd.passes.ir.nodes import info, wants_gradient, where
from autoptd.passes.ir.program import Program, Stage, constants_graph, constants_made
from autoptd.passes.stages.cost_sequence import Memory
from autoptd.passes.stages.solver import Cut
from autoptd.passes.structure.linear_order import Row
from autoptd.runtime.program.manifest import Boundary

MAX_CUT_ATTEMPTS = 8


def fit_cut(
    find: Callable[[Memory | None], Cut], count: Callable[[Cut], Sequence[int]], memory: Memory
) -> tuple[Cut, Sequence[int]]:
    """Return a cut and the bytes of each rank by `count`: at most the limit of `memory` if such a cut is found.

    Otherwise return the leanest cut tried. `find` returns the best cut within a given memory, which sums items and
    knows neither receive buffers nor the most that a backward holds: if a cut's ranks exceed the limit, `find` is
    called again with what was not counted of each reserved. This belongs to one cut, and another may hold less: if no
    cut has so much room, half of the addition is tried.
    """
    made: dict[tuple[int, ...], tuple[Cut, Sequence[int]]] = {}
    asked: Memory | None = None
    known: Sequence[int] = memory.reserved  # for which there is a cut
    above: Sequence[int] = ()  # for which there is none
    for _ in range(MAX_CUT_ATTEMPTS):
        found = find(asked)
        if asked and not found.fits:
            above = asked.reserved
        else:
            known = asked.reserved if asked else known
            fresh = found.positions not in made
            if fresh:
                made[found.positions] = found, count(found)
            held = made[found.positions][1]
            if max(held) <= memory.limit or not (fresh or above):
                break
            counted = memory.count(found.positions)
        rows = zip(known, above or [real - sums for real, sums in zip(held, counted, strict=True)], strict=True)
        asked = replace(memory, reserved=[(low + high) // 2 if above else max(low, high) for low, high in rows])
    return min(made.values(), key=lambda own: max(own[1]))


def cut_at(program: Program, positions: Sequence[int], entry: str) -> Program:
    """Cut the one stage of `program` before the items (of its `Row`) at `positions`; `entry` is for the log."""
    (stage,) = program.stages
    return program.replace_stages(_build_stages(Row(stage), positions), entry)


def align_cut(program: Program, first: Program, positions: Sequence[int]) -> tuple[int, ...]:
    """Return the cut of the one stage of `program` that corresponds to `positions` in `first`, of another input shape.

    Both are positions of a `Row`'s items, which are matched by their modules and operators, in order. Raises
    ValueError for a cut that is not allowed at its counterpart.
    """
    own, other = Row(program.stages[0]), Row(first.stages[0])
    allowed, aligned = own.allowed(), [0]
    first_calls, calls = ([(info(node).path, node.target) for node in row.items] for row in (other, own))
    blocks = SequenceMatcher(None, first_calls, calls, autojunk=False).get_matching_blocks()
    matched = {block.a + i: block.b + i for block in blocks for i in range(block.size)}
    for position in positions:
        before = max((to for at, to in matched.items() if at < position), default=-1)
        behind = min((to for at, to in matched.items() if at >= position), default=len(own.items))
        fit = [i for i in range(before + 1, behind + 1) if aligned[-1] < i < len(allowed) and allowed[i]]
        if not fit:
            raise ValueError(
                f"the graph of the first input shape is cut before {where(other.items[position])}, but the graph of "
                "this shape cannot be cut there: compile it alone, or for fewer stages"
            )
        aligned.append(fit[0])
    return tuple(aligned[1:])


def boundaries(program: Program) -> tuple[tuple[Boundary, ...], ...]:
    """Return the values that each stage receives from the previous one, in the order of its arguments."""
    return tuple(
        tuple(make_boundary(node) for node in stage.graph.nodes if info(node).role == "boundary")
        for stage in program.stages
    )


def _build_stages(row: Row, positions: Sequence[int]) -> tuple[Stage, ...]:
    crossing: list[list[fx.Node]] = [[] for _ in positions]
    for defined, node in enumerate(row.items):
        for number in range(bisect_right(positions, defined), bisect_right(positions, row.last_use[node])):
            crossing[number].append(node)
    parts = [row.items[start:end] for start, end in pairwise((0, *positions, len(row.items)))]
    behind = [node for node in row.outputs if node not in row.position]  # inputs and the like
    outputs = [[node for node in row.outputs if node in items] for items in map(set, parts)]
    outputs[-1] = [node for node in row.outputs if node in {*outputs[-1], *behind}]
    held = [name_held(row, (*items, *own)) for items, own in zip(parts, outputs, strict=True)]
    # The first stage has the parameters that none uses, so that the model's ``state_dict`` stays whole.
    held[0] |= {n for n, p in row.stage.parameters.items() if p.kind == "parameter"}.difference(*held)
    stages = []
    for number, (items, names) in enumerate(zip(parts, held, strict=True)):
        receives = crossing[number - 1] if number else []
        sends = crossing[number] if number < len(positions) else None
        graph = row.build_graph(items, receives, sends, outputs[number])
        once = constants_graph(constants_made(row.stage.constants), names)
        stages.append(Stage(graph, {n: p for n, p in row.stage.parameters.items() if n in names}, once))
    return tuple(stages)


def name_held(row: Row, items: Iterable[fx.Node]) -> set[str]:
    """Return the names of the tensors that a stage of `items` holds: parameters, and the sources of its constants."""
    names = _loads(row.needed(items))
    return names | _loads(constants_graph(constants_made(row.stage.constants), names).nodes)


def _loads(nodes: Iterable[fx.Node]) -> set[str]:
    return {str(node.target) for node in nodes if node.op == "get_attr"}


def make_boundary(node: fx.Node) -> Boundary:
    value = node.meta["val"]
    (placement,) = info(node).placements
    return Boundary(str(node.target), tuple(value.shape), value.dtype, wants_gradient(node), placement)
