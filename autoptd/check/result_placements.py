"""The placement of each call's result, by the `placed` rules of `autoptd.passes.operators`.

Whole arguments give a whole result, unless an operator's rule judges these too. Operators without a rule give an
unknown placement.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from torch import fx
from torch._ops import OpOverload

from autoptd.passes.ir.nodes import operator_name
from autoptd.passes.operators.proof import PARTIAL, UNKNOWN, WHOLE, Found, Placements, elementwise
from autoptd.passes.operators.record import OperatorRules, Trait
from autoptd.passes.operators.table import OPERATORS, rules_of
from autoptd.passes.operators.views import reshape_placed
from autoptd.runtime import aten

# Rules of operators that an edit may call as functions: x / y, x.view(...).
_FUNCTIONS = (elementwise, reshape_placed)


def placement_after(node: fx.Node, placements: Placements, rules: Mapping[str, OperatorRules]) -> Found:
    """Return the placement of a call's result; the user's `rules` go before ours.

    Raises PlacementError where the tensor ranks would compute something else than the undivided program; it says what
    is wrong there, and the caller says where.
    """
    record = _find_rules(node, rules)
    if Trait.ANY_PLACEMENT in record.traits and record.placed is not None:
        return record.placed(node, placements)
    found = [placements[n] for n in node.all_input_nodes]
    if all(placement is WHOLE for placement in found):
        return WHOLE
    if any(PARTIAL in (placement if isinstance(placement, tuple) else (placement,)) for placement in found):
        return record.of_partial(node, placements)
    return record.placed(node, placements) if record.placed is not None else UNKNOWN


def _find_rules(node: fx.Node, rules: Mapping[str, OperatorRules]) -> OperatorRules:
    if isinstance(node.target, OpOverload):
        return rules.get(operator_name(node.target)) or rules_of(node)
    return OPERATORS.get(node.target) or _rules_of_function(node.target)


@cache
def _rules_of_function(function: Any) -> OperatorRules:
    """The record of the operator that a Python function is named like."""
    name = str(getattr(function, "__name__", ""))
    name = {"truediv": "div"}.get(name, name)
    record = OPERATORS.get(getattr(aten, name, None)) or OperatorRules()
    return record if record.placed in _FUNCTIONS else OperatorRules()
