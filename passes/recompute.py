"""Activation recomputation: which calls run again in the backward, instead of their results being kept (SC21 §3.5).

A group is a run of neighbouring calls with one label (`NodeInfo.recompute`); the label is the name of the
function that they become in the program text. Of a group only what it takes from outside is kept, beside the
parameters. This pass comes before operators are fused: a kernel that joins the end of one layer with the begin
of the next leaves no place at which one value would do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import takewhile
from math import ceil

import torch
from torch import fx

from autoptd.passes.cost.saved_tensors import Ledger, count_bytes
from autoptd.passes.cost.work import forward_work
from autoptd.passes.ir.names import find_containers, short_path
from autoptd.passes.ir.node_info import change_info, info
from autoptd.passes.ir.nodes import values_taken, walk
from autoptd.passes.ir.products import find_factors
from autoptd.passes.ir.program import Program
from autoptd.passes.operators.record import Trait
from autoptd.passes.operators.table import has_trait
from autoptd.passes.structure.layers import Layer, find_stacks
from autoptd.runtime import collectives

MODES = ("none", "selective", "full", "optimal")

Parts = Sequence[Sequence[fx.Node]]  # the layers, or the attention, of a group
Group = tuple[str, Sequence[fx.Node]]


def recompute_activations(program: Program, *, recompute: str | int) -> Program:
    """Mark what the backward computes again.

    Args:
        recompute: "none"; "full" keeps each layer's input; an int k the input of every k-th layer; "optimal"
            chooses k for the least memory: about ``c = sqrt(l * A_int / A_in)`` checkpoints for the l layers of a
            stage, with a layer's input and what it saves from the ledger; "selective" computes
            the attention weights again, from the products of queries and keys to the product with the values,
            where no fused attention does without them.

    A stage's part of a layer is a group of its own. What precedes the first layer and follows the last is
    kept, and so is a group that would save nothing. Raises ValueError where no layers are found.
    """
    if recompute == "none":
        return program
    ledgers = [Ledger(stage, program.mesh) for stage in program.stages]
    found, entry = _find_groups(program, recompute, ledgers)
    suffix = "_core" if recompute == "selective" else ""
    containers = find_containers(info(node).path for ledger in ledgers for node in ledger.nodes)
    groups = [list(_name_groups(own, containers, suffix)) for own in found]
    stages = tuple(
        replace(stage, graph=_mark(stage.graph, own))
        for stage, own in zip(program.stages, groups, strict=True)
    )
    memory = _describe_memory(ledgers, groups)
    return program.replace_stages(stages, f"recompute_activations {recompute}: {entry}, {memory}")


def _find_groups(
    program: Program, recompute: str | int, ledgers: Sequence[Ledger]
) -> tuple[list[list[Parts]], str]:
    """The groups of each stage that are worth it, and how they were found."""
    found: list[list[Parts]]
    if recompute == "selective":
        found = [[[core] for core in find_cores(stage.graph)] for stage in program.stages]
        entry = _describe_cores(program, found)
    else:
        stacks = find_stacks(program)
        if not stacks:
            raise ValueError(_explain_unlike(program, recompute))
        layers = [layer for stack in stacks for layer in stack]
        size = _choose_size(recompute, layers, ledgers)
        found = [
            [group for stack in stacks for group in _gather(stack, index, size)]
            for index in range(len(program.stages))
        ]
        entry = f"{len(layers)} layers found, up to {size} in a group"
    worth = [
        [parts for parts in own if _is_worth([node for part in parts for node in part], ledger)]
        for ledger, own in zip(ledgers, found, strict=True)
    ]
    return worth, entry


# Layers


def _gather(stack: Sequence[Layer], index: int, size: int) -> Iterator[Parts]:
    """The layers of one stack in one stage, up to `size` whole ones in a group; a part of a layer is one alone."""
    group: list[Sequence[fx.Node]] = []
    for layer in stack:
        calls = layer[index]
        if not calls:
            continue
        whole = sum(map(bool, layer)) == 1
        if group and (not whole or len(group) == size):
            yield group
            group = []
        group.append(calls)
        if not whole:
            yield group
            group = []
    if group:
        yield group


def _choose_size(recompute: str | int, layers: Sequence[Layer], ledgers: Sequence[Ledger]) -> int:
    """Layers per checkpoint. The best are those of the least c * A_in + (l / c) * A_int, in whole numbers."""
    if recompute != "optimal":
        return 1 if recompute == "full" else int(recompute)
    index = max(range(len(ledgers)), key=lambda i: sum(bool(layer[i]) for layer in layers))
    own = [layer[index] for layer in layers if layer[index]]
    largest = max(own, key=len)
    inside = count_bytes(ledgers[index].saved(largest))
    given = count_bytes(ledgers[index].storages(values_taken(largest)))
    return min(range(1, len(own) + 1), key=lambda size: ceil(len(own) / size) * given + size * inside)


def _explain_unlike(program: Program, recompute: str | int) -> str:
    calls = sum(n.op == "call_function" for stage in program.stages for n in stage.graph.nodes)
    return (
        f"recompute={recompute!r} keeps the inputs of repeated layers, and the model has none: none of its {calls} "
        "calls begins a sequence with parameters that is repeated with a single differentiable value in between. "
        'Expected at least two layers with the same operators and shapes; otherwise use recompute="none" or '
        'recompute="selective"'
    )


# Attention


def find_cores(graph: fx.Graph) -> list[list[fx.Node]]:
    """Return the attentions that are written out: the calls from the product of scores to that of the context.

    They are found from their softmax: a product of two activations before it, with as many elements, and one after it.
    """
    place = {node: i for i, node in enumerate(graph.nodes)}
    cores = []
    taken: set[fx.Node] = set()
    for node in graph.nodes:
        if has_trait(node, Trait.SOFTMAX):
            before = _walk(node, lambda n: n.all_input_nodes)
            behind = _walk(node, lambda n: list(n.users))
            starts, ends = filter(_is_product, before), filter(_is_product, behind)
            core = _between(starts, ends, graph)
            if node in core and not core & taken:
                taken |= core
                cores.append(sorted(core, key=place.__getitem__))
    return cores


def _walk(softmax: fx.Node, step: Callable[[fx.Node], Sequence[fx.Node]]) -> set[fx.Node]:
    """The calls that `step` leads to, through those with as many elements as the softmax, and products."""
    size = softmax.meta["val"].numel()
    found: set[fx.Node] = set()
    pending = [softmax]
    while pending:
        for node in step(pending.pop()):
            value = node.meta.get("val")
            if node.op != "call_function" or node in found or not isinstance(value, torch.Tensor):
                continue
            if _is_product(node):
                found.add(node)
            elif value.numel() == size:
                found.add(node)
                pending.append(node)
    return found


def _is_product(node: fx.Node) -> bool:
    """Whether it multiplies two activations."""
    factors = find_factors(node)
    return bool(factors) and all(factor.op == "call_function" for factor in factors)


def _between(starts: Iterable[fx.Node], ends: Iterable[fx.Node], graph: fx.Graph) -> set[fx.Node]:
    """All calls on a way from one of `starts` to one of `ends`, with these."""
    reached = set(starts)
    for node in graph.nodes:
        if node.op == "call_function" and not reached.isdisjoint(node.all_input_nodes):
            reached.add(node)
    return set(
        walk(reached.intersection(ends), lambda node: [x for x in node.all_input_nodes if x in reached])
    )


# The groups


def _is_worth(nodes: Sequence[fx.Node], ledger: Ledger) -> bool:
    """Whether recomputing frees more than it must keep instead."""
    saved, taken = ledger.saved(nodes), ledger.storages(values_taken(nodes))
    return count_bytes(saved - taken) > count_bytes(taken - saved)


def _name_groups(groups: Iterable[Parts], containers: tuple[str, ...], suffix: str) -> Iterator[Group]:
    """Each group with its label, unlike the others': "h0", "h0_to_h3", "h0_attn_core"."""
    labels: set[str] = set()
    for number, parts in enumerate(groups):
        paths = [_common_path(part) for part in (parts[0], parts[-1])]
        ends = list(dict.fromkeys(short_path(path, containers) for path in paths))
        name = ("_to_".join(ends) if all(ends) else f"group_{number}") + suffix
        count = sum(label == name or label.startswith(f"{name}_again") for label in labels)
        label = f"{name}_again{count}" if count else name
        labels.add(label)
        yield label, [node for part in parts for node in part]


