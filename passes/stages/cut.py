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
from typing import TypeVar

from torch import fx

from autoptd.passes.cost.cluster import Cluster
from autoptd.passes.cost.schedule_times import live_microbatches
from autoptd.passes.ir.nodes import info, wants_gradient, where
from autoptd.passes.ir.program import Program, Stage, constants_graph, constants_made
from autoptd.passes.stages.choice import Pipeline, choose_cut
from autoptd.passes.stages.cost_sequence import Memory
from autoptd.passes.stages.fused_order import FusedOrder
from autoptd.passes.stages.solver import Cut
from autoptd.passes.structure.linear_order import Row
from autoptd.runtime.program.manifest import Boundary
from autoptd.runtime.program.schedule import make_schedule

MAX_CUT_ATTEMPTS = 8
Made = TypeVar("Made")


def find_cut(
    fused_order: FusedOrder,
    *,
    num_stages: int,
    schedule: str = "interleaved_1f1b",
    num_microbatches: int | None = None,
    cluster: Cluster | None = None,
    reserved_bytes: Sequence[int] = (),
) -> Cut:
    """Return the cut into `num_stages`, stage k for pipeline rank k mod p.

    Of several cuts the shortest step in `schedule` decides, with `num_microbatches` (default 8 p). The costs are times
    on `cluster`, whose memory limits parameters, gradients, Adam's state, activations in flight, the backward of one
    recomputed group, and each rank's `reserved_bytes`; the log says if none fits. Default: "dgx-a100", of any memory.

    Raises ValueError if there are fewer cuttable units than stages.
    """
    pipeline = fused_order.program.mesh.pipeline
    m = 8 * pipeline if num_microbatches is None else num_microbatches
    described = cluster or Cluster.load("dgx-a100")
    memory = None
    if cluster is not None:
        static, activation, working = fused_order.memory
        actions = make_schedule(schedule, pipeline, m, num_stages // pipeline)
        alive = live_microbatches(actions, num_stages, lasting=cluster.device.has_graphs)
        reserved = [working + more for more in reserved_bytes or [0] * pipeline]
        memory = Memory(static, activation, alive, reserved, int(cluster.device.memory_bytes))
    times = fused_order.times(described)
    cut = choose_cut(Pipeline(times, schedule, pipeline, m, num_stages // pipeline), memory)
    return replace(cut, entry=_describe(cut, pipeline, described.name))


def fit_cut(
    find: Callable[[Sequence[int]], Cut], make: Callable[[Cut], tuple[Made, Sequence[int]]], limit: int
) -> tuple[Cut, Made, Sequence[int]]:
    """Return a cut, its program made by `make`, and the bytes of each rank: at most `limit` if such a cut is found.

    Otherwise return the leanest cut tried. `find` counts neither receive buffers nor everything that a backward holds:
    if the program exceeds the limit, `find` is called again with the uncounted bytes of each rank reserved. These
    belong to one cut, and another may hold less: if no cut has so much room, half of the addition is tried.
    """
    made: dict[tuple[int, ...], tuple[Cut, Made, Sequence[int]]] = {}
    reserved: Sequence[int] = ()
    above: Sequence[int] = ()  # for which there is no cut
    for _ in range(MAX_CUT_ATTEMPTS):
        found = find(reserved)
        if made and found.overflow:
            above = reserved
        else:
            known = reserved or [0] * len(found.held)
            fresh = found.positions not in made
            if fresh:
                made[found.positions] = found, *make(found)
                memory = made[found.positions][2]
            if max(memory) <= limit or found.overflow or not (fresh or above):
                break
        if above:
            reserved = [(low + high) // 2 for low, high in zip(known, above, strict=True)]
        else:
            rows = zip(known, found.held, memory, strict=True)
            reserved = [own + max(0, real - counted) for own, counted, real in rows]
    return min(made.values(), key=lambda own: max(own[2]))


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


def _describe(cut: Cut, pipeline: int, name: str) -> str:
    mean = sum(cut.stage_costs) / pipeline
    return (
        f"cut_stages {len(cut.stage_costs)} stages on {pipeline} pipeline ranks, the slowest "
        f"{cut.bottleneck / 1e6:.3g} ms of forward and backward a microbatch on {name}: "
        f"{cut.bottleneck / mean:.3f} of the mean, {cut.gap:.1%} above the lower bound ({cut.method})"
        + (f"; {cut.overflow}" if cut.overflow else "")
    )
