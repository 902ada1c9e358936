"""Bring an exported graph into the form that every later pass reads.

Regions of ``torch.no_grad`` and ``torch.autocast`` are inlined, the latter's casts written out, in-place operators
made functional, operators without effect dropped, and dropouts and draws numbered. Numerics stay bit for bit.
"""

import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autoptd.passes.ir.autocast import Autocast
from autoptd.passes.ir.names import name_nodes
from autoptd.passes.ir.nodes import copy_node, info, nodes_in, refuse_random, where
from autoptd.passes.ir.program import Program, Stage, find_reached
from autoptd.passes.normal_form.autocast import cast_arguments, describe_result, enter_region
from autoptd.passes.normal_form.draws import draws
from autoptd.passes.normal_form.operator_rewrites import rewrite
from autoptd.passes.normal_form.writer import Call, Cell, Writer, functional_twin, is_mutation, refuse_owned
from autoptd.runtime import aten
from autoptd.runtime.kernels.autograd_function import AutogradFunction
from autoptd.runtime.program.placement import Parameter

_DEVICE_ARGUMENTS = ("device", "pin_memory", "layout", "non_blocking")


@dataclass(frozen=True)
class Scope:
    """Torch's modes at the call of an operator."""

    grad: bool = True
    autocast: Autocast | None = None


def normalize(program: Program) -> Program:
    """Rewrite the captured stage's graph into functional aten operators with ``rank`` as first placeholder.

    Dropouts become ``kernels.dropout``, attention with dropout a product, ``kernels.scaled_softmax`` and a product, and
    draws arithmetic on ``kernels.uniform``, numbered in capture order. ValueError, with the line, for other operators.
    """
    (stage,) = program.stages
    writer = Normalizer(stage.parameters)
    values: dict[Any, Any] = {}
    before = len(stage.graph.nodes)
    for node in stage.graph.nodes:
        writer.visit(node, values, Scope(autocast=program.autocast))
    buffers = {name for name, parameter in stage.parameters.items() if parameter.kind == "buffer"}
    graph = name_nodes(writer.graph, buffers)
    entry = f"normalize {before} -> {len(graph.nodes)} nodes, {writer.counts['dropouts']} dropouts"
    entry += f", {writer.counts['draws']} draws" if writer.counts["draws"] else ""
    entry += "".join(f"; {remark} ({count})" for remark, count in writer.remarks.items())
    idle = writer.idle_parameters()
    if idle:
        names = ", ".join(idle[:5]) + (" ..." if len(idle) > 5 else "")
        entry += f"; no gradient reaches {names} ({len(idle)} parameters)"
    return program.replace_stages((Stage(graph, stage.parameters, stage.constants),), entry)


