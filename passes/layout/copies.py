"""Find the operators that copy memory which a better layout would leave in place, by their strides."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autoptd.passes.cost.work import forward_work
from autoptd.passes.ir.meta_values import Propagation
from autoptd.passes.ir.node_info import info
from autoptd.passes.ir.nodes import operator_name
from autoptd.passes.ir.program import tensor_bytes
from autoptd.runtime import aten
from autoptd.runtime.program.mesh import Mesh


def count_copied_bytes(graph: fx.Graph, strides: Strides) -> int:
    """Bytes that one run of `graph` copies only because its tensors lie in memory as they do."""
    return sum(find_copies(graph, strides).values())


def count_launches(graph: fx.Graph, mesh: Mesh) -> int:
    """Operators that one run of `graph` launches: a view none, what copies before it computes two."""
    calls = [node for node in graph.nodes if node.op == "call_function"]
    work = sum(forward_work(node).launches for node in calls if node.target is not aten.contiguous.default)
    return work + len(find_copies(graph, Strides(mesh)))


def find_copies(graph: fx.Graph, strides: Strides) -> dict[fx.Node, int]:
    """Return the operators that copy before (or instead of) computing, with the bytes that each writes.

    These are a ``reshape`` that is not a view, a ``contiguous`` of another order, operands of a product whose batch
    dimensions do not merge, and arguments that a normalisation or a softmax must first make contiguous. Concatenations
    move data in any layout, and integers (token numbers) are a few bytes: neither counts.
    """
    found: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if node.op == "output":
            continue
        value = strides.visit(node)
        rule = COPIES.get(operator_name(node.target)) if node.op == "call_function" else None
        if rule is not None:
            copied = rule([strides.values.get(n) for n in node.args if isinstance(n, fx.Node)], value)
            if copied:
                found[node] = copied
    return found


class Strides(Propagation):
    """Values on the meta device with the strides that the real kernels give them."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh)
        self.values: dict[fx.Node, Any] = {}
        self._outputs: dict[tuple[Any, ...], Tensor] = {}

    def visit(self, node: fx.Node) -> Any:
        """Compute the node's value for its readers, or take the captured one if meta tensors cannot."""
        if node in self.values:
            return self.values[node]
        value = node.meta["val"]
        if node.op == "call_function":
            try:
                value = self.run(node)
            except RuntimeError:  # no meta kernel, or a shape that depends on data
                value = node.meta["val"]
            if COPIES.get(operator_name(node.target)) is _attention:
                value = self._attention_output(node, value)
        self.values[node] = value
        return value

    def _value(self, node: fx.Node) -> Any:
        return self.rank if info(node).role == "rank" else self.values[node]

    def _attention_output(self, node: fx.Node, value: Tensor) -> Tensor:
        """The fused kernels write their result in the order of the queries' memory; meta tensors do not know that."""
        operands: list[Any] = [self.values[n] for n in node.args[:3]]  # type: ignore[index]
        query = operands[0]
        fused = query.shape == value.shape and query.dim() == 4 and all(x.stride(-1) == 1 for x in operands)
        if not fused:
            return value
        key = (tuple(query.shape), query.stride(), query.dtype)
        if key not in self._outputs:
            self._outputs[key] = torch.empty_like(query)
        return self._outputs[key]


Rule = Callable[[Sequence[Any], Any], int]


def is_view(x: Tensor, shape: Sequence[int]) -> bool:
    """Return whether `x` can be viewed as `shape` without a copy."""
    if x.is_contiguous():
        return True
    try:
        x.view(tuple(shape))
    except RuntimeError:
        return False
    return True


def _bytes(x: Tensor) -> int:
    return tensor_bytes(x) if x.is_floating_point() else 0


def _reshape(given: Sequence[Any], value: Any) -> int:
    return 0 if is_view(given[0], value.shape) else _bytes(given[0])


def _contiguous(given: Sequence[Any], value: Any) -> int:
    return 0 if given[0].is_contiguous() else _bytes(given[0])


def _rows(given: Sequence[Any], value: Any) -> int:
    """``linear``: all but the last dimension become rows of one matrix."""
    x = given[0]
    return 0 if is_view(x, (-1, x.shape[-1])) and _is_matrix(x) else _bytes(x)


def _product(given: Sequence[Any], value: Any) -> int:
    """``matmul``, ``bmm``: the dimensions before the last two become one batch."""
    x, y = given[:2]
    if x.dim() > 2 >= y.dim():
        return _rows(given, value) + _operand(y, ())
    batch = value.shape[: -2 if x.dim() > 1 and y.dim() > 1 else -1]
    return sum(_operand(operand, batch) for operand in (x, y))


def _matrices(given: Sequence[Any], value: Any) -> int:
    """``addmm``: the bias first, then two matrices."""
    return sum(_operand(x, x.shape[:-2]) for x in given[-2:])


def _operand(x: Tensor, batch: Sequence[int]) -> int:
    if x.dim() < 2:
        return 0
    whole = x.expand(*batch, *x.shape[-2:])
    merges = len(batch) < 2 or is_view(whole, (-1, *x.shape[-2:]))
    return 0 if merges and _is_matrix(x) else _bytes(whole)


def _is_matrix(x: Tensor) -> bool:
    """Can the last two dimensions be handed to a matrix product as they lie?"""
    if x.dim() < 2:
        return x.stride(-1) == 1
    (rows, columns), (row, column) = x.shape[-2:], x.stride()[-2:]
    if columns == 1 or rows == 1:
        return column == 1 or row == 1 or columns == rows
    return (column == 1 and row >= columns) or (row == 1 and column >= rows)


def _attention(given: Sequence[Any], value: Any) -> int:
    return sum(_bytes(x) for x in given[:3] if x.stride(-1) != 1)


COPIES: Mapping[str, Rule] = {
    **dict.fromkeys(["aten.reshape", "aten.view", "aten._unsafe_view"], _reshape),
    **dict.fromkeys(["aten.flatten", "aten.unflatten"], _reshape),
    **dict.fromkeys(
        ["aten.contiguous", "aten.layer_norm", "aten.rms_norm", "aten.softmax", "aten.log_softmax"],
        _contiguous,
    ),
    **dict.fromkeys(["aten.cross_entropy_loss", "aten.nll_loss", "aten.nll_loss_nd"], _contiguous),
    **dict.fromkeys(["aten.linear", "kernels.split_linear", "kernels.linear_gelu"], _rows),
    **dict.fromkeys(["aten.matmul", "aten.bmm"], _product),
    **dict.fromkeys(["aten.addmm", "aten.mm", "aten.baddbmm"], _matrices),
    **dict.fromkeys(["aten.scaled_dot_product_attention", "kernels.grouped_attention"], _attention),
}
