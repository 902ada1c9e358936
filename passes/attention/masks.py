"""Combine the masks of an attention: constants are computed to prove it, others are taken as they are.

Only if every query sees a key do hiding by the least finite number, hiding by -inf and replacing the score mean the
same: the weights of hidden keys are 0. A query that sees none has even weights, or none, and wrong gradients in
torch's fused attention. So a mask is rewritten to hide otherwise only if this is proved not to happen.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Any

import torch
from torch import fx

from autoptd.passes.attention.chain import read_scale
from autoptd.passes.attention.constants import Constants
from autoptd.passes.attention.products import Step, call_name, read_scores
from autoptd.passes.ir.nodes import called, shape_of
from autoptd.passes.normal_form.constant_masks import buffers_under
from autoptd.passes.operators.table import Trait, has_trait
from autoptd.runtime import aten


@dataclass(frozen=True)
class Mask:
    """The combined mask of one attention.

    `verdict`: "causal", "open" (no mask is needed) or "kept". A kept mask is `constant`, a node among the constants
    (bool: True where seen; else added), or `given`, a floating node of the stage's graph. `words` describe it to a
    person; `doubt` says why some query may see no key, "" if every one is proved to see one.
    """

    verdict: str
    words: str
    doubt: str = ""
    constant: fx.Node | None = None
    given: fx.Node | None = None
    proved: frozenset[str] = frozenset()


@dataclass(frozen=True)
class _Content:
    """Facts about a floating constant: whether it hides keys, adds to scores, and is finite everywhere."""

    hides: bool
    adds: bool
    finite: bool


class Masks:
    """A reader of the masks of attentions, which makes constants of the combined ones."""

    def __init__(self, constants: Constants) -> None:
        self.constants = constants
        self.judge = constants.judge
        self._merged = cache(self._merge)
        self._read = cache(self._measure)

    def combine(self, steps: Sequence[Step], shape: Sequence[int], dtype: torch.dtype) -> Mask | str:
        """Combine the masks among an attention's `steps` for scores of `shape`, or say why that is not known."""
        masks = [step for step in steps if step.mask is not None]
        if not masks:
            return Mask("open", "no mask")
        if any(step.kind == "scale" for step in steps[steps.index(masks[0]) :]):
            return "its scores are scaled after they are masked"
        sources: list[Any] = [self.constants.source(step.mask) for step in masks]
        if None in sources:
            return self._take(masks, dtype)
        applied = tuple(replace(s, source=c, mask=None) for s, c in zip(masks, sources, strict=True))
        merged = self._merged(applied, tuple(shape), dtype)
        proved = frozenset(name for source in sources for name in buffers_under(source))
        return replace(merged, proved=proved) if isinstance(merged, Mask) else merged

    def read(self, mask: fx.Node | None) -> Mask:
        """Return the meaning of the mask that an operator is given."""
        if mask is None or self.constants.source(mask) is None:
            return Mask("open", "no mask") if mask is None else Mask("kept", "computed in the step")
        hides = mask.meta["val"].dtype == torch.bool
        step = Step(mask, "fill" if hides else "add", shape_of(mask), float("-inf"), mask)
        found = self.combine([step], step.frame, torch.float32)
        return found if isinstance(found, Mask) else Mask("kept", "constant")

    def _take(self, masks: Sequence[Step], dtype: torch.dtype) -> Mask | str:
        """Take masks that depend on the batch."""
        (first, *rest) = masks
        if rest:
            return "one of its masks is computed in the step"
        if first.kind == "fill":
            return "the batch decides which keys are hidden, and may leave a query none"
        assert first.mask is not None
        if first.mask.meta["val"].dtype != dtype:
            return _wider(first.mask, dtype)
        proved = self.bound(first.mask)
        if proved is None:
            return "the batch may leave a query no key, by -inf"
        return Mask("kept", "from the batch", "the batch may leave a query no key", given=first.mask, proved=proved)

    def bound(self, node: Any) -> frozenset[str] | None:
        """Return the user's buffers that keep a floating value finite for every batch; None if it may not be."""
        number = self.constants.number(node)
        if number is not None:
            return frozenset() if abs(number) != float("inf") else None
        source = self.constants.source(node)
        if source is not None:
            content = self._read(source)
            return buffers_under(source) if content is not None and content.finite else None
        if not isinstance(node, fx.Node) or node.op == "placeholder":
            return None
        name = call_name(node)
        if node.op == "get_attr" or name == "aten.tanh" or read_scores(node) is not None:
            return frozenset()  # parameters, and what is computed from them, are taken to be finite
        if has_trait(node, Trait.VIEWS) or name == "aten.index":
            return self.bound(node.args[0])
        pairs = {"aten.where": node.args[1:3], "aten.masked_fill": node.args[:3:2]}
        pairs |= dict.fromkeys(("aten.add", "aten.mul"), node.args[:2])
        if (step := read_scale(node, self.constants.number)) is not None:
            return self.bound(step.source)
        if name not in pairs:
            return None
        first, second = map(self.bound, pairs[name])
        return None if first is None or second is None else first | second

    def _merge(self, masks: tuple[Step, ...], shape: tuple[int, ...], dtype: torch.dtype) -> Mask | str:
        """Merge `masks`, each with its constant as source, into one, with the proof that every query sees a key."""
        seen: fx.Node | None = None
        bias: fx.Node | None = None
        for step in masks:
            parts = self._divide(step, shape, dtype)
            if isinstance(parts, str):
                return parts
            seen = self._join(aten.logical_and.default, seen, parts[0])
            bias = self._join(aten.add.Tensor, bias, parts[1])
        judged = "open" if seen is None else self.judge.judge(seen)
        if judged == "unknown":
            return f"its mask, {_origin(masks[0].source)}, has no known values"
        blocks = () if seen is None or judged != "kept" else self.judge.blocks(seen)
        if not all(block is not None and bool(block.any(-1).all()) for _, block in blocks):
            return "its mask leaves a query no key"
        shape_word = {"causal": "causal", "kept": "constant"}.get(judged, "")
        words = ", ".join(filter(None, ["additive bias" if bias else "", shape_word]))
        if bias is not None:
            if bias.meta["val"].dtype != dtype:
                return _wider(bias, dtype)
            if seen is not None:
                bias = self.constants.emit(aten.where.ScalarOther, seen, bias, float("-inf"))
            return Mask("kept", words, constant=bias)
        square = seen is not None and tuple(seen.meta["val"].shape[-2:]) == tuple(shape[-2:])
        if judged == "open" or (judged == "causal" and square):
            return Mask(judged, words or "no mask")
        return Mask("kept", words, constant=seen)

    def _divide(
        self, step: Step, shape: Sequence[int], dtype: torch.dtype
    ) -> tuple[fx.Node | None, fx.Node | None] | str:
        """Return the keys that a constant mask shows (None: all) and its bias (None: none), or why they are unknown."""
        mask = self._widen(step.source, step.frame, shape)
        if step.kind == "fill":
            if not step.factor <= torch.finfo(dtype).min:
                return f"it hides keys by the score {step.factor}, which may count"
            return self.constants.emit(aten.logical_not.default, mask) if step.hides else mask, None
        content = self._read(mask)
        if content is None:
            return f"its mask, {_origin(step.source)}, has no known values"
        least = torch.finfo(mask.meta["val"].dtype).min
        seen = self.constants.emit(aten.gt.Scalar, mask, least) if content.hides else None
        return seen, mask if content.adds else None

    def _join(self, target: Any, first: fx.Node | None, second: fx.Node | None) -> fx.Node | None:
        both = first is not None and second is not None
        return self.constants.emit(target, first, second) if both else first or second

    def _widen(self, source: fx.Node, frame: Sequence[int], shape: Sequence[int]) -> fx.Node:
        """Reshape a mask of scores viewed as `frame` to scores of `shape`: batch and heads regrouped."""
        own: list[int] = [1, 1, *source.meta["val"].shape]
        lead, rows, keys = own[:-2], own[-2], own[-1]
        if tuple(frame) == tuple(shape):
            return source
        if prod(lead) == 1:
            return self.constants.emit(aten.reshape.default, source, [rows, keys])
        whole = self.constants.emit(aten.expand.default, source, [*frame[:-2], rows, keys])
        return self.constants.emit(aten.reshape.default, whole, [*shape[:-2], rows, keys])

    def _measure(self, node: fx.Node) -> _Content | None:
        """Return the facts about a floating constant; None if it cannot be computed, or has nan or +inf."""
        hides, adds, finite = False, False, True
        for _, block in self.judge.blocks(node):
            if block is None or not block.is_floating_point() or not (block < torch.inf).all():
                return None
            hidden = block <= torch.finfo(block.dtype).min
            hides |= bool(hidden.any())
            adds |= not bool((hidden | (block == 0)).all())
            finite &= bool((block > -torch.inf).all())
        return _Content(hides, adds, finite)


def _wider(mask: fx.Node, dtype: torch.dtype) -> str:
    return f"its mask is {mask.meta['val'].dtype}, its scores {dtype}"


def _origin(source: fx.Node) -> str:
    while source.all_input_nodes:
        source = source.all_input_nodes[0]
    return str(source.target) if source.op == "get_attr" else called(source)
