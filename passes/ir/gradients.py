"""Find the values of a stage that have a gradient, and those that a result's gradient reaches."""

from collections.abc import Container, Iterable

from torch import fx

from autoptd.passes.ir.nodes import has_gradients, info, walk, wants_gradient
from autoptd.passes.ir.program import Stage
from autoptd.runtime import aten, kernels


def find_trained(stage: Stage) -> set[fx.Node]:
    """Return the values that have a gradient, from a trainable parameter or a received value that wants one."""
    trained: set[fx.Node] = set()
    for node in stage.graph.nodes:
        if node.op == "get_attr":
            wants = stage.parameters[str(node.target)].requires_grad
        else:
            starts = node.op == "placeholder" or not trained.isdisjoint(node.all_input_nodes)
            wants = starts and may_be_trained(node)
        if wants:
            trained.add(node)
    return trained


def find_reached(results: Iterable[fx.Node], trained: Container[fx.Node]) -> set[fx.Node]:
    """Return the values among the `trained` that a gradient of `results` reaches."""
    wanted = (node for node in results if node in trained)
    return set(walk(wanted, lambda node: [source for source in node.all_input_nodes if source in trained]))


def may_be_trained(node: fx.Node) -> bool:
    """Return whether a value may have a gradient, judged by its node alone."""
    if not has_gradients(node.meta.get("val")):
        return False
    if node.op == "placeholder":
        return info(node).role == "boundary" and wants_gradient(node)
    return node.target not in (aten.detach.default, kernels.uniform)
