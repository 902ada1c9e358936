"""Join chains of memory-bound operators into one kernel each (SC21 §4.2).

Works on each stage of the divided, cut program, so no kernel needs a sharding rule and no boundary gets wider. There a
row-parallel bias stands after the all-reduce already, and goes from there into the kernel.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

from torch import fx

from autoptd.passes.cost.work import describe_saving
from autoptd.passes.fusion.activations import match_activation
from autoptd.passes.fusion.losses import match_half_loss, match_whole_loss
from autoptd.passes.fusion.norms import (
    match_layer_norm,
    match_partial_rotary,
    match_rms_norm,
    match_rotary,
    match_torch_rms_norm,
)
from autoptd.passes.fusion.patterns import (
    Call,
    Match,
    alike,
    both_orders,
    is_call,
    is_reshape,
    is_single,
    is_vector,
    plain_add,
    read_linear,
    split_bias,
)
from autoptd.passes.ir.gradients import find_trained
from autoptd.passes.ir.meta_values import Propagation
from autoptd.passes.ir.names import operator_word, rename_nodes
from autoptd.passes.ir.node_info import change_info, describe, info
from autoptd.passes.ir.nodes import operator_name, shape_of
from autoptd.passes.ir.products import find_factors
from autoptd.passes.ir.program import Program, Stage, copy_graph
from autoptd.passes.operators.record import Trait
from autoptd.passes.operators.table import has_trait
from autoptd.runtime import aten, kernels
from autoptd.runtime.program.placement import REPLICATED

Rule = Callable[[fx.Node], Match | None]
NEAR = 8  # GEMMs allowed within a chain: branches of one layer wait for each other


def fuse_operators(program: Program) -> Program:
    """Rewrite every stage's chains by the rules below, in their order.

    Raises ValueError if a kernel's result has another shape or dtype than the chain's.
    """
    propagation = Propagation(program.mesh)
    counts: Counter[str] = Counter()
    stages = tuple(replace(stage, graph=_fuse(stage, propagation, counts)) for stage in program.stages)
    found = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    entry = f"{found}; {describe_saving(program.stages, stages)}" if found else "nothing to fuse"
    return program.replace_stages(stages, f"fuse_operators {entry}")


def _fuse(stage: Stage, propagation: Propagation, counts: Counter[str]) -> fx.Graph:
    graph = copy_graph(stage.graph)
    whole = (match_whole_loss,) if propagation.rank.mesh.tensor == 1 else ()
    for rule in (*RULES, *whole):
        trained = find_trained(replace(stage, graph=graph))  # anew: the rule before wrote calls
        counted = accumulate(bool(find_factors(node)) for node in graph.nodes)
        products = dict(zip(graph.nodes, counted, strict=True))
        for node in list(graph.nodes):
            match = rule(node) if node.op == "call_function" and node.users else None
            if match is None or not (_is_near(match, products) and _is_one_region(match)):
                continue
            if _keeps_gradients(match, trained):
                _replace(graph, match, propagation)
    for node in graph.nodes:
        if info(node).fused:
            change_info(node, fused=False)
            counts[operator_word(node.target)] += 1
    return rename_nodes(graph)


def _is_near(match: Match, products: Mapping[fx.Node, int]) -> bool:
    """Return whether the chain lies in one layer: a long skip spans all layers, and no stage may end in a kernel.

    `products` counts the GEMMs up to each node; the nodes written by this rule itself are not among them.
    """
    places = [products[node] for node in (*match.members, *match.results) if node in products]
    return not places or max(places) - min(places) <= NEAR


def _is_one_region(match: Match) -> bool:
    """Return whether the chain lies in one region of recomputation, or in none."""
    return len({info(node).recompute for node in (*match.members, *match.results)}) == 1


def _keeps_gradients(match: Match, trained: set[fx.Node]) -> bool:
    """Return whether no constant has a gradient and all results have one, or none: a call has them for all."""
    return trained.isdisjoint(match.constants) and len({node in trained for node in match.results}) == 1


def _replace(graph: fx.Graph, match: Match, propagation: Propagation) -> None:
    """Write the call at its first result, and remove the chain."""
    first = match.results[0]
    made = _write(graph, match.call, first, propagation)
    values = [made]
    if len(match.results) > 1:
        name = f"{_name(match.results[-1])}_pair"
        change_info(made, name=name, placement=(REPLICATED,) * len(match.results))
        with graph.inserting_before(first):
            values = [graph.call_function(operator.getitem, (made, i)) for i in range(len(match.results))]
    for index, (old, new) in enumerate(zip(match.results, values, strict=True)):
        val = made.meta["val"] if new is made else made.meta["val"][index]
        if not alike(val, old.meta["val"]):
            raise ValueError(
                f"{operator_name(made.target)} returns {val} for {old}; expected {old.meta['val']}"
            )
        describe(new, val, info(old).at(info(made)), name=_name(old), fused=False)
        old.replace_all_uses_with(new)
    items: set[int] = set()
    for node in sorted({*match.members, *match.results, *values}, reverse=True):
        if not node.users:
            items.update(info(node).items)
            graph.erase_node(node)
    change_info(made, fused=not is_reshape(made), items=tuple(sorted(items)))


def _write(graph: fx.Graph, call: Call, place: fx.Node, propagation: Propagation) -> fx.Node:
    """Write the call before `place`, after its arguments."""
    args = tuple(_write(graph, a, place, propagation) if isinstance(a, Call) else a for a in call.args)
    for node in args:
        if isinstance(node, fx.Node) and node.op == "get_attr" and place < node:
            place.prepend(node)
    with graph.inserting_before(place):
        made = graph.call_function(call.target, args, dict(call.kwargs))
    describe(made, propagation.run(made), info(call.like), name=_name(call.like), value=None)
    return made


def _name(node: fx.Node) -> str:
    """Name a node after the one that it replaces."""
    return info(node).name or node.name


# Rules


def _linear_gelu(node: fx.Node) -> Match | None:
    """Match gelu(linear(x, weight, bias)), also with rows reshaped to a matrix and back (GPT-2)."""
    product: Any = node.args[0] if is_call(node, aten.gelu.default) else None
    reshaped = [product] if is_reshape(product) else []
    linear = read_linear(product.args[0] if reshaped else product)
    if linear is None or not all(map(is_single, (linear.node, *reshaped))):
        return None
    x: Any = linear.x
    shape = (*shape_of(node)[:-1], shape_of(x)[-1])
    if is_reshape(x) and shape_of(x) != shape:
        x = x.args[0]
    if shape_of(x) != shape:
        return None
    options = {**node.kwargs, **({"transposed": True} if linear.transposed else {})}
    call = Call(kernels.linear_gelu, (x, linear.weight, linear.bias), node, options)
    return Match(call, (node,), frozenset({linear.node, *reshaped}))


def _bias_gelu(node: fx.Node) -> Match | None:
    """Match gelu(x + bias)."""
    if not is_call(node, aten.gelu.default):
        return None
    biased = split_bias(node.args[0])  # type: ignore[arg-type]
    if biased is None:
        return None
    call = Call(kernels.bias_gelu, (biased.x, biased.bias), node, dict(node.kwargs))
    return Match(call, (node,), frozenset(biased.members))


def _grouped_attention(node: fx.Node) -> Match | None:
    """Match fused attention of fewer key and value heads than query heads, without a mask."""
    grouped = has_trait(node, Trait.FUSED_ATTENTION) and node.kwargs.get("enable_gqa")
    if not grouped or len(node.args) > 3 or node.kwargs.get("attn_mask") is not None:
        return None
    options = {name: value for name, value in node.kwargs.items() if name in ("is_causal", "scale")}
    return Match(Call(kernels.grouped_attention, node.args, node, options), (node,), frozenset())


def _gated_product(activation: str, target: Any, kwargs: dict[str, Any], node: fx.Node) -> Match | None:
    """Match activation(gate) * up."""
    if not is_call(node, aten.mul.Tensor):
        return None
    for active, up in both_orders(node):
        if not (is_call(active, target) and active.kwargs == kwargs and is_single(active)):
            continue
        gate = active.args[0]
        if isinstance(up, fx.Node) and up is not active and alike(gate.meta["val"], up.meta["val"]):
            call = Call(kernels.gated_product, (gate, up, activation), node)
            return Match(call, (node,), frozenset({active}))
    return None


def _dropout_add(node: fx.Node) -> Match | None:
    """Match dropout(x + bias) + residual, or (x + bias) + residual, of a value that nobody else reads."""
    terms = plain_add(node)
    for branch, residual in (terms, (terms[1], terms[0])) if terms else ():
        found = _dropped(branch) if is_single(branch) else None
        if found is not None:
            call, members = found
            full = Call(call.target, (*call.args[:3], residual, *call.args[4:]), node, call.kwargs)
            return Match(full, (node,), members)
    return None


def _dropout_bias(node: fx.Node) -> Match | None:
    """Match dropout(x + bias) alone."""
    found = _dropped(node) if is_call(node, kernels.dropout) else None
    if found is None or len(found[1]) == 1:
        return None
    return Match(Call(found[0].target, found[0].args, node, found[0].kwargs), (node,), found[1])


def _dropped(node: fx.Node) -> tuple[Call, frozenset[fx.Node]] | None:
    """Return ``bias_dropout_add(rank, x, bias, None, ...)`` for ``dropout(x + bias)`` or ``x + bias``; and members."""
    rank: Any = next(iter(node.graph.nodes))
    x: Any
    x, drawn = (node.args[1], node.args[2:]) if is_call(node, kernels.dropout) else (node, ())
    biased = split_bias(x)
    if biased is None and x is node:
        return None
    parts, members = ((biased.x, biased.bias), biased.members) if biased else ((x, None), ())
    call = Call(kernels.bias_dropout_add, (rank, *parts, None, *drawn), node, node.kwargs)
    return call, frozenset({node, *members})


def _norm_before_reshape(node: fx.Node) -> Match | None:
    """Match norm(a sum) reshaped for norm(the sum reshaped), if rows stay rows (OPT)."""
    source: Any = node.args[0] if is_call(node, *_ADDED_NORMS) else None
    if not is_reshape(source):
        return None
    x: Any = source.args[0]
    is_sum = plain_add(x) is not None or is_call(x, kernels.bias_dropout_add)
    if not is_sum or shape_of(x)[-1] != shape_of(node)[-1]:
        return None
    norm = Call(node.target, (x, *node.args[1:]), node, node.kwargs)
    return Match(Call(source.target, (norm, list(shape_of(node))), node), (node,), frozenset({source}))


def _add_norm(node: fx.Node) -> Match | None:
    """Match a norm with the sum that it normalises, which others may read too."""
    if not is_call(node, *_ADDED_NORMS) or not is_vector(node.args[1], shape_of(node)[-1]):
        return None
    total: Any = node.args[0]
    if total.meta["val"].dtype != node.meta["val"].dtype:
        return None
    rank = next(iter(node.graph.nodes))
    if is_call(total, kernels.bias_dropout_add):
        x, *rest = total.args[1:]
        kwargs = dict(total.kwargs)
    else:
        terms = plain_add(total)
        if terms is None:
            return None
        x, rest, kwargs = terms[0], [None, terms[1]], {}
    arguments = (rank, x, *node.args[1:], *rest)
    return Match(Call(_ADDED_NORMS[node.target], arguments, node, kwargs), (total, node), frozenset())


_ADDED_NORMS: Mapping[Any, Any] = {
    kernels.layer_norm: kernels.add_layer_norm,
    kernels.rms_norm: kernels.add_rms_norm,
}

RULES: tuple[Rule, ...] = (
    match_activation,
    match_half_loss,
    _grouped_attention,
    match_layer_norm,
    match_rms_norm,
    match_torch_rms_norm,
    match_rotary,
    match_partial_rotary,
    partial(_gated_product, "silu", aten.silu.default, {}),
    partial(_gated_product, "gelu", aten.gelu.default, {}),
    partial(_gated_product, "gelu_tanh", aten.gelu.default, {"approximate": "tanh"}),
    _linear_gelu,
    _bias_gelu,
    _dropout_add,
    _dropout_bias,
    _norm_before_reshape,
    _add_norm,
)
