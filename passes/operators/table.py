"""The records of all operators, under one key: the overload packet of torch, or our function."""

from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from autoptd.passes.ir.autograd_functions import is_elementwise
from autoptd.passes.operators import attention, experts, kernels, pieces, pointwise, products, reductions, scores, views
from autoptd.passes.operators.pointwise import FOREIGN
from autoptd.passes.operators.record import OperatorRules, Trait
from autoptd.passes.operators.unfamiliar import UNFAMILIAR
from autoptd.runtime.kernels.autograd_function import AutogradFunction

__all__ = ["FOREIGN", "OPERATORS", "Trait", "find_record", "has_trait", "rules_of", "strip"]

_FAMILIES = (attention, experts, kernels, pieces, pointwise, products, reductions, scores, views)
OPERATORS: dict[Any, OperatorRules] = {k: rules for family in _FAMILIES for k, rules in family.RULES.items()}


def find_record(target: Any) -> OperatorRules | None:
    """Return the record of an operator or of our function, if it has one; torch itself tags what works by elements."""
    if not isinstance(target, OpOverload):
        return OPERATORS.get(target)
    tagged = torch.Tag.pointwise in target.tags and target.namespace == "aten" and len(target._schema.returns) == 1
    return OPERATORS.get(target.overloadpacket, pointwise.POINTWISE if tagged else None)


def rules_of(node: fx.Node) -> OperatorRules:
    """Return the record of the operator that a node calls; of one without a record, the defaults, and its costs."""
    target: Any = node.target
    if (found := find_record(target)) is not None:
        return found
    if isinstance(target, AutogradFunction):
        return pointwise.ELEMENTWISE_FUNCTION if is_elementwise(node) else FOREIGN
    foreign = isinstance(target, OpOverload) and target.namespace not in ("aten", "autoptd")
    return FOREIGN if foreign else UNFAMILIAR


def has_trait(node: fx.Node, trait: Trait) -> bool:
    """Return whether the operator that a node calls has this trait, or any of these."""
    return bool(trait & rules_of(node).traits)


def strip(node: fx.Node, traits: Trait) -> fx.Node:
    """Return the argument of the chain of operators with any of `traits` that ends at `node`."""
    while has_trait(node, traits) and len(node.all_input_nodes) == 1:
        (node,) = node.all_input_nodes
    return node
