"""Activation recomputation: calls that run again in the backward, so that their results are not kept (SC21 §3.5).

A group is a run of neighbouring calls with one label (`NodeInfo.recompute`), the name of their function in the program
text. Only the inputs of a group are kept. This pass runs before operators are fused: a kernel that joins the end of one
layer with the beginning of the next leaves no place with a single live value.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby, takewhile
from math import ceil
from operator import attrgetter

import torch
from torch import fx

from autoptd.passes.cost.saved_tensors import Ledger, count_bytes
from autoptd.passes.cost.work import forward_work
from autoptd.passes.ir.names import find_containers, short_path
from autoptd.passes.ir.nodes import change_info, info, walk
from autoptd.passes.ir.products import find_factors
from autoptd.passes.ir.program import Program, copy_nodes, values_taken
from autoptd.passes.operators.table import Trait, has_trait
from autoptd.passes.structure.layers import Layer, find_stacks
from autoptd.runtime import collectives

MODES = ("none", "selective", "full", "optimal")

Parts = Sequence[Sequence[fx.Node]]  # the layers, or the attention, of a group
Group = tuple[str, Sequence[fx.Node]]


def recompute_activations(program: Program, *, recompute: str | int) -> Program:
    """Mark the calls that the backward runs again.

    `recompute`: "none"; "full" keeps each layer's input; an int k keeps the input of every k-th layer; "optimal"
    chooses k for the least memory: about ``c = sqrt(l * A_int / A_in)`` checkpoints for the l layers of a stage, with
    the bytes of a layer's input and of its saved tensors from the ledger; "selective" recomputes the attention weights,
    from the product of queries and keys to the product with the values, unless a fused attention never stores them.

    A stage's part of a layer is a group of its own. The calls before the first layer and after the last one are kept,
    and so is a group that would save nothing. Raises ValueError if no layers are found.
    """
    if recompute == "none":
        return program
    ledgers = [Ledger(stage, program.mesh) for stage in program.stages]
    found, entry = _find_groups(program, recompute, ledgers)
    suffix = "_core" if recompute == "selective" else ""
    containers = find_containers(info(node).path for ledger in ledgers for node in ledger.nodes)
    groups = [list(_name_groups(own, containers, suffix)) for own in found]
    pairs = zip(program.stages, groups, strict=True)
    stages = tuple(replace(stage, graph=_mark(stage.graph, own)) for stage, own in pairs)
    memory = _describe_memory(ledgers, groups)
    return program.replace_stages(stages, f"recompute_activations {recompute}: {entry}, {memory}")


def _find_groups(program: Program, recompute: str | int, ledgers: Sequence[Ledger]) -> tuple[list[list[Parts]], str]:
    """Return the groups of each stage that are worth it, and a line on how they were found."""
    if recompute == "selective":
        found: list[list[Parts]] = [[[core] for core in find_cores(stage.graph)] for stage in program.stages]
        fused = sum(has_trait(n, Trait.FUSED_ATTENTION) for stage in program.stages for n in stage.graph.nodes)
        entry = f"{sum(map(len, found))} attentions written out" + (f", {fused} are fused" if fused else "")
    else:
        stacks = find_stacks(program)
        if not stacks:
            raise ValueError(
                f"recompute={recompute!r} keeps the inputs of repeated layers, and the model has none: expected two "
                "or more with parameters, the same operators and shapes, and a single differentiable value in "
                'between; otherwise use recompute="none" or recompute="selective"'
            )
        layers = [layer for stack in stacks for layer in stack]
        size = _choose_size(recompute, layers, ledgers)
        found = [[own for stack in stacks for own in _gather(stack, i, size)] for i in range(len(ledgers))]
        entry = f"{len(layers)} layers found, up to {size} in a group"
    pairs = zip(ledgers, found, strict=True)
    return [[parts for parts in own if _is_worth(parts, ledger)] for ledger, own in pairs], entry


# Layers


def _gather(stack: Sequence[Layer], index: int, size: int) -> Iterator[Parts]:
    """Yield the layers of one stack in one stage, up to `size` whole ones together; a part of a layer is alone."""
    own = [layer for layer in stack if layer[index]]
    for whole, run in groupby(own, lambda layer: sum(map(bool, layer)) == 1):
        calls = [layer[index] for layer in run]
        step = size if whole else 1
        yield from (calls[start : start + step] for start in range(0, len(calls), step))


def _choose_size(recompute: str | int, layers: Sequence[Layer], ledgers: Sequence[Ledger]) -> int:
    """Return the layers per checkpoint: the best have the least c * A_in + (l / c) * A_int, in whole numbers."""
    if recompute != "optimal":
        return 1 if recompute == "full" else int(recompute)
    index = max(range(len(ledgers)), key=lambda i: sum(bool(layer[i]) for layer in layers))
    own = [layer[index] for layer in layers if layer[index]]
    largest = max(own, key=len)
    inside = count_bytes(ledgers[index].saved(largest))
    given = count_bytes(ledgers[index].storages(values_taken(largest)))
    return min(range(1, len(own) + 1), key=lambda size: ceil(len(own) / size) * given + size * inside)


# Attention


def find_cores(graph: fx.Graph) -> list[list[fx.Node]]:
    """Return the attentions that are written out: the calls from the product of scores to that of the context.

    They are found from their softmax: a product of two activations before it, with as many elements, and one after it.
    """
    cores = []
    taken: set[fx.Node] = set()
    for node in graph.nodes:
        if has_trait(node, Trait.SOFTMAX):
            before, behind = _reach(node, lambda n: n.all_input_nodes), _reach(node, lambda n: n.users)
            core = set(walk(filter(_is_product, before), attrgetter("users")))
            core &= set(walk(filter(_is_product, core & behind), attrgetter("all_input_nodes")))
            if node in core and not core & taken:
                taken |= core
                cores.append(sorted(core))
    return cores


def _reach(softmax: fx.Node, step: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    """Return the calls that `step` leads to, through those with as many elements as the softmax, and products."""
    size = softmax.meta["val"].numel()

    def next_calls(node: fx.Node) -> list[fx.Node]:
        if _is_product(node) and node is not softmax:
            return []
        calls = [n for n in step(node) if n.op == "call_function" and isinstance(n.meta["val"], torch.Tensor)]
        return [n for n in calls if _is_product(n) or n.meta["val"].numel() == size]

    return set(walk([softmax], next_calls)) - {softmax}


def _is_product(node: fx.Node) -> bool:
    factors = find_factors(node)
    return bool(factors) and all(factor.op == "call_function" for factor in factors)


# The groups


def _is_worth(parts: Parts, ledger: Ledger) -> bool:
    """Return whether recomputing frees more than it must keep instead."""
    nodes = [node for part in parts for node in part]
    saved, taken = ledger.saved(nodes), ledger.storages(values_taken(nodes))
    return count_bytes(saved - taken) > count_bytes(taken - saved)


def _name_groups(groups: Iterable[Parts], containers: tuple[str, ...], suffix: str) -> Iterator[Group]:
    """Yield each group with a label of its own: "h0", "h0_to_h3", "h0_attn_core"."""
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
    """Return the module path that all of `nodes` are under, or for a list's the path of its owner."""
    paths = [path.split(".") for node in nodes if (path := info(node).path)]
    levels = list(zip(*paths, strict=False))
    depth = sum(1 for _ in takewhile(lambda names: len(set(names)) == 1, levels))
    if depth < len(levels) and all(name.isdigit() for name in levels[depth]):
        depth -= 1
    return ".".join(paths[0][: max(depth, 0)]) if paths else ""


