"""What depends on neither parameters nor data: moved out of the step, and attention masks proved causal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from autoptd.passes.naming import name_nodes
from autoptd.passes.program import Program, Stage, tensor_bytes
from autoptd.runtime import aten, kernels
from autoptd.runtime.placement import Parameter

_SDPA = aten.scaled_dot_product_attention.default
_PROOF_BLOCK = 1 << 26  # mask elements evaluated at once
_PROOF_LIMIT = 1 << 31  # a larger mask is left as it is

# Operators that read no more than a tensor's shape and dtype -> the operator that makes the same from nothing.
_FACTORIES = {
    aten.new_ones.default: aten.ones.default,
    aten.new_zeros.default: aten.zeros.default,
    aten.new_full.default: aten.full.default,
    aten.ones_like.default: aten.ones.default,
    aten.zeros_like.default: aten.zeros.default,
    aten.full_like.default: aten.full.default,
}


def fold_constants(program: Program) -> Program:
    """Move constant subgraphs to ``Stage.constants``, each made once; drop masks that are exactly causal.

    A constant depends on buffers at most. Attention whose mask is proved, by evaluating it, to allow just the
    keys up to each query gets ``is_causal=True``; one that allows every key gets no mask; all others are kept.
    """
    (stage,) = program.stages
    folder = _Folder(stage.graph, stage.parameters, program.buffers)
    proofs = folder.drop_masks()
    graph, constants, made = folder.split()
    used = {str(n.target) for g in (graph, constants) for n in g.nodes if n.op == "get_attr"}
    lifted = {name for name in program.buffers if name.startswith("lifted_tensor_")}
    kept = {name: p for name, p in stage.parameters.items() if name in used or name not in lifted}
    size = sum(tensor_bytes(node.meta["val"]) for node in graph.nodes if str(node.target) in made)
    entry = f"fold_constants {len(stage.graph.nodes)} -> {len(graph.nodes)} nodes, {len(made)} constants of {size} bytes"
    return program.replace_stages((Stage(graph, {**kept, **made}, constants),), entry + proofs)


class _Folder:
    """A stage's graph with its constant nodes marked, equal ones merged."""

    def __init__(self, graph: fx.Graph, parameters: Mapping[str, Parameter], buffers: Mapping[str, Tensor]) -> None:
        self.parameters = parameters
        self.evaluator = _Evaluator(buffers)
        self.graph = fx.Graph()
        self.constant: set[fx.Node] = set()
        self._copy(graph)

    def _copy(self, graph: fx.Graph) -> None:
        """Copy `graph`, one node for all equal constants."""
        values: dict[fx.Node, fx.Node] = {}
        first: dict[str, fx.Node] = {}
        for node in graph.nodes:
            values[node] = copied = self.graph.node_copy(node, values.__getitem__)
            copied.meta = node.meta
            _free_of_data(copied)
            if node.op == "get_attr":
                fixed = self.parameters[str(node.target)].kind == "buffer"
            else:
                fixed = node.op == "call_function" and all(n in self.constant for n in copied.all_input_nodes)
            if fixed:
                key = f"{copied.target} {copied.args!r} {copied.kwargs!r}"
                values[node] = kept = first.setdefault(key, copied)
                self.constant.add(kept)
                if kept is not copied:
                    self.graph.erase_node(copied)

    def drop_masks(self) -> str:
        """Replace proved masks; say how many."""
        verdicts: dict[fx.Node, str] = {}
        counts: dict[str, int] = {}
        for node in self.graph.nodes:
            place = 3 if node.target is _SDPA else 4 if node.target is kernels.attention else 0
            mask = node.args[place] if 0 < place < len(node.args) else None
            if not isinstance(mask, fx.Node) or mask not in self.constant:
                continue
            if mask not in verdicts:
                verdicts[mask] = self.evaluator.judge(mask)
            verdict = verdicts[mask]
            counts[verdict] = counts.get(verdict, 0) + 1
            if verdict == "causal" and node.target is _SDPA:
                node.args = node.args[:3]
                node.kwargs = {"is_causal": True, **node.kwargs}
            elif verdict == "causal":
                node.args = (*node.args[:4], None, *node.args[5:7], True, *node.args[8:])
            elif verdict == "open":
                node.args = node.args[:3] if place == 3 else (*node.args[:4], None, *node.args[5:])
        return "".join(f"; {count} attention masks {verdict}" for verdict, count in sorted(counts.items()))

    def split(self) -> tuple[fx.Graph, fx.Graph, dict[str, Parameter]]:
        """The graph without its constants, the graph that makes them, and each as a Parameter."""
        named = name_nodes(self.graph)
        fixed = self._mark(named)
        step, once = fx.Graph(), fx.Graph()
        values: dict[fx.Node, fx.Node] = {}
        origins: dict[fx.Node, fx.Node] = {}
        made: dict[str, Parameter] = {}
        outputs: dict[str, fx.Node] = {}

        def value_of(node: fx.Node) -> fx.Node:
            if node not in values:
                target = str(node.target)
                if node.op != "get_attr":
                    target = f"constant.{node.name}"
                    val = node.meta["val"]
                    made[target] = Parameter(target, tuple(val.shape), val.dtype, "constant", False)
                    outputs[target] = origins[node]
                values[node] = step.create_node("get_attr", target, name=node.name)
                values[node].meta = node.meta
            return values[node]

        for node in named.nodes:
            if node in fixed:
                origins[node] = once.node_copy(node, origins.__getitem__)
                origins[node].meta = node.meta
            else:
                args, kwargs = fx.map_arg(node.args, value_of), fx.map_arg(node.kwargs, value_of)
                values[node] = step.create_node(node.op, node.target, args, kwargs, node.name, node.type)
                values[node].meta = node.meta
        once.output(outputs)
        needed = name_nodes(once)
        return step, needed, made

    def _mark(self, graph: fx.Graph) -> set[fx.Node]:
        fixed: set[fx.Node] = set()
        for node in graph.nodes:
            if node.op == "get_attr":
                if self.parameters[str(node.target)].kind == "buffer":
                    fixed.add(node)
            elif node.op == "call_function" and all(n in fixed for n in node.all_input_nodes):
                fixed.add(node)
        return fixed


