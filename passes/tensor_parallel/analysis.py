"""The walk that finds the axes of a whole graph: the rule of each operator relates those that it reads."""

from collections.abc import Callable, Container
from typing import Any

from torch import fx

from autoptd.passes.ir.nodes import aten_name, info, operator_name, shape_of, where
from autoptd.passes.ir.program import Stage
from autoptd.passes.operators import axes as ax
from autoptd.passes.operators.axes import Axis
from autoptd.passes.operators.axis_map import AxisMap, opaque
from autoptd.passes.operators.record import Records
from autoptd.passes.operators.table import Trait, has_trait, rules_of
from autoptd.runtime.kernels.autograd_function import AutogradFunction


def find_axes(stage: Stage, tensor: int, rules: Records, replicated_kv: Container[fx.Node] = ()) -> AxisMap:
    """Return the axes of every value in an uncut `stage`, for `tensor` ranks; `rules` go before torch's own."""
    axes = AxisMap(tensor, replicated_kv)
    for node in stage.graph.nodes:
        if node.op == "call_function":
            _visit(axes, node, rules)
        elif node.op != "output" and info(node).role != "rank":
            own = tuple(Axis(size) for size in shape_of(node))
            axes.axes[node] = (own,)
            if node.op == "placeholder":
                for axis in own:
                    axis.kept = axis.size == 1
                axes.batch.add(node)
                axes.inputs.append(node)
            elif stage.parameters[str(node.target)].kind == "parameter":
                axes.weights.add(node)
                axes.learned.add(node)
    return axes


def _visit(axes: AxisMap, node: fx.Node, rules: Records) -> None:
    for marked in (axes.batch, axes.learned):
        if not marked.isdisjoint(node.all_input_nodes):
            marked.add(node)
    # Of an expert for each row, it is a weight still.
    picked = aten_name(node.target) == "index" and not axes.batch.isdisjoint(node.all_input_nodes[1:])
    if (picked or has_trait(node, Trait.REARRANGES)) and node.args[0] in axes.weights:
        axes.weights.add(node)
    found = _find_rule(axes, node, rules)(axes, node)
    axes.axes[node] = found if isinstance(node.meta["val"], (tuple, list)) else (found,)


def _find_rule(axes: AxisMap, node: fx.Node, rules: Records) -> Callable[..., Any]:
    name = operator_name(node.target)
    axes.operators.add(name)
    rule = (rules.get(name) or rules_of(node)).axes
    if rule is not opaque or axes.tensor == 1 or node not in axes.learned:
        return rule
    if name.startswith(("aten.", "transformers.")) or isinstance(node.target, AutogradFunction):
        axes.repeated.add(name)
        return rule
    shapes = [list(shape_of(n)) for n in node.all_input_nodes if n in axes.axes]
    letters = [" ".join("bsdefgij"[: len(shape)]) for shape in shapes]
    raise ax.IndivisibleError(
        f"no sharding rule for {name} at {where(node)}, whose tensors have shapes {shapes}; give one, e.g. "
        f'autoptd.compile(..., rules={{"{name}": "{", ".join(letters)} -> {max(letters, key=len)}"}}) for one '
        'that works element by element, with a name for each dimension of each tensor and "!" after a name '
        "that must stay whole, or use tensor=1"
    )
