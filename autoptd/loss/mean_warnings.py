"""Warnings about losses whose mean over microbatches differs from the loss of the whole batch.

The graph tells sums and means over an unknown number of labels; of any other loss `verify` compares two microbatches
with the plain model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import fx

from autoptd.loss.labels import (
    MOVING,
    find_counts,
    find_divisors,
    find_loss,
    find_uncounted,
    read_loss,
)
from autoptd.passes.ir.gradients import find_trained
from autoptd.passes.ir.nodes import aten_name, walk
from autoptd.passes.ir.products import find_factors
from autoptd.passes.ir.program import Program
from autoptd.passes.operators.record import Trait
from autoptd.passes.operators.table import has_trait, strip
from autoptd.passes.tensor_parallel.symbols import symbol


def describe_means(program: Program, divided: Program) -> Iterator[str]:
    """Yield a warning for a loss of which the mean over microbatches is known to differ from that of the whole batch.

    `divided` is the `program` before operators are fused.
    """
    if uncounted := tuple(dict.fromkeys((*find_uncounted(program), *find_counts(divided)))):
        yield (
            f"{' and '.join(uncounted)} {'reach' if len(uncounted) > 1 else 'reaches'} the loss changed, with class "
            "weights, or in a count that the model divides by, so autoptd does not know which labels count: a step's "
            "loss is the plain mean of the microbatches' losses. It differs from the loss of the whole batch where "
            "microbatches have different numbers of counted labels. Change labels in the data, before the call, and "
            "let cross_entropy take the mean, which ignores its ignore_index"
        )
    if is_sum(divided):
        yield (
            "the loss is a sum over its batch, and a step's loss is the mean of the losses of all microbatches and "
            "replicas: it and the gradients are smaller than the sum over the whole batch by their number. Return a "
            "mean, or scale the loss that the call returns"
        )


def is_sum(program: Program) -> bool:
    """Return whether the loss is known to grow with the microbatch: it sums over it, and nothing may divide the sum."""
    (stage,), symbols = program.stages, program.symbols
    trained = find_trained(stage)
    assert symbols is not None

    @cache
    def has_batch(node: fx.Node) -> bool:
        """Return whether a dimension of the value, or of the first of several, is made of the batch."""
        sizes = symbols.shape(node)
        sizes = sizes[0] if sizes and isinstance(sizes[0], tuple) else sizes
        return any(symbol("b") in getattr(size, "free_symbols", ()) for size in sizes)

    def parts(node: fx.Node) -> list[fx.Node]:
        """Return the arguments that `node` grows with."""
        multiplies = find_factors(node) or has_trait(node, Trait.FUSED_ATTENTION)
        if read_loss(node) or multiplies or has_trait(node, Trait.SOFTMAX | Trait.LOG_SOFTMAX):
            return []
        # An argument without a batch dimension is the same for every sample.
        return [x for x in node.all_input_nodes if x in trained and has_batch(x) >= has_batch(node)]

    def grows(node: fx.Node, sources: Sequence[fx.Node]) -> bool:
        """Return whether `node` has every sample of its `sources`, or their sum."""
        if not sources:
            loss = read_loss(node)
            return has_batch(node) or (loss is not None and not loss.mean)
        return aten_name(node.target) == "sum" or has_batch(node) or not any(map(has_batch, sources))

    grown = {node: parts(node) for node in walk([find_loss(program)], parts)}
    read = [loss.target for node in grown if (loss := read_loss(node))]
    values: list[Any] = [node.meta["val"] for node in (*grown, *read)]
    sizes = {n for x in (*values, *program.inputs) for n in getattr(x, "shape", ())} - {0, 1}
    batch = symbols.values.get(symbol("b"), 1)
    return all(grows(n, own) and not _may_divide(n, own, batch, sizes) for n, own in grown.items())


def _may_divide(node: fx.Node, sources: Sequence[fx.Node], batch: int, sizes: set[int]) -> bool:
    """Return whether `node` may divide by the batch size, for example through weights that add up to one."""
    if divisors := find_divisors(node):
        return any(isinstance(x, fx.Node) or _may_count(x, {batch}) for x in divisors)
    factors: Any = node.args if aten_name(node.target) == "mul" else ()
    weights = [x for x in factors if isinstance(x, fx.Node) and x not in sources]
    numbers = [1 / x for x in factors if not isinstance(x, fx.Node) and x != 0]
    # A mask divides nothing. Every whole number is a multiple of a batch of one, so the other sizes tell a factor such
    # as 0.1 from one over a count.
    weighted = any(strip(x, MOVING).meta["val"].dtype != torch.bool for x in weights)
    return weighted or any(_may_count(x, sizes) for x in numbers)


def _may_count(number: float, sizes: Collection[int]) -> bool:
    """Return whether a number in the code is a multiple of one of `sizes`, so that it may be computed from it."""
    number = abs(number)
    return any(min(left := number % size, size - left) < 1e-9 * number for size in sizes)
