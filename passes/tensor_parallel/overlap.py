"""Collectives of the backward that run beside the gradients of weights.

f (`collectives.copy_to_tensor`) sums the gradient of what a divided region reads. Autograd calls it when all readers
have done their backwards, and nothing is left to do meanwhile. Where these are linears (after fusion), one operator
stands for f and them: its backward computes the gradient of x, posts the sum, computes those of the weights, and waits.
So where x is gathered first (`collectives.gather_to_tensor`); then the operator keeps a rank's own part only.

Gathers before such linears, and reduce-scatters behind others, also run in t pieces, each beside the product of
another, where the cost model says that this saves time (Wang et al. 2023).
"""

from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from autoptd.passes.cost.cluster import Cluster
from autoptd.passes.cost.durations import Durations, Precision
from autoptd.passes.cost.work import backward_work, forward_work
from autoptd.passes.fusion.patterns import Call, Match, is_call, is_reshape, is_single
from autoptd.passes.fusion.writing import ChainWriter
from autoptd.passes.ir.names import rename_nodes
from autoptd.passes.ir.nodes import Propagation, argument, called, info, shape_of, walk
from autoptd.passes.ir.products import MatrixProduct, read_product
from autoptd.passes.ir.program import Program, copy_graph, find_trained
from autoptd.passes.operators.table import Trait, has_trait
from autoptd.runtime import aten, collectives

LEAST_GAIN = 0.99  # of the time of a product and its message, for pieces of them


def overlap_reductions(program: Program, cluster: Cluster | None = None, overlap: bool = True) -> Program:
    """Join every f with its readers, if they are linears with weights to train; the log says why others stay.

    With `overlap`, gathers and scatters of tokens run in pieces where that pays on the `cluster`, default the paper's.
    Raises ValueError where what is written has another shape or dtype than what it stands for.
    """
    if program.mesh.tensor == 1:
        return program
    propagation = Propagation(program.mesh)
    writer = ChainWriter(propagation)
    durations = Durations(cluster or Cluster.load("dgx-a100"), program.mesh, Precision.of(program.stages), overlap)
    in_pieces = 0
    found: Counter[str] = Counter()  # by the reasons why they stay
    stages = []
    for stage in program.stages:
        copied = replace(stage, graph=copy_graph(stage.graph))
        trained = find_trained(copied)
        for f in [node for node in copied.graph.nodes if has_trait(node, Trait.SUMS_GRADIENTS)]:
            readers, reason = _read(f, trained)
            found[reason] += 1
            if not reason:
                writer.replace(_join(f, readers), name=f"{readers[0].node.name}_together")
        in_pieces += _divide_messages(copied.graph, writer, propagation, durations)
        stages.append(replace(stage, graph=rename_nodes(copied.graph)))
    total, hidden = found.total(), found.pop("", 0)
    entry = f"overlap_reductions {hidden} of {total} sums backward beside weight gradients"
    reasons = "; ".join(f"{count} {reason}" for reason, count in found.items())
    entry += f", not: {reasons}" if reasons else ""
    entry += f"; {in_pieces} gathers and scatters in pieces" if in_pieces else ""
    return program.replace_stages(tuple(stages), entry)


def _divide_messages(graph: fx.Graph, writer: ChainWriter, propagation: Propagation, durations: Durations) -> int:
    """Let gathers and scatters run in pieces beside their products where that saves time; return how many do."""

    def seconds(*nodes: fx.Node) -> float:
        works = (work(node) for node in nodes for work in (forward_work, backward_work))
        return sum(durations.seconds(work).total for work in works)

    count = 0
    for node in list(graph.nodes):
        if node.kwargs.get("gathered"):
            before, kept = seconds(node), node.kwargs
            node.kwargs = {**kept, "gathered": "in pieces"}
            saves = seconds(node) < LEAST_GAIN * before
            node.kwargs = node.kwargs if saves else kept
            count += saves
        elif is_call(node, collectives.reduce_scatter) and node.args[2] == 0 and is_single(node.args[1]):
            product = _read_linear(node.args[1])
            if product is not None and product.bias is None:
                given = collectives.scattered_linear, (node.args[0], product.x, product.weight)
                trial = propagation.write(node, *given, product.options, like=node)
                saves = seconds(trial) < LEAST_GAIN * seconds(node, product.node)
                graph.erase_node(trial)
                if saves:
                    writer.replace(Match(Call(*given, node, product.options), {product.node}))
                    count += 1
    return count


def _read(f: fx.Node, trained: Container[fx.Node]) -> tuple[list[MatrixProduct], str]:
    """Return the readers of f, in graph order; or why it stays."""
    users = sorted(f.users)
    views = [user for user in users if is_reshape(user)]
    if f.target is collectives.gather_to_tensor and (views or argument(f, "dim") != 0):
        return [], "of what is gathered in another order than it is read"
    if views and views == users:
        if len({shape_of(view) for view in views}) > 1 or shape_of(views[0])[-1] != shape_of(f)[-1]:
            return [], f"read in other shapes by {called(views[0])}"
        users = sorted(user for view in views for user in view.users)
    found = []
    for user in users:
        reader = _read_linear(user)
        if reader is None or reader.x not in (f, *views):
            return [], f"read by {user.op if user.op == 'output' else called(user)}"
        # A parameter, or computed from parameters alone.
        if not all(n.op == "get_attr" or n.all_input_nodes for n in walk(reader.parameters)):
            return [], f"read by {called(user)}, whose weight depends on the batch"
        found.append(reader)
    if not any(reader.weight in trained for reader in found):
        return [], "with weights that are frozen"
    if len({reader.transposed for reader in found}) > 1:
        return [], f"read by linears of several kinds, {called(found[0].node)}"
    if len({info(reader.node).recompute for reader in found}) > 1:
        return [], "read inside and outside of what is recomputed"
    return found, ""


def _join(f: fx.Node, readers: Sequence[MatrixProduct]) -> Match:
    """Describe the operator that stands for f and its readers."""
    first, rank = readers[0], f.args[0]
    x: Any = f.args[1]
    options = first.options | ({"gathered": True} if f.target is collectives.gather_to_tensor else {})
    if first.x is not f:  # a view, whose like the other readers have too
        x = Call(first.x.target, (x, *first.x.args[1:]), first.x)
    members = {f, *(reader.x for reader in readers)}
    if len(readers) == 1:
        return Match(Call(collectives.copied_linear, (rank, x, *first.parameters), first.node, options), members)
    weights, biases = ([getattr(r, name) for r in readers] for name in ("weight", "bias"))
    given = [biases] if any(bias is not None for bias in biases) else []
    nodes = tuple(reader.node for reader in readers)
    call = Call(collectives.copied_linears, (rank, x, weights, *given), nodes[0], options)
    return Match(call, members, several=nodes)


def _read_linear(node: fx.Node) -> MatrixProduct | None:
    """The product that a call computes, if its weight is a matrix and its bias a vector, in the dtype of the result."""
    product = read_product(node)
    scaled = node.target is aten.addmm.default and (node.kwargs or len(node.args) != 3)
    if product is None or scaled or len(shape_of(product.x)) < 2:
        return None
    dtype, parameters = node.meta["val"].dtype, product.parameters
    fits = all(isinstance(p, fx.Node) and p.meta["val"].dtype == dtype for p in parameters)
    return product if fits and [len(shape_of(p)) for p in parameters] in ([2], [2, 1]) else None