def _mark(graph: fx.Graph, groups: Sequence[Group]) -> fx.Graph:
    order = list(graph.nodes)
    for _, nodes in groups:
        order = _bring_together(order, set(nodes))
    copy, values = copy_nodes(order)
    for label, nodes in groups:
        for node in nodes:
            change_info(values[node], recompute=label)
    return copy


def _bring_together(order: list[fx.Node], group: set[fx.Node]) -> list[fx.Node]:
    """Return the order with the nodes between those of `group` before them, or behind where they read one of them."""
    places = [i for i, node in enumerate(order) if node in group]
    start, end = places[0], places[-1] + 1
    late: set[fx.Node] = set()
    for node in order[start:end]:
        if node not in group and any(source in group or source in late for source in node.all_input_nodes):
            late.add(node)
    span = sorted(order[start:end], key=lambda node: 2 if node in late else int(node in group))
    return [*order[:start], *span, *order[end:]]


# The log


def _describe_memory(ledgers: Sequence[Ledger], groups: Sequence[Sequence[Group]]) -> str:
    kept = whole = 0
    repeated: list[fx.Node] = []
    for ledger, own in zip(ledgers, groups, strict=True):
        recomputed = [nodes for _, nodes in own]
        whole += count_bytes(ledger.kept(()))
        kept += count_bytes(ledger.kept(recomputed))
        repeated += [node for nodes in recomputed for node in ledger.repeated(nodes)]
    found = (forward_work(n).exchanged for n in repeated if n.target.__module__ == collectives.__name__)
    sums = [size for size in found if size]
    text = f"{sum(map(len, groups))} groups; a microbatch keeps {kept:,} of {whole:,} bytes of activations"
    return text + (f", and repeats {len(sums)} collectives of {sum(sums):,} bytes" if sums else "")