class Normalizer(Writer):
    """A writer of the normalised graph, one operator of the exported graph at a time."""

    def __init__(self, parameters: Mapping[str, Parameter]) -> None:
        super().__init__()
        self.parameters = parameters
        self._detached: dict[fx.Node, fx.Node] = {}

    def visit(self, node: fx.Node, values: dict[Any, Any], scope: Scope) -> None:
        """Rewrite one node; `values` maps the region's nodes to what they became."""
        if node.op == "output":
            loss, *outputs = nodes_in(node.args[0])
            results = [self.read(values[loss]), *(self._read_output(values[n]) for n in outputs)]
            self.graph.output(tuple(results) if outputs else results[0]).meta = dict(node.meta)
        elif node.op == "placeholder" or (node.op == "get_attr" and info(node).region is None):
            copied = copy_node(self.graph, node)
            if node.op == "get_attr" and self.parameters[str(node.target)].requires_grad:
                self.trained.add(copied)
            values[node] = Cell(copied, owner=str(node.target) if node.op == "get_attr" else "")
        elif node.op == "get_attr":
            values[node] = info(node).region
        elif isinstance(node.target, torch._ops.HigherOrderOperator):
            self._inline(node, values, scope)
        elif node.target is operator.getitem and isinstance(values[node.args[0]], tuple):
            values[node] = values[node.args[0]][node.args[1]]
        else:
            self._rewrite(node, values, scope)

    def _inline(self, node: fx.Node, values: dict[Any, Any], scope: Scope) -> None:
        name = str(node.target)
        args: tuple[Any, ...] = node.args
        if name == "wrap_with_set_grad_enabled":
            grad, region, *operands = args
            scope = replace(scope, grad=grad)
        elif name == "wrap_with_autocast":
            device, dtype, enabled, _, region, *operands = args
            scope = replace(scope, autocast=enter_region(scope.autocast, device, dtype, enabled))
        else:
            raise ValueError(
                f"{where(node)}: {name.replace('wrap_with_', '')} inside forward is not supported; leave it out of "
                "the model, or write it with torch operators"
            )
        inner: dict[Any, Any] = {}
        given = iter(operands)
        for child in values[region].nodes:
            if child.op == "placeholder":
                inner[child] = values[next(given)]
            elif child.op == "output":
                values[node] = tuple(inner[n] for n in child.args[0])
            else:
                self.visit(child, inner, scope)

    def _rewrite(self, node: fx.Node, values: dict[Any, Any], scope: Scope) -> None:
        target = node.target
        if "functorch" in (getattr(target, "__module__", None) or ""):
            raise ValueError(
                f"{where(node)}: a transform of torch.func, such as vmap, is not supported in forward; write it with "
                "operators on the whole batch"
            )
        read = self.read if scope.grad else self._read_detached
        options = {k: v for k, v in node.kwargs.items() if k not in _DEVICE_ARGUMENTS}
        args = fx.map_arg(node.args, lambda n: read(values[n]))
        call = Call(self, node, args, fx.map_arg(options, lambda n: read(values[n])), node.meta)
        if is_mutation(target):
            values[node] = self._write(call, values[node.kwargs.get("out", node.args[0])], scope)
            return
        if scope.autocast is not None:
            call = cast_arguments(scope.autocast, call)
        if isinstance(target, AutogradFunction):
            call = replace(call, args=(self.rank, *call.args))
        made = rewrite(target, describe_result(scope.autocast, call, target))
        values[node] = self.derive(node, made, values)

    def _write(self, call: Call, cell: Cell, scope: Scope) -> Cell:
        """Replace an in-place operator: its functional twin's value becomes the value of `cell`."""
        node, drawn = call.node, draws(call.node.target)
        twin = node.target if drawn else functional_twin(node.target)
        if twin is None:
            refuse_random(node, node.target)
            refuse_owned(cell, node)
        if twin is None or (not drawn and not scope.grad and self.read(cell) in self.trained):
            raise ValueError(f"{where(node)}: {node.target} in place is not supported; write it out of place")
        if node.target is aten.detach_.default:
            cell.node, cell.base = rewrite(twin, call), None
            return cell
        if twin is aten.copy.default:
            args = call.args[1], list(call.val.shape)
            twin, call = aten.expand.default, replace(call, args=args, kwargs={})
        self.write(cell, rewrite(twin, describe_result(scope.autocast, call, twin)))
        return cell

    def _read_detached(self, tensor: Any) -> fx.Node:
        node: fx.Node = self.read(tensor)
        if node not in self.trained:
            return node
        if node not in self._detached:
            self._detached[node] = self.emit(aten.detach.default, (node,), node.meta)
        return self._detached[node]

    def _read_output(self, tensor: Any) -> fx.Node:
        """Return a value that a call returns besides the loss, without a gradient, made as soon as the value is."""
        source, node = self.read(tensor), self._read_detached(tensor)
        if node is not source:
            source.append(node)
        return node

    def idle_parameters(self) -> list[str]:
        """Return the parameters that want a gradient and get none from the loss."""
        loss = next(iter(reversed(self.graph.nodes))).all_input_nodes
        names = {str(n.target) for n in find_reached(loss, self.trained) if n.op == "get_attr"}
        return [name for name, p in self.parameters.items() if p.requires_grad and name not in names]
