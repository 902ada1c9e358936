"""Bring an exported graph into the form that every later pass reads.

``torch.no_grad`` regions are inlined, in-place operators made functional, operators without effect dropped, and
dropout given its number. Numerics stay bit for bit.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from autoptd.passes.functionalize import Cell, Storage, functional_twin, is_mutation
from autoptd.passes.naming import name_nodes
from autoptd.passes.program import Program, Stage
from autoptd.runtime import aten, kernels
from autoptd.runtime.placement import Parameter

_DEVICE_ARGUMENTS = ("device", "pin_memory", "layout", "non_blocking")
_EMPTY = frozenset({aten._assert_tensor_metadata.default, aten._assert_async.msg, aten._assert_async.default,
                    aten._assert_scalar.default, aten.sym_constrain_range_for_size.default,
                    aten.sym_constrain_range.default})


def normalize(program: Program) -> Program:
    """Rewrite the captured stage's graph into functional aten operators with ``rank`` as first placeholder.

    Dropouts become ``kernels.dropout`` and attention with dropout ``kernels.attention``, numbered in capture
    order. Raises ValueError, with file and line, for a random or in-place operator that has no such form.
    """
    (stage,) = program.stages
    writer = Writer(stage.parameters)
    values: dict[fx.Node, Any] = {}
    before = len(stage.graph.nodes)
    for node in stage.graph.nodes:
        writer.visit(node, values, grad=True)
    graph = name_nodes(writer.graph)
    entry = f"normalize {before} -> {len(graph.nodes)} nodes, {writer.dropouts} dropouts"
    return program.replace_stages((Stage(graph, stage.parameters, stage.constants),), entry)


class Writer:
    """Writes the normalised graph, one operator of the exported graph at a time.

    `trained` holds the nodes through which a gradient reaches a parameter.
    """

    def __init__(self, parameters: Mapping[str, Parameter]) -> None:
        self.graph = fx.Graph()
        self.parameters = parameters
        self.trained: set[fx.Node] = set()
        self.dropouts = 0
        self.rank = self.graph.placeholder("rank")
        self.rank.meta = {"val": None, "path": "", "line": "", "role": "rank"}
        self.storage = Storage(self)
        self._detached: dict[fx.Node, fx.Node] = {}

    def emit(self, target: Callable[..., Any], args: tuple[Any, ...], meta: Mapping[str, Any],
             kwargs: Mapping[str, Any] | None = None) -> fx.Node:
        """Append a call of `target`, its ``meta`` taken from the operator it stands for."""
        node = self.graph.call_function(target, args, dict(kwargs or {}))
        node.meta = dict(meta)
        if target is not aten.detach.default and _is_floating(meta["val"]) \
                and any(n in self.trained for n in node.all_input_nodes):
            self.trained.add(node)
        return node

    def visit(self, node: fx.Node, values: dict[fx.Node, Any], grad: bool) -> None:
        """Rewrite one node; `values` maps the region's nodes to what they became, `grad` is its grad mode."""
        if node.op == "output":
            result = fx.map_arg(node.args[0], lambda n: self.storage.read(values[n]))
            self.graph.output(result).meta = dict(node.meta)
        elif node.op == "placeholder" or (node.op == "get_attr" and node.meta.get("region") is None):
            copied = self.graph.node_copy(node)
            copied.meta = node.meta
            if node.op == "get_attr" and self.parameters[str(node.target)].requires_grad:
                self.trained.add(copied)
            values[node] = Cell(copied)
        elif node.op == "get_attr":
            values[node] = node.meta["region"]
        elif isinstance(node.target, torch._ops.HigherOrderOperator):
            self._inline(node, values, grad)
        elif node.target is operator.getitem and isinstance(values[node.args[0]], tuple):
            values[node] = values[node.args[0]][node.args[1]]
        else:
            self._rewrite(node, values, grad)

    def _inline(self, node: fx.Node, values: dict[fx.Node, Any], grad: bool) -> None:
        name = str(node.target)
        if name == "wrap_with_set_grad_enabled":
            grad, region, *operands = (node.args[0], *node.args[1:])
        elif name == "wrap_with_autocast" and node.args[2] is False:
            region, *operands = node.args[4:]
        else:
            raise ValueError(
                f"{where(node)}: {name.replace('wrap_with_', '')} inside forward is not supported; "
                "leave it out of the model (dtypes are chosen by the model's own weights and casts)"
            )
        inner: dict[fx.Node, Any] = {}
        given = iter(operands)
        for child in values[region].nodes:
            if child.op == "placeholder":
                inner[child] = values[next(given)]
            elif child.op == "output":
                values[node] = tuple(inner[n] for n in child.args[0])
            else:
                self.visit(child, inner, grad)

    def _rewrite(self, node: fx.Node, values: dict[fx.Node, Any], grad: bool) -> None:
        target = node.target
        if target in _EMPTY:
            return
        read = self.storage.read if grad else self._read_detached
        args = fx.map_arg(node.args, lambda n: read(values[n]))
        kwargs = fx.map_arg({k: v for k, v in node.kwargs.items() if k not in _DEVICE_ARGUMENTS},
                            lambda n: read(values[n]))
        if is_mutation(target):
            values[node] = self._write(node, values[node.args[0]], args, kwargs, grad)
        else:
            values[node] = self.storage.derive(node, self._apply(target, node, args, kwargs), values)

    def _apply(self, target: Any, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        """The value of `target`, which stands for the exported operator `node`."""
        rule = RULES.get(target)
        made = rule(self, node, args, kwargs) if rule is not None else None
        if made is None:
            _check_random(node, target)
            made = self.emit(target, args, node.meta, kwargs)
        return made

    def _write(
        self, node: fx.Node, cell: Cell, args: tuple[Any, ...], kwargs: dict[str, Any], grad: bool
    ) -> Cell:
        """An in-place operator: its functional twin's value becomes the value of `cell`."""
        twin = functional_twin(node.target)  # type: ignore[arg-type]
        if twin is None or (not grad and self.storage.read(cell) in self.trained):
            raise ValueError(f"{where(node)}: {node.target} in place is not supported; write it out of place")
        if node.target is aten.detach_.default:
            cell.node, cell.base = self._apply(twin, node, args, kwargs), None
        elif twin is aten.copy.default:
            made = self.emit(aten.expand.default, (args[1], list(node.meta["val"].shape)), node.meta)
            self.storage.write(cell, made)
        else:
            self.storage.write(cell, self._apply(twin, node, args, kwargs))
        return cell

    def _read_detached(self, tensor: Any) -> fx.Node:
        node: fx.Node = self.storage.read(tensor)
        if node not in self.trained:
            return node
        if node not in self._detached:
            self._detached[node] = self.emit(aten.detach.default, (node,), node.meta)
        return self._detached[node]

    def next_dropout(self) -> int:
        """The number of the next operator that draws a mask."""
        self.dropouts += 1
        return self.dropouts - 1


Rule = Callable[[Writer, fx.Node, tuple[Any, ...], dict[str, Any]], "fx.Node | None"]


def where(node: fx.Node) -> str:
    """The user's place of a node, for messages: "gpt.py:52 (h.0.attn)"."""
    path, line = node.meta.get("path", ""), node.meta.get("line", "")
    return f"{line} ({path})" if line and path else line or path or node.name


def _is_floating(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return any(_is_floating(v) for v in value)
    return isinstance(value, Tensor) and value.is_floating_point()


def _check_random(node: fx.Node, target: Any) -> None:
    if isinstance(target, OpOverload) and torch.Tag.nondeterministic_seeded in target.tags:
        raise ValueError(
            f"{where(node)}: {target} draws random numbers in a way that would differ between meshes; "
            "only dropout and attention dropout are supported: pass the numbers in as an input"
        )


def argument(node: fx.Node, args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str) -> Any:
    """The value of an operator's argument `name`, by position, keyword or default."""
    for place, spec in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if spec.name == name:
            return args[place] if place < len(args) else kwargs.get(name, spec.default_value)
    raise KeyError(name)


def _same(writer: Writer, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node | None:
    source: fx.Node = args[0]
    return source


def _cast(writer: Writer, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node | None:
    source: fx.Node = args[0]
    dtype = node.meta["val"].dtype
    if source.meta["val"].dtype == dtype:
        return source
    return writer.emit(aten.to.dtype, (source, dtype), node.meta)


def _contiguous(writer: Writer, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node | None:
    source: fx.Node = args[0]
    if source.meta["val"].stride() == node.meta["val"].stride():
        return source
    return writer.emit(aten.contiguous.default, (source,), node.meta)


def _reshape(writer: Writer, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node | None:
    """view and reshape alike, with their sizes spelt out; reshape also where later passes change the strides."""
    source: fx.Node = args[0]
    shape = list(node.meta["val"].shape)
    if list(source.meta["val"].shape) == shape:
        return source
    return writer.emit(aten.reshape.default, (source, shape), node.meta)


def _expand(writer: Writer, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node | None:
    source: fx.Node = args[0]
    shape = list(node.meta["val"].shape)
    if list(source.meta["val"].shape) == shape:
        return source
    return writer.emit(aten.expand.default, (source, shape), node.meta)


def _slice(writer: Writer, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node | None:
    source: fx.Node = args[0]
    extent, result = source.meta["val"].shape, node.meta["val"].shape
    if extent == result:
        return source
    dim, start, end, step = (argument(node, args, kwargs, name) for name in ("dim", "start", "end", "step"))
    dim = dim % len(extent)
    start = 0 if start is None else start + extent[dim] if start < 0 else start
    end = extent[dim] if end is None or end > extent[dim] else end + extent[dim] if end < 0 else end
    sizes = (dim, start, end) if step == 1 else (dim, start, end, step)
    return writer.emit(aten.slice.Tensor, (source, *sizes), node.meta)


def _chunk(writer: Writer, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node | None:
    dim = argument(node, args, kwargs, "dim")
    width = node.meta["val"][0].shape[dim]
    return writer.emit(aten.split.Tensor, (args[0], width, dim), node.meta)


def _detach(writer: Writer, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node | None:
    return None if args[0] in writer.trained else args[0]


def _transpose(writer: Writer, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node | None:
    source: fx.Node = args[0]
    dims = source.meta["val"].dim()
    if dims < 2:
        return source
    if dims == 2:
        return writer.emit(aten.transpose.int, (source, 0, 1), node.meta)
    return writer.emit(aten.permute.default, (source, list(reversed(range(dims)))), node.meta)


def _bitwise(target: OpOverload) -> Rule:
    return lambda writer, node, args, kwargs: writer.emit(target, args, node.meta, kwargs)


def _dropout(writer: Writer, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node | None:
    source: fx.Node = args[0]
    p, training = argument(node, args, kwargs, "p"), argument(node, args, kwargs, "train")
    if not training or p == 0:
        return source
    return writer.emit(kernels.dropout, (writer.rank, source, p, writer.next_dropout()), node.meta)


def _attention(writer: Writer, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node | None:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    q, k, v, mask, p, is_causal, scale, grouped = (argument(node, args, kwargs, name) for name in names)
    if p == 0:
        options = {"is_causal": is_causal, "scale": scale, "enable_gqa": grouped}
        kept = {name: value for name, value in options.items() if value not in (None, False)}
        arguments = (q, k, v) if mask is None else (q, k, v, mask)
        return writer.emit(aten.scaled_dot_product_attention.default, arguments, node.meta, kept)
    if grouped:
        k, v = (_repeat_heads(writer, q, x) for x in (k, v))
    arguments = (writer.rank, q, k, v, mask, p, writer.next_dropout(), is_causal, scale)
    return writer.emit(kernels.attention, arguments, node.meta)


def _repeat_heads(writer: Writer, q: fx.Node, x: fx.Node) -> fx.Node:
    """Each key/value head [b, g, s, a] as often as query heads share it, neighbours together."""
    b, g, s, a = x.meta["val"].shape
    times = q.meta["val"].shape[1] // g
    if times == 1:
        return x
    for target, shape in (
        (aten.reshape.default, [b, g, 1, s, a]),
        (aten.expand.default, [b, g, times, s, a]),
        (aten.reshape.default, [b, g * times, s, a]),
    ):
        meta = {**x.meta, "val": x.meta["val"].new_empty(shape)}
        x = writer.emit(target, (x, shape), meta)
    return x


RULES: dict[Any, Rule] = {
    **dict.fromkeys((aten.alias.default, aten.lift_fresh_copy.default, aten.lift_fresh.default), _same),
    **dict.fromkeys(
        (aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten.to.other, aten.to.prim_Device, aten.to.prim_dtype,
         aten._to_copy.default, aten.type_as.default),
        _cast,
    ),
    **dict.fromkeys((aten.contiguous.default, aten.clone.default), _contiguous),
    **dict.fromkeys((aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.view_as.default,
                     aten.reshape_as.default, aten.flatten.using_ints, aten.unflatten.int), _reshape),
    **dict.fromkeys((aten.expand.default, aten.expand_as.default), _expand),
    **dict.fromkeys((aten.t.default, aten.numpy_T.default), _transpose),
    aten.slice.Tensor: _slice,
    aten.chunk.default: _chunk,
    aten.detach.default: _detach,
    aten.dropout.default: _dropout,
    aten.scaled_dot_product_attention.default: _attention,
    aten.__and__.Tensor: _bitwise(aten.bitwise_and.Tensor),
    aten.__or__.Tensor: _bitwise(aten.bitwise_or.Tensor),
    aten.__xor__.Tensor: _bitwise(aten.bitwise_xor.Tensor),
    aten.__and__.Scalar: _bitwise(aten.bitwise_and.Scalar),
    aten.__or__.Scalar: _bitwise(aten.bitwise_or.Scalar),
}
