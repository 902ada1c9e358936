"""Losses whose mean over microbatches is another one than over the whole batch: what is said of them."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from operator import getitem
from typing import Any

import torch
from torch import fx

from autoptd.loss.labels import (
    LINEAR,
    find_counts,
    find_divisors,
    find_loss,
    find_uncounted,
    read_loss,
    strip,
)
from autoptd.passes.cost import product_work
from autoptd.passes.ir.gradients import find_trained
from autoptd.passes.ir.nodes import argument, aten_name, called, walk
from autoptd.passes.ir.program import Program
from autoptd.passes.tensor_parallel.symbols import letter

# Operators with one result that reduce dimensions, at first those that are not linear.
BENDING = frozenset(
    [
        *("var", "std", "amax", "amin", "max", "min", "logsumexp", "norm", "linalg_vector_norm", "prod"),
        *("median", "nanmedian", "mode", "quantile", "nanquantile", "aminmax"),
    ]
)
REDUCING = BENDING | {"mean", "sum"}
SOFTMAX = frozenset(["softmax", "log_softmax"])
# Operators in which what lies along a dimension meets, and those that take it apart, with where they name it.
MEETING = {"roll": 2, "topk": 2, "kthvalue": 2} | dict.fromkeys(
    ("flip", "sort", "argsort", "softmax", "log_softmax", "cumsum", "cumprod", "cummax", "cummin"), 1
)
CUTTING = {"slice": 1, "narrow": 1, "split": 2, "split_with_sizes": 2, "chunk": 2, "tensor_split": 2}


def describe_means(program: Program, divided: Program) -> Iterator[str]:
    """What is said of a loss that is another one as the mean of microbatches' losses than over the whole batch.

    `divided` is the `program` before operators are fused.
    """
    if uncounted := tuple(dict.fromkeys((*find_uncounted(program), *find_counts(divided)))):
        yield (
            f"{' and '.join(uncounted)} {'come' if len(uncounted) > 1 else 'comes'} to the loss changed, with class "
            "weights, or counted by the model for a mean of its own, so that which labels count is not known: a step's "
            "loss is the mean of the microbatches' losses, each of which counts alike. That is another one than over "
            "the whole batch where they have unequal counts; change labels in the data, before the call, and leave the "
            "mean to cross_entropy, which leaves out its ignore_index"
        )
    if is_sum(divided):
        yield (
            "the loss is a sum over its batch, and a step's loss is the mean of the microbatches' losses over all "
            "replicas: their number times smaller than the sum over the whole batch, and the gradients with it. Return "
            "a mean, or scale the loss that the call returns"
        )
    if (mixed := find_mixed(divided, counted=bool(uncounted))) is not None:
        why = (
            f"joins a microbatch's sequences ({divided.letters.get('b', 1)} here) with each other, as contrasts and "
            "statistics of the batch do, and with none of another microbatch"
        )
    elif not uncounted and (mixed := find_bent(divided)) is not None:
        why = (
            "is not linear in what was summed over a microbatch's sequences, as a perplexity and a balance of experts "
            "are not"
        )
    if mixed is not None:
        yield (
            f"{called(mixed)} {why}: a step's loss is the mean of the microbatches' losses, which is another one than "
            "over the whole batch. For that, compile for one microbatch on one replica: microbatch_size= all "
            "sequences, num_microbatches=1"
        )


def is_sum(program: Program) -> bool:
    """Whether the loss is known to grow with the microbatch: a sum over it, and nothing on the way may divide it."""
    (stage,) = program.stages
    trained = find_trained(stage)

    def parts(node: fx.Node) -> list[fx.Node]:
        """What `node` grows with, up to where a factor is no longer one of the loss."""
        if read_loss(node) or node.target in product_work.FORWARDS or aten_name(node.target) in SOFTMAX:
            return []
        # What has no batch is the same for all of it, where it comes to what has one.
        return [x for x in node.all_input_nodes if x in trained and _has_batch(x) >= _has_batch(node)]

    grown = {node: parts(node) for node in walk([find_loss(program)], parts)}
    read = [loss.target for node in grown if (loss := read_loss(node))]
    values: list[Any] = [node.meta["val"] for node in (*grown, *read)]
    sizes = {n for x in (*values, *program.inputs) for n in getattr(x, "shape", ())} - {0, 1}
    batch = program.letters.get("b", 1)
    return all(
        _grows(node, sources) and not _may_divide(node, sources, batch, sizes)
        for node, sources in grown.items()
    )


def find_mixed(program: Program, counted: bool = False) -> fx.Node | None:
    """The first value that one sequence of the batch has of the others; None where each is by itself.

    It has two dimensions of the batch, is made along it, of two parts of it, or with what was reduced over it. Where
    labels are `counted`, only trained values: the others may be the counts.
    """
    (stage,) = program.stages
    trained, reduced, varying = find_trained(stage), set[fx.Node](), set[fx.Node]()
    parts: dict[fx.Node, set[Any]] = {}
    alone = program.letters.get("b", 1) == 1
    node: fx.Node
    for node in stage.graph.nodes:
        sources = node.all_input_nodes
        if node.meta.get("role") != "input" and varying.isdisjoint(sources):
            continue
        varying.add(node)
        parts[node] = set() if alone else _find_parts(node, parts)
        if counted and node not in trained:
            continue
        known = not reduced.isdisjoint(sources)
        normalized = "batch_norm" in aten_name(node.target) and argument(node, 5, "training", True)
        meets = normalized or _is_along_batch(node, MEETING, alone)
        several = (len(parts[node]) > 1 and _sizes(node)) or _count_batches(node, alone) > 1
        if meets or several or (known and _has_batch(node)):
            return node
        if known or (
            aten_name(node.target) in REDUCING and not _has_batch(node) and any(map(_has_batch, sources))
        ):
            reduced.add(node)
    return None


def find_bent(program: Program) -> fx.Node | None:
    """The first trained value that is not linear in what was reduced over the batch, counts but for divisors.

    Or in the batch that it reduces itself, as a norm is not.
    """
    (stage,) = program.stages
    trained, reduced = find_trained(stage), set[Any]()
    varying = set[Any]()  # all that depends on the batch
    node: fx.Node
    for node in stage.graph.nodes:
        if node.meta.get("role") == "input" or not varying.isdisjoint(node.all_input_nodes):
            varying.add(node)
        if _has_batch(node):
            continue
        if not reduced.isdisjoint(node.all_input_nodes):
            if node in trained and not _is_linear(node, varying, trained):
                return node
            reduced.add(node)
        elif (aten_name(node.target) in REDUCING or read_loss(node)) and any(
            map(_has_batch, node.all_input_nodes)
        ):
            if node in trained and aten_name(node.target) in BENDING:
                return node
            reduced.add(node)
    return None


def _is_linear(node: fx.Node, varying: Container[Any], trained: Container[Any]) -> bool:
    """Whether `node` is linear in all that is `varying`; what is divided by counts where it is trained."""
    if aten_name(node.target) == "div" and node.args[1] in varying:
        return node.args[1] not in trained
    if aten_name(node.target) in ("mul", "matmul"):
        return sum(x in varying for x in node.args) == 1
    return aten_name(node.target) in LINEAR or not aten_name(node.target)


def _grows(node: fx.Node, sources: Sequence[fx.Node]) -> bool:
    """Whether `node` has every sample of its `sources`, or their sum."""
    if not sources:
        loss = read_loss(node)
        return _has_batch(node) or (loss is not None and not loss.mean)
    return aten_name(node.target) == "sum" or _has_batch(node) or not any(map(_has_batch, sources))


def _may_divide(node: fx.Node, sources: Sequence[fx.Node], batch: int, sizes: set[int]) -> bool:
    """Whether `node` may divide what grows by how large the batch is, be it through weights that add up to one."""
    if divisors := find_divisors(node):
        return any(isinstance(x, fx.Node) or _may_count(x, {batch}) for x in divisors)
    factors: Any = node.args if aten_name(node.target) == "mul" else ()
    weights = [x for x in factors if isinstance(x, fx.Node) and x not in sources]
    numbers = [1 / x for x in factors if not isinstance(x, fx.Node) and x != 0]
    # A mask leaves out, and divides nothing. Every whole number is a multiple of a batch of one: a factor such as 0.1
    # is told from one over a count by the other sizes.
    return any(strip(x).meta["val"].dtype != torch.bool for x in weights) or any(
        _may_count(x, sizes) for x in numbers
    )


def _may_count(number: float, sizes: Collection[int]) -> bool:
    """Whether a number in the code is a multiple of one of `sizes`, and may come from it: a graph does not say."""
    number = abs(number)
    return any(min(left := number % size, size - left) < 1e-9 * number for size in sizes)


def _has_batch(node: fx.Node) -> bool:
    """Whether one of the dimensions is the batch, or made of it."""
    return _count_batches(node) > 0


def _count_batches(node: fx.Node, alone: bool = False) -> int:
    """How many dimensions are the batch, or made of it."""
    return sum(_is_batch(size, alone) for size in _sizes(node))


def _is_batch(size: Any, alone: bool) -> bool:
    """Whether `size` is the batch, or made of it; of a sequence `alone`, positions may be taken for all tokens."""
    b = letter("b")
    return bool(size == b) if alone else b in getattr(size, "free_symbols", ())


def _sizes(node: fx.Node) -> Sequence[Any]:
    """The dimensions of a value in letters, of the first of several."""
    sizes = node.meta.get("sizes") or ()
    return sizes[0] if sizes and isinstance(sizes[0], tuple) else sizes


def _is_along_batch(node: fx.Node, places: Mapping[str, int], alone: bool = False) -> bool:
    """Whether `node` is one of the operators with these `places`, and what it names there is of the batch."""
    place, default = places.get(aten_name(node.target), 0), -1 if places is MEETING else 0
    sizes, dims = _sizes(node.all_input_nodes[0]) if place else (), argument(node, place, "dim", default)
    named = [sizes[d] for d in ([dims] if isinstance(dims, int) else dims)] if sizes else []
    return any(_is_batch(size, alone) for size in named)


def _find_parts(node: fx.Node, parts: Mapping[fx.Node, set[Any]]) -> set[Any]:
    """Which parts of the batch, neighbours in one, a value is made of; none where they were joined in order."""
    sources, joined = node.all_input_nodes, False
    cut = sources[0] if node.target is getitem else node
    if (
        _is_along_batch(cut, CUTTING)
        and argument(node, 4, "step", 1) == 1
        # Of batches that were joined, or of positions, it may be a part that has every sequence of the batch alike.
        and not any((size / letter("b")).is_integer for size in _sizes(node))
    ):
        return {node.args[1:]}
    if aten_name(node.target) in ("cat", "stack"):
        numbers = len(_sizes(node)) == 1 and aten_name(node.target) == "stack"
        joined = numbers or _in_order(dict.fromkeys(place for x in sources for place in parts.get(x, ())))
    return set().union(*(parts.get(source, ()) for source in sources if not joined))


def _in_order(places: Iterable[Sequence[Any]]) -> bool:
    """Whether each part of the batch lies behind the one before."""
    bounds = [[(x or 0) % 2**63 for x in place] for place in places]
    return all(one < other and one[2:3] <= other[1:2] for one, other in pairwise(bounds))