def _common_path(nodes: Sequence[fx.Node]) -> str:
    """The module path that all of `nodes` are under; where that is a list's, the path of its owner."""
    paths = [path.split(".") for node in nodes if (path := info(node).path)]
    levels = list(zip(*paths, strict=False))
    depth = sum(1 for _ in takewhile(lambda names: len(set(names)) == 1, levels))
    if depth < len(levels) and all(name.isdigit() for name in levels[depth]):
        depth -= 1
    return ".".join(paths[0][: max(depth, 0)]) if paths else ""


def _mark(graph: fx.Graph, groups: Sequence[Group]) -> fx.Graph:
    """A copy in which each group's calls are neighbours and have its label."""
    order = list(graph.nodes)
    labels = {}
    for label, nodes in groups:
        order = _bring_together(order, set(nodes))
        labels.update(dict.fromkeys(nodes, label))
    copy = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    for node in order:
        values[node] = copy.node_copy(node, values.__getitem__)
        if node in labels:
            change_info(values[node], recompute=labels[node])
    return copy


def _bring_together(order: list[fx.Node], group: set[fx.Node]) -> list[fx.Node]:
    """`order` with the nodes between those of `group` before them, or behind where they read one of them."""
    places = [i for i, node in enumerate(order) if node in group]
    start, end = places[0], places[-1] + 1
    late: dict[fx.Node, None] = {}
    for node in order[start:end]:
        if node not in group and any(s in group or s in late for s in node.all_input_nodes):
            late[node] = None
    span = order[start:end]
    early = [node for node in span if node not in group and node not in late]
    return [*order[:start], *early, *(node for node in span if node in group), *late, *order[end:]]


# The log


def _describe_cores(program: Program, groups: Sequence[Sequence[Parts]]) -> str:
    count = sum(map(len, groups))
    fused = sum(has_trait(n, Trait.FUSED_ATTENTION) for stage in program.stages for n in stage.graph.nodes)
    if not count:
        return "nothing to do, " + (f"all {fused} attentions are fused" if fused else "no attention found")
    return f"{count} attentions written out" + (f", {fused} are fused" if fused else "")


def _describe_memory(ledgers: Sequence[Ledger], groups: Sequence[Sequence[Group]]) -> str:
    """What a microbatch keeps over all stages, of what it would, and the all-reduces that are repeated."""
    kept = whole = 0
    repeated: list[fx.Node] = []
    for ledger, own in zip(ledgers, groups, strict=True):
        recomputed = [nodes for _, nodes in own]
        whole += count_bytes(ledger.kept(()))
        kept += count_bytes(ledger.kept(recomputed))
        repeated += [node for nodes in recomputed for node in ledger.repeated(nodes)]
    sums = [forward_work(n).reduced for n in repeated if n.target is collectives.reduce_from_tensor]
    text = f"{sum(map(len, groups))} groups; a microbatch keeps {kept:,} of {whole:,} bytes of activations"
    return text + (f", and repeats {len(sums)} all-reduces of {sum(sums):,} bytes" if sums else "")
