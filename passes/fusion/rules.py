"""Join chains of memory-bound operators into one kernel each (SC21 §4.2).

Works on each stage of the divided, cut program, so no kernel needs a sharding rule and no boundary gets wider. There a
row-parallel bias stands after the all-reduce already, and goes from there into the kernel.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from autoptd.passes.cost.work import describe_saving
from autoptd.passes.fusion import matches, patterns
from autoptd.passes.fusion.activations import ANALYTIC, KNOWN, match_activation
from autoptd.passes.fusion.patterns import Call, Match, alike, is_call, is_reshape, is_single
from autoptd.passes.fusion.writing import ChainWriter
from autoptd.passes.ir.names import operator_word, rename_nodes
from autoptd.passes.ir.nodes import Propagation, arguments, info, shape_of
from autoptd.passes.ir.products import find_factors, read_product
from autoptd.passes.ir.program import Program, Stage, copy_graph, find_trained
from autoptd.passes.operators.table import OPERATORS, Trait
from autoptd.runtime import aten, kernels
from autoptd.runtime.kernels.operands import HALF

NEAR = 8  # GEMMs allowed within a chain: branches of one layer wait for each other


# A rule reads a call of one of some targets, and describes the chain that ends there and its replacement.
Rule = tuple[Collection[Any], Callable[[fx.Node], Match | None]]


def fuse_operators(program: Program) -> Program:
    """Rewrite every stage's chains by the rules below, in their order.

    Raises ValueError if a kernel's result has another shape or dtype than the chain's.
    """
    propagation = Propagation(program.mesh)
    rules = (*RULES, _WHOLE_LOSS) if program.mesh.tensor == 1 else RULES
    counts: Counter[str] = Counter()
    stages: list[Stage] = []
    for stage in program.stages:
        copied = replace(stage, graph=copy_graph(stage.graph))
        writer = ChainWriter(propagation)
        for rule in rules:
            _apply(rule, copied, writer)
        counts.update(operator_word(node.target) for node in copied.graph.nodes if node in writer.written)
        stages.append(replace(stage, graph=rename_nodes(copied.graph)))
    found = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    entry = f"{found}; {describe_saving(program.stages, stages)}" if found else "nothing to fuse"
    return program.replace_stages(tuple(stages), f"fuse_operators {entry}")


def _apply(rule: Rule, stage: Stage, writer: ChainWriter) -> None:
    """Replace the chains that the rule describes and `_Judge` allows."""
    graph, (targets, read) = stage.graph, rule
    calls = (graph.find_nodes(op="call_function", target=target, sort=False) for target in targets)
    judge: _Judge | None = None
    for node in sorted(itertools.chain.from_iterable(calls)):
        match = read(node) if node.users else None
        if match is not None:
            judge = judge or _Judge(stage)
            if judge.allows(match):
                writer.replace(match)


class _Judge:
    """The judge of the chains that a rule matches, by the `stage` before the rule writes a call."""

    def __init__(self, stage: Stage) -> None:
        self._trained = find_trained(stage)
        counted = itertools.accumulate(bool(find_factors(node)) for node in stage.graph.nodes)
        self._products = dict(zip(stage.graph.nodes, counted, strict=True))

    def allows(self, match: Match) -> bool:
        """Return whether the chain lies in one layer and one region of recomputation, and keeps its gradients.

        A long skip spans all layers, and no stage may end in a kernel. All results have gradients or none; no constant.
        """
        chain = {*match.members, *match.results}
        places = [self._products[node] for node in chain if node in self._products]
        return (
            max(places, default=0) - min(places, default=0) <= NEAR
            and len({info(node).recompute for node in chain}) == 1
            and self._trained.isdisjoint(match.constants)
            and len({node in self._trained for node in match.results}) == 1
        )


# Rules


def _half_linear(node: fx.Node) -> Match | None:
    """Match a linear of a parameter in half precision, whose gradient a GPU adds to its sum in the product."""
    product = read_product(node)
    if product is None or node.kwargs or not _is_half_parameter(product.weight):
        return None
    if product.bias is not None and shape_of(product.bias) != shape_of(node)[-1:]:
        return None
    return Match(Call(kernels.linear, (product.x, *product.parameters), node, product.options))


def _add_linear(node: fx.Node) -> Match | None:
    """Match total + linear(x, weight) * scale of fewer inputs than outputs, whose result takes longer than its sums."""
    found: dict[int, Match] = {}
    for term, total in patterns.both_orders(node) if patterns.plain_add(node) else ():
        scaled = is_call(term, aten.mul.Tensor) and isinstance(term.args[1], (int, float))
        inner, scale = term.args if scaled else (term, 1.0)
        product = read_product(inner) if is_single(term) and is_single(inner) else None
        if product is None or product.bias is not None or inner.kwargs or len(shape_of(product.weight)) != 2:
            continue
        if (width := shape_of(product.x)[-1]) < shape_of(inner)[-1]:
            call = Call(kernels.add_linear, (total, *product.factors, float(scale)), node, product.options)
            found[width] = Match(call, {term, inner})
    return found[min(found)] if found else None


def _half_embedding(node: fx.Node) -> Match | None:
    """Match a lookup in a table in half precision, to whose sum a GPU adds the gradients of rows."""
    return Match(Call(kernels.lookup, node.args, node)) if _is_half_parameter(node.args[0]) else None


def _is_half_parameter(node: Any) -> bool:
    return node.op == "get_attr" and node.meta["val"].dtype in HALF and len(shape_of(node)) == 2


def _bias_gelu(node: fx.Node) -> Match | None:
    """Match gelu(x + bias), also that of a linear, which the bias is taken out of."""
    biased = patterns.split_bias(node.args[0], of_linear=True)  # type: ignore[arg-type]
    if biased is None:
        return None
    x, bias, added = biased
    return Match(Call(kernels.bias_gelu, (x, bias), node, node.kwargs), added)


def _grouped_attention(node: fx.Node) -> Match | None:
    """Match fused attention of fewer key and value heads than query heads, without a mask."""
    given = arguments(node)
    if not given.get("enable_gqa") or given["attn_mask"] is not None or given["dropout_p"]:
        return None
    options = {name: given[name] for name in ("is_causal", "scale") if given[name] is not None}
    return Match(Call(kernels.grouped_attention, node.args[:3], node, options))


def _gated_product(node: fx.Node) -> Match | None:
    """Match activation(gate) * up."""
    for (target, kwargs, _), (active, up) in itertools.product(KNOWN, patterns.both_orders(node)):
        if is_call(active, target) and active.kwargs == kwargs and is_single(active):
            gate = active.args[0]
            if isinstance(up, fx.Node) and up is not active and alike(gate.meta["val"], up.meta["val"]):
                activation = operator_word(target) + "_tanh" * ("approximate" in kwargs)
                return Match(Call(kernels.gated_product, (gate, up, activation), node), (active,))
    return None


def _dropout_add(node: fx.Node) -> Match | None:
    """Match dropout(x + bias) + residual, or (x + bias) + residual, of a value that nobody else reads."""
    for branch, residual in patterns.both_orders(node) if patterns.plain_add(node) else ():
        found = _dropped(branch) if is_single(branch) else None
        if found is not None:
            args = (*found.call.args[:3], residual, *found.call.args[4:])
            return Match(replace(found.call, args=args, like=node), (branch, *found.members))
    return None


def _dropout_bias(node: fx.Node) -> Match | None:
    """Match dropout(x + bias) alone."""
    found = _dropped(node)
    return found if found is not None and found.members else None


def _dropped(node: fx.Node) -> Match | None:
    """Match dropout(x + bias), dropout(x) or x + bias: ``bias_dropout_add(rank, x, bias, None, ...)``."""
    rank: Any = next(iter(node.graph.nodes))
    x: Any
    x, drawn = (node.args[1], node.args[2:]) if is_call(node, kernels.dropout) else (node, ())
    biased = patterns.split_bias(x)
    if biased is None and x is node:
        return None
    x, bias, added = biased or (x, None, ())
    return Match(Call(kernels.bias_dropout_add, (rank, x, bias, None, *drawn), node, node.kwargs), added)


def _norm_before_reshape(node: fx.Node) -> Match | None:
    """Match norm(a sum) reshaped for norm(the sum reshaped), if rows stay rows (OPT)."""
    source: Any = node.args[0]
    if not is_reshape(source):
        return None
    x: Any = source.args[0]
    is_sum = patterns.plain_add(x) is not None or is_call(x, kernels.bias_dropout_add)
    if not is_sum or shape_of(x)[-1] != shape_of(node)[-1]:
        return None
    norm = Call(node.target, (x, *node.args[1:]), node, node.kwargs)
    return Match(Call(source.target, (norm, list(shape_of(node))), node), (source,))


def _add_norm(node: fx.Node) -> Match | None:
    """Match a norm with the sum that it normalises, which others may read too."""
    total: Any = node.args[0]
    plain = patterns.is_vector(node.args[1], shape_of(node)[-1])
    if not plain or total.meta["val"].dtype != node.meta["val"].dtype:
        return None
    rank = next(iter(node.graph.nodes))
    if is_call(total, kernels.bias_dropout_add):
        x, *rest = total.args[1:]
    else:
        terms = patterns.plain_add(total)
        if terms is None:
            return None
        x, rest = terms[0], [None, terms[1]]
    call = Call(_ADDED_NORMS[node.target], (rank, x, *node.args[1:], *rest), node, total.kwargs)
    return Match(call, several=(total, node))


_ADDED_NORMS: Any = {kernels.layer_norm: kernels.add_layer_norm, kernels.rms_norm: kernels.add_rms_norm}

_FUSED = [getattr(k, "default", k) for k, rules in OPERATORS.items() if Trait.FUSED_ATTENTION & rules.traits]
RULES: Sequence[Rule] = (
    (ANALYTIC, match_activation),
    ((kernels.cross_entropy,), matches.match_half_loss),
    (_FUSED, _grouped_attention),
    ((aten.layer_norm.default, aten.rms_norm.default), matches.match_norm),
    ((aten.mul.Tensor,), matches.match_rms_norm),
    ((aten.add.Tensor,), matches.match_rotary),
    ((aten.cat.default,), matches.match_partial_rotary),
    ((aten.mul.Tensor,), _gated_product),
    ((aten.gelu.default,), _bias_gelu),
    ((aten.add.Tensor,), _dropout_add),
    ((kernels.dropout,), _dropout_bias),
    (_ADDED_NORMS, _norm_before_reshape),
    (_ADDED_NORMS, _add_norm),
    ((aten.add.Tensor,), _add_linear),
    ((aten.linear.default, aten.addmm.default, aten.mm.default, aten.matmul.default), _half_linear),
    ((aten.embedding.default,), _half_embedding),
)
_WHOLE_LOSS: Rule = ((aten.cross_entropy_loss.default,), matches.match_whole_loss)
