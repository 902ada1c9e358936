"""Prove that an attention mask is exactly causal by computing it."""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from autoptd.passes.ir.nodes import argument, is_lifted, shape_of, walk
from autoptd.passes.operators.proof import elementwise
from autoptd.passes.operators.table import Trait, has_trait, rules_of
from autoptd.runtime import aten

_BLOCK = 1 << 26  # mask elements computed at once
_LIMIT = 1 << 31  # a larger mask is left as it is


class MaskJudge:
    """A judge of masks that computes constants on the CPU, large masks in blocks of query rows.

    `judge` returns what a mask of bool allows: "causal", "open" (every key), "kept" (else) or "unknown" (not computed).
    """

    def __init__(self, buffers: Mapping[str, Tensor]) -> None:
        self.buffers = buffers
        self.values: dict[fx.Node, Any] = {}
        self.judge = cache(self._judge)

    def _judge(self, mask: fx.Node) -> str:
        *_, rows, keys = (1, 1, *shape_of(mask))
        is_open, is_causal = True, rows == keys
        for start, block in self.blocks(mask):
            if block is None:
                return "unknown"
            causal = torch.ones(block.shape[-2:], dtype=torch.bool).tril(start)
            is_open, is_causal = is_open and bool(block.all()), is_causal and bool((block == causal).all())
            if not (is_open or is_causal):
                return "kept"
        return "open" if is_open else "causal"

    def blocks(self, mask: fx.Node) -> Iterator[tuple[int, Tensor | None]]:
        """Yield blocks of rows of a mask [.., queries, keys], with the first row's number; None: not computed."""
        shape = mask.meta["val"].shape
        if len(shape) < 2 or shape.numel() > _LIMIT:
            value = self.value(mask) if len(shape) < 2 else None
            yield 0, None if value is None else value.view(1, -1)
            return
        rows = max(1, _BLOCK // max(1, shape.numel() // shape[-2]))
        for start in range(0, shape[-2], rows):
            yield start, self._rows(mask, start, min(rows, shape[-2] - start))

    def _rows(self, node: fx.Node, start: int, count: int) -> Any:
        """Return some rows of a mask, as `_narrow` does, or None if they cannot be computed."""
        val = node.meta["val"]
        if not isinstance(val, Tensor):
            return None
        if val.numel() <= _BLOCK:
            whole = self.value(node)
            return None if whole is None else _narrow(whole, start, count)
        rows = {n: self._rows(n, start, count) for n in node.all_input_nodes}
        if any(value is None for value in rows.values()):
            return None
        given: Any = fx.map_arg((node.args, node.kwargs), rows.__getitem__)
        args, kwargs = given
        if node.target is aten.expand.default:
            args = args[0], [*args[0].shape[:-2], count, val.shape[-1]]
        elif has_trait(node, Trait.FILLS):
            args = [count, val.shape[-1]], *args[1:]
        elif node.target in (aten.tril.default, aten.triu.default):
            args = args[0], argument(node, "diagonal") + start
        elif rules_of(node).placed is not elementwise:
            return None
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def value(self, node: fx.Node) -> Any:
        """Return the value of a constant; None if it needs a buffer without data."""
        missing = walk([node], lambda n: [x for x in n.all_input_nodes if x not in self.values])
        for source in sorted(missing) if node not in self.values else ():
            self.values[source] = self._compute(source)
        return self.values[node]

    def _compute(self, node: fx.Node) -> Any:
        if node.op == "get_attr":
            buffer = self.buffers.get(str(node.target))
            return None if buffer is None else buffer.cpu()
        given = [self.values[n] for n in node.all_input_nodes]
        val = node.meta["val"]
        if any(v is None for v in given) or (isinstance(val, Tensor) and val.numel() > 2 * _BLOCK):
            return None
        args, kwargs = fx.map_arg((node.args, node.kwargs), self.values.__getitem__)
        return node.target(*args, **kwargs)  # type: ignore[operator]


def _narrow(value: Tensor, start: int, count: int) -> Tensor:
    """Return rows ``start .. start + count - 1`` of dimension -2, of samples that are all alike only the first."""
    if value.dim() > 1 and value.shape[-2] > 1:
        value = value.narrow(-2, start, count)
    for dim in range(value.dim() - 2):
        first = value.split(1, dim)[0]
        value = first if torch.equal(value, first.expand_as(value)) else value
    return value


def buffers_under(constant: fx.Node) -> frozenset[str]:
    """Return the user's buffers whose values a constant is computed from."""
    names = (str(node.target) for node in walk([constant]) if node.op == "get_attr")
    return frozenset(name for name in names if not is_lifted(name))
