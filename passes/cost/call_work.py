"""The work and the memory of a stage's calls: the one ledger of the cut, the planner and the simulator."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import fx
from torch._ops import OpOverload

from autoptd.passes.cost.saved_tensors import Ledger, count_bytes
from autoptd.passes.cost.work import Work, backward_work, forward_work
from autoptd.passes.ir.nodes import operator_name
from autoptd.passes.ir.program import Stage, find_trained
from autoptd.passes.operators.table import FOREIGN, rules_of
from autoptd.passes.operators.unfamiliar import UNFAMILIAR, bound_hidden

UNCOUNTED = 0.01  # share of the FLOPs above which a prediction does not know


@dataclass(frozen=True)
class CallWork:
    """The work and memory of a call, in the program's own dtype; `again`: recomputation repeats its forward.

    `working` are the most bytes that its backward holds besides: gradients, and tensors saved by a recomputed group.
    """

    forward: Work
    backward: Work
    again: bool
    kept: int
    working: int
    flops: float


def divide_work(stage: Stage, ledger: Ledger) -> dict[fx.Node, CallWork]:
    """Return the work of each call of a stage; a storage is kept by the first call, or group, that needs it."""
    saved = ((group, count_bytes(ledger.saved(group))) for group in ledger.groups)
    again = {node: size for group, size in saved for node in group}
    repeated, trained = ledger.repeated_nodes, find_trained(stage)
    found = {}
    for node, kept in ledger.first_kept():
        forward, backward = forward_work(node), backward_work(node, trained)
        working = ledger.differentiated(node, trained) + again.get(node, 0)
        flops = _product_flops(forward) * (2 if node in again else 1) + _product_flops(backward)
        found[node] = CallWork(forward, backward, node in repeated, count_bytes(kept), working, flops)
    return found


def count_flops(stage: Stage) -> int:
    """Count the FLOPs of a stage's products, forward and backward without recomputation."""
    trained = find_trained(stage)
    works = (work for n in stage.graph.nodes for work in (forward_work(n), backward_work(n, trained)))
    return round(sum(map(_product_flops, works)))


def find_uncounted(stages: Sequence[Stage]) -> dict[str, float]:
    """Return the shares of the FLOPs that operators without a rule of costs may hide, if they are above 1 %.

    They are of one microbatch, forward and backward, which has twice the products.
    """
    hidden = Counter[str]()
    for node in (n for stage in stages for n in stage.graph.nodes if isinstance(n.target, OpOverload)):
        if rules_of(node) in (FOREIGN, UNFAMILIAR):
            hidden[operator_name(node.target)] += 3 * bound_hidden(node)
    whole = hidden.total() and hidden.total() + sum(map(count_flops, stages))
    return {name: flops / whole for name, flops in hidden.items() if flops > UNCOUNTED * whole}


def describe_uncounted(uncounted: Mapping[str, float]) -> Iterator[str]:
    """Yield a line that says what a prediction does not know."""
    if uncounted:
        shares = ", ".join(f"{name} {share:.0%}" for name, share in uncounted.items())
        yield f"not known: no rule counts the products of {shares} of the FLOPs at most, and the step may take longer"


def _product_flops(work: Work) -> float:
    """Count as SC21 does, without the scores that the backward of a fused attention computes again."""
    return float(sum(product.flops for product in work.products if not product.repeated))
