"""Rewrite a recognised attention: the whole of it, or the part around its softmax."""

import re
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import fx

from autoptd.passes.attention.chain import Chain, read_scale
from autoptd.passes.attention.constants import Constants
from autoptd.passes.attention.documents import read_documents
from autoptd.passes.attention.masks import Mask, Masks
from autoptd.passes.attention.products import Factor, Result, Step
from autoptd.passes.ir.nodes import Propagation, argument, called, change_info, describe, info, place_of, shape_of
from autoptd.passes.ir.program import Program
from autoptd.passes.operators.table import Trait, has_trait
from autoptd.runtime import aten, kernels
from autoptd.runtime.kernels.fused_attention import FLASH_SIZE
from autoptd.runtime.kernels.operands import HALF

_MOVES = Trait.RESHAPES | Trait.PERMUTES | Trait.LAYS_OUT


class Rewriter:
    """A writer of attentions into `graph`; `changed` if it wrote any, valid for the values of `proved` buffers."""

    def __init__(self, graph: fx.Graph, constants: Constants, program: Program) -> None:
        self.graph = graph
        self.constants = constants
        self.masks = Masks(constants)
        self.propagation = Propagation(program.mesh)
        self.rank = next(n for n in graph.nodes if info(n).role == "rank")
        self.loads: dict[str, fx.Node] = {str(n.target): n for n in graph.nodes if n.op == "get_attr"}
        self.changed = False
        self.proved: frozenset[str] = frozenset()

    # The whole chain

    def fuse_whole(self, chain: Chain) -> Mask | str:
        """Write torch's fused attention for the chain and return its mask, or say why it is not the same."""
        product, result, last = chain.product, chain.result, chain.weights[-1]
        if isinstance(product, str) or isinstance(result, str):
            return product if isinstance(product, str) else str(result)
        if any(node.target is kernels.dropout for node in chain.weights):
            return "of dropout"
        dtype = result.values.node.meta["val"].dtype
        queries, keys = self._without_cast(product.queries, dtype), self._without_cast(product.keys, dtype)
        if not {last.meta["val"].dtype, *(f.node.meta["val"].dtype for f in (queries, keys))} <= {dtype}:
            return f"its factors have other dtypes than its values, {dtype}"
        if reason := _refuse_softmax(chain.softmax, dtype, dtype):
            return reason
        steps = (*product.steps, *chain.steps)
        shapes = {shape_of(n) for n in (product.node, chain.softmax, *chain.weights)}
        shapes |= {step.frame for step in steps}
        shape = max(shapes, key=len)
        if any(len(other) == len(shape) and other != shape for other in shapes):
            return "its views regroup the heads"
        mask = read_documents(self.constants, steps, shape) or self.masks.combine(steps, shape, dtype)
        if isinstance(mask, str) or mask.doubt:
            return mask if isinstance(mask, str) else mask.doubt
        factors = [self._shape_factor(f, shape, result.node) for f in (queries, keys, result.values)]
        if any(factor is None for factor in factors) or shape_of(factors[0])[:-2] != shape[:-2]:  # type: ignore[arg-type]
            return "its factors do not have the batch and heads of its scores"
        q, k, v = (factor for factor in factors if factor is not None)
        if mask.verdict == "packed" and shape_of(k)[1] != shape_of(v)[1]:
            return "its values have other heads than its keys, and its mask is computed in the step"
        (q, of_queries), (k, of_keys) = self._without_scale(q), self._without_scale(k)
        scale = prod(s.factor for s in steps if s.kind == "scale") * of_queries * of_keys
        self._write_whole(result, (q, k, v), mask, scale)
        self.proved |= mask.proved
        return mask

    def _write_whole(self, result: Result, factors: Sequence[fx.Node], mask: Mask, scale: float) -> None:
        old = result.node
        masks = () if mask.constant is None else (self._load(mask.constant, old),)
        target: Any = aten.scaled_dot_product_attention.default
        options: dict[str, Any] = {"is_causal": True} if mask.verdict == "causal" else {}
        if mask.verdict == "packed":
            target, options = kernels.packed_attention, {"documents": mask.given}
        new = self._emit(old, target, *factors, *masks, **options, scale=scale)
        change_info(new, name=re.sub(r"(matmul|bmm|einsum)(_\d+)?$", "sdpa", old.name))
        self.group_heads(new)
        if result.dims is not None:
            new = self._emit(old, aten.permute.default, new, list(result.dims))
        for user in list(old.users):
            if user.target is aten.reshape.default and shape_of(user) == shape_of(new):
                user.replace_all_uses_with(new)
        if shape_of(new) != shape_of(old):
            new = self._emit(old, aten.reshape.default, new, list(shape_of(old)))
        old.replace_all_uses_with(new)

    def _without_cast(self, factor: Factor, dtype: torch.dtype) -> Factor:
        """Return the factor before a cast to float32: fused attention sums half precision in float32 itself."""
        source = factor.node.args[0] if factor.node.target is aten.to.dtype else None
        if isinstance(source, fx.Node) and dtype in HALF and source.meta["val"].dtype == dtype:
            wider = factor.node.meta["val"].dtype == torch.float32
            return replace(factor, node=source) if wider else factor
        return factor

    def _shape_factor(self, factor: Factor, shape: Sequence[int], before: fx.Node) -> fx.Node | None:
        """Return the factor as [batch, heads, rows, size]; keys and values may have one head for all."""
        node = factor.node
        if factor.dims is not None:
            node = self._emit(before, aten.permute.default, node, list(factor.dims))
        own, lead = shape_of(node), tuple(shape[:-2])
        if len(own) == 3 and len(shape) == 4 and own[0] == prod(lead):
            wanted = (*lead, *own[1:])
            source = node.args[0] if node.target is aten.reshape.default else None
            if isinstance(source, fx.Node) and shape_of(source) == wanted:
                return source
            return self._emit(before, aten.reshape.default, node, list(wanted))
        return node if own[:-2] == lead or (len(own) == 4 and own[:-2] == (*lead[:-1], 1)) else None

    def _without_scale(self, factor: fx.Node) -> tuple[fx.Node, float]:
        """Return the factor before a scaling that nobody else reads, and its number (1 without one)."""
        node = factor
        while len(node.users) == 1 and has_trait(node, _MOVES):
            node = node.args[0]  # type: ignore[assignment]
        step = read_scale(node, self.constants.number) if len(node.users) == 1 else None
        if step is None or step.source is not node.args[0]:
            return factor, 1.0
        given, made = step.source.meta["val"], node.meta["val"]
        if given.dtype != made.dtype or given.shape != made.shape:
            return factor, 1.0
        node.replace_all_uses_with(step.source)
        return step.source if node is factor else factor, step.factor

    def group_heads(self, node: fx.Node) -> None:
        """Pass grouped keys and values to fused attention as they are, as its kernels repeat them themselves."""
        q, k, v = (n.meta["val"] for n in node.args[:3])  # type: ignore[union-attr]
        flash = q.dim() == 4 and k.shape[-1] == v.shape[-1] <= FLASH_SIZE
        if not flash or argument(node, "attn_mask") is not None:  # torch would write the scores out
            return
        keys, values = (_unrepeated(n) for n in node.args[1:3])
        heads = {shape_of(n)[1] for n in (keys, values) if n is not None}
        if None not in (keys, values) and len(heads) == 1 and not heads & {q.shape[1]}:
            node.args = (node.args[0], keys, values)
            if node.target is not kernels.packed_attention:
                node.kwargs = {**node.kwargs, "enable_gqa": True}
            self.changed = True

    def drop_mask(self, node: fx.Node) -> str:
        """Take away the mask of an attention that is fused already, if its meaning is proved; return it in words."""
        name = "mask" if node.target is kernels.scaled_softmax else "attn_mask"
        mask, scale = argument(node, name), argument(node, "scale")
        given = self._find_documents(node, mask) or self.masks.read(mask)
        if mask is not None and given.verdict != "kept":
            rest = {n: v for n, v in node.kwargs.items() if n != name}
            node.args = node.args[: place_of(node.target, name)]
            options: dict[str, Any] = {"is_causal": True} if given.verdict == "causal" else {}
            if given.verdict == "packed":
                node.target, options = kernels.packed_attention, {"documents": given.given}
                rest = {} if scale is None else {"scale": scale}
            node.kwargs = {**options, **rest}
            self.changed, self.proved = True, self.proved | given.proved
        return "causal" if argument(node, "is_causal") else given.words

    def _find_documents(self, node: fx.Node, mask: Any) -> Mask | None:
        """Return the mask of documents of an attention that is fused already, and may compute it by itself."""
        if mask is None or not has_trait(node, Trait.FUSED_ATTENTION):
            return None
        q, k, v = (n for n in node.args[:3] if isinstance(n, fx.Node))
        shape = (*shape_of(q)[:-1], shape_of(k)[-2])
        if shape_of(k)[:-1] != shape_of(v)[:-1] or shape_of(k)[0] != shape[0]:
            return None  # one is spread over the others
        return read_documents(self.constants, [Step(q, "fill", shape, float("-inf"), mask)], shape)

    # The part around the softmax

    def fuse_softmax(self, chain: Chain, reason: str) -> tuple[Mask | None, str]:
        """Write the softmax kernel for as much of the chain as means the same, and return its mask or None.

        `reason` says why the whole is not fused; it is returned, or a more specific one.
        """
        dropout, end = self._end_of_kernel(chain)
        for start in range(len(chain.steps) + 1):
            steps = chain.steps[start:]
            scores: Any = steps[0].source if steps else chain.softmax.args[0]
            dtype = scores.meta["val"].dtype
            if any(step.kind == "view" for step in steps):
                continue
            if refused := _refuse_softmax(chain.softmax, dtype, end.meta["val"].dtype):
                reason = refused
                continue
            mask = self.masks.combine(steps, shape_of(scores), dtype)
            if isinstance(mask, str):
                continue
            if chain.softmax.target is aten._safe_softmax.default:
                finite = self.masks.bound(scores)
                if mask.doubt or finite is None:
                    reason = mask.doubt or reason
                    continue
                mask = replace(mask, proved=mask.proved | finite)
            if dropout is None and all(step.kind == "cast" for step in steps):
                break  # nothing to fuse
            self._write_softmax(chain, scores, steps, mask)
            self.proved |= mask.proved
            return mask, reason
        return None, reason

    def _end_of_kernel(self, chain: Chain) -> tuple[fx.Node | None, fx.Node]:
        """Return the dropout of the weights, if any, and the last node that the kernel replaces."""
        dropout, end = None, chain.softmax
        for node in chain.weights[1:]:
            if node.target is kernels.dropout and dropout is None:
                dropout = node
            elif node.target is not aten.to.dtype:
                break
            end = node
        return dropout, end

    def _write_softmax(self, chain: Chain, scores: fx.Node, steps: Sequence[Step], mask: Mask) -> None:
        softmax, (dropout, end) = chain.softmax, self._end_of_kernel(chain)
        options: dict[str, Any] = {"is_causal": True} if mask.verdict == "causal" else {}
        options["scale"] = prod(s.factor for s in steps if s.kind == "scale")
        if dropout is not None:
            options |= {"p": dropout.args[2], "operator": dropout.args[3]}
        passed = mask.given if mask.constant is None else self._load(mask.constant, softmax)
        masks = () if passed is None else (passed,)
        new = self._emit(softmax, kernels.scaled_softmax, self.rank, scores, *masks, **options)
        change_info(new, name=softmax.name)
        if new.meta["val"].dtype != end.meta["val"].dtype:
            new = self._emit(softmax, aten.to.dtype, new, end.meta["val"].dtype)
        end.replace_all_uses_with(new)

    # Writing

    def _emit(self, before: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Write a call in front of `before`, under its place in the user's model."""
        self.changed = True
        return self.propagation.write(before, target, args, kwargs, before)

    def _load(self, source: fx.Node, before: fx.Node) -> fx.Node:
        name = self.constants.name(source)
        if name not in self.loads:
            with self.graph.inserting_before(before):
                self.loads[name] = node = self.graph.create_node("get_attr", name)
            describe(node, source.meta["val"], info(source), name=name.removeprefix("constant."))
        return self.loads[name]


def _refuse_softmax(softmax: fx.Node, given: torch.dtype, end: torch.dtype) -> str:
    """Return why fused operators, in float32 for half precision and else the own dtype, compute another; or ""."""
    computed = softmax.meta["val"].dtype
    same = computed == given or (given in HALF and computed == torch.float32 and end == given)
    return "" if same else f"{called(softmax)} computes {given} scores in {computed}"


def _unrepeated(node: Any) -> fx.Node | None:
    """Return [b, g, s, d] of a value that repeats each of its heads n times, [b, g n, s, d], neighbours together."""
    if not isinstance(node, fx.Node):
        return None
    if shape_of(node)[1] == 1:
        return node
    wide = node.args[0] if node.target is aten.reshape.default else None
    thin = wide.args[0] if isinstance(wide, fx.Node) and wide.target is aten.expand.default else None
    if not isinstance(thin, fx.Node) or thin.target not in (aten.unsqueeze.default, aten.reshape.default):
        return None
    source: Any = thin.args[0]
    b, g, s, d = shape_of(source) if len(shape_of(source)) == 4 else (0, 0, 0, 0)
    repeats = shape_of(node)[1] // max(g, 1)
    shapes = (shape_of(thin), shape_of(wide), shape_of(node))  # type: ignore[arg-type]
    return source if shapes == ((b, g, 1, s, d), (b, g, repeats, s, d), (b, g * repeats, s, d)) else None