def _free_of_data(node: fx.Node) -> None:
    """Rewrite ``x.new_ones(...)`` and, for integer x, ``ones_like(x)`` so that they do not depend on x."""
    factory = _FACTORIES.get(node.target)
    if factory is None:
        return
    val = node.meta["val"]
    source = node.args[0].meta["val"]  # type: ignore[union-attr]
    like = str(node.target).split(".")[1].endswith("_like")
    if like and source.is_floating_point():
        return  # a tensor as large as an activation is not worth keeping
    fill = (node.args[1 if like else 2],) if factory is aten.full.default else ()
    node.target, node.args, node.kwargs = factory, (list(val.shape), *fill), {"dtype": val.dtype}


class _Evaluator:
    """Computes constants on the CPU, large masks in blocks of query rows."""

    def __init__(self, buffers: Mapping[str, Tensor]) -> None:
        self.buffers = buffers
        self.values: dict[fx.Node, Any] = {}

    def judge(self, mask: fx.Node) -> str:
        """What a mask allows: "causal", "open" (every key), "kept" (anything else), "unknown" (not evaluated)."""
        shape = mask.meta["val"].shape
        if len(shape) < 2 or shape.numel() > _PROOF_LIMIT:
            return "kept" if len(shape) < 2 else "unknown"
        rows = max(1, _PROOF_BLOCK // max(1, shape.numel() // shape[-2]))
        verdicts = {"causal", "open"} if shape[-2] == shape[-1] else {"open"}
        for start in range(0, shape[-2], rows):
            block = self._rows(mask, start, min(rows, shape[-2] - start))
            if block is None:
                return "unknown"
            verdicts &= _allowed(block, start)
            if not verdicts:
                return "kept"
        return "open" if "open" in verdicts else "causal"

    def _rows(self, node: fx.Node, start: int, count: int) -> Tensor | None:
        """Rows ``start .. start + count - 1`` of dimension -2, or None where they cannot be computed."""
        val = node.meta["val"]
        if not isinstance(val, Tensor):
            return None
        if val.numel() <= _PROOF_BLOCK:
            whole = self._whole(node)
            if whole is None:
                return None
            return whole.narrow(-2, start, count) if whole.dim() > 1 and whole.shape[-2] > 1 else whole
        if node.target is aten.expand.default:
            source = self._rows(node.args[0], start, count)  # type: ignore[arg-type]
            return None if source is None else source.expand(*val.shape[:-2], count, val.shape[-1])
        if torch.Tag.pointwise not in getattr(node.target, "tags", ()):
            return None
        rows = {n: self._rows(n, start, count) for n in node.all_input_nodes}
        if any(value is None for value in rows.values()):
            return None
        result: Tensor = node.target(  # type: ignore[operator]
            *fx.map_arg(node.args, rows.__getitem__), **fx.map_arg(node.kwargs, rows.__getitem__)
        )
        return result

    def _whole(self, node: fx.Node) -> Any:
        """The value of a constant; None where it needs a buffer without data."""
        stack = [node]
        while stack:
            top = stack[-1]
            waiting = [n for n in top.all_input_nodes if n not in self.values]
            if waiting:
                stack.extend(waiting)
                continue
            stack.pop()
            if top not in self.values:
                self.values[top] = self._compute(top)
        return self.values[node]

    def _compute(self, node: fx.Node) -> Any:
        if node.op == "get_attr":
            buffer = self.buffers.get(str(node.target))
            return None if buffer is None else buffer.cpu()
        given = [self.values[n] for n in node.all_input_nodes]
        val = node.meta["val"]
        if any(v is None for v in given) or (isinstance(val, Tensor) and val.numel() > 2 * _PROOF_BLOCK):
            return None
        args = fx.map_arg(node.args, self.values.__getitem__)
        kwargs = fx.map_arg(node.kwargs, self.values.__getitem__)
        return node.target(*args, **kwargs)  # type: ignore[operator]


def _allowed(block: Tensor, start: int) -> set[str]:
    """What rows ``start ...`` of a mask agree with: "causal", "open"."""
    if block.dtype == torch.bool:
        allowed = block
    elif block.is_floating_point():
        allowed = block == 0
        # An additive mask must be 0 or shut a key out altogether: anything between is a bias (ALiBi).
        if not (allowed | (block <= torch.finfo(block.dtype).min)).all():
            return set()
    else:
        return set()
    rows, columns = block.shape[-2:]
    seen = torch.ones(rows, columns, dtype=torch.bool).tril(start)
    found = set()
    if bool(allowed.all()):
        found.add("open")
    if bool((allowed == seen).all()):
        found.add("causal")
    return found
