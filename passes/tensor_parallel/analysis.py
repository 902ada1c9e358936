"""The walk that finds the axes of a whole graph: each operator's rule relates those that it reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from autoptd.passes.ir.node_info import info
from autoptd.passes.ir.nodes import operator_name, shape_of, where
from autoptd.passes.tensor_parallel import axes as ax
from autoptd.passes.tensor_parallel.axes import Axis
from autoptd.passes.tensor_parallel.axis_map import AxisMap, Rule
from autoptd.passes.tensor_parallel.axis_rules import RULES, text_rule
from autoptd.passes.tensor_parallel.shape_rules import opaque
from autoptd.runtime.program.placement import Parameter


def find_axes(
    graph: fx.Graph,
    parameters: Mapping[str, Parameter],
    *,
    tensor: int,
    rules: Mapping[str, Rule],
    sever: frozenset[fx.Node] = frozenset(),
) -> AxisMap:
    """Return the axes of every value in a one-stage `graph`, for `tensor` ranks; `rules` go before torch's own."""
    axes = AxisMap(parameters, tensor=tensor, rules=rules, sever=sever)
    for node in graph.nodes:
        _visit(axes, node)
    return axes


def user_rules(rules: Mapping[Any, str] | None) -> dict[str, Rule]:
    """Return the user's ``rules=`` by operator name.

    Keys are operators (``torch.ops.mylib.op``) or their names ("mylib.op", "mylib::op"), values texts as `axis_rules`
    describes them. Raises TypeError or ValueError for others.
    """
    table = {}
    if rules is not None and not isinstance(rules, Mapping):
        raise TypeError(f"rules is {rules!r}; expected a dict from an operator, or its name, to a text")
    for key, text in (rules or {}).items():
        operator = getattr(key, "_opoverload", key)  # of what torch.library.custom_op gives
        if not isinstance(operator, str) and not hasattr(operator, "__name__"):
            raise TypeError(
                f'rules has the key {key!r}; expected an operator, or its name such as "mylib.op"'
            )
        if not isinstance(text, str):
            raise TypeError(
                f'the rule of {operator} must be a text such as "b s h, h f -> b s f", not {text!r}'
            )
        name = operator.replace("::", ".") if isinstance(operator, str) else operator_name(operator)
        table[name] = text_rule(text)
    return table


def _visit(axes: AxisMap, node: fx.Node) -> None:
    if node.op == "output":
        return
    if node.op == "placeholder" and info(node).role == "rank":
        axes.rank = node
        return
    if node.op in ("placeholder", "get_attr"):
        axes.axes[node] = tuple(Axis(size) for size in shape_of(node))
        if node.op == "placeholder":
            for axis in axes.axes[node]:
                axis.kept = axis.size == 1
            axes.batch.add(node)
            axes.inputs.append(node)
        elif axes.parameters[str(node.target)].kind == "parameter":
            axes.weights.add(node)
            axes.learned.add(node)
        return
    _mark(axes, node)
    found = _rule(axes, node)(axes, node)
    if isinstance(node.meta["val"], (tuple, list)):
        axes.results[node] = found
    else:
        axes.axes[node] = found


def _mark(axes: AxisMap, node: fx.Node) -> None:
    sources = node.all_input_nodes
    if any(s in axes.batch for s in sources):
        axes.batch.add(node)
    if any(s in axes.learned for s in sources):
        axes.learned.add(node)
    name = operator_name(node.target)
    views = ("aten.t", "aten.numpy_T", "aten.transpose", "aten.reshape", "aten.permute", "aten.to")
    if name in views and node.args[0] in axes.weights:
        axes.weights.add(node)


def _rule(axes: AxisMap, node: fx.Node) -> Rule:
    name = operator_name(node.target)
    axes.operators.add(name)
    rule = axes.rules.get(name) or RULES.get(name)
    if rule is not None:
        return rule
    if axes.tensor > 1 and node in axes.learned:
        if name.startswith("aten."):
            axes.repeated.add(name)
            return opaque
        shapes = [list(shape_of(n)) for n in node.all_input_nodes if n in axes.axes]
        letters = [" ".join("bsdefgij"[: len(shape)]) for shape in shapes]
        raise ax.IndivisibleError(
            f"no sharding rule for {name} at {where(node)}, whose tensors have shapes {shapes}; give one, e.g. "
            f'autoptd.compile(..., rules={{"{name}": "{", ".join(letters)} -> {max(letters, key=len)}"}}) for one '
            'that works element by element, with a name for each dimension of each tensor and "!" after a name '
            "that must stay whole, or use tensor=1"
        )
    return opaque
