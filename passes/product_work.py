"""The work of operators that multiply: GEMMs and attention."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any

from torch import fx

from autoptd.passes.amounts import Number, Product, Value, Work, tensor_arguments
from autoptd.passes.calls import shape_of
from autoptd.runtime import aten, kernels
from autoptd.runtime.kernels.precision import widen


def _linear(node: fx.Node, value: Value) -> Iterable[Product]:
    """[.., in] x [out, in], [n, in] x [in, out], [.., n, in] x [.., in, out]: the result's columns, over the rest."""
    x = _factors(node)[0]
    shape, inner = value.shape(node), value.shape(x)[-1]
    yield Product(1, prod(shape[:-1]), shape[-1], inner)


def _matmul(node: fx.Node, value: Value) -> Iterable[Product]:
    """A product with one matrix has rows only; other leading dimensions are a batch."""
    x, y = _factors(node)
    shape, inner = value.shape(node), value.shape(x)[-1]
    if len(shape_of(y)) <= 2 or len(shape_of(x)) < 2:
        many = len(shape_of(y)) > 1
        columns = shape[-1] if many else 1
        rows = shape[:-1] if many else shape
        yield Product(1, prod(rows), columns, inner)
    else:
        yield Product(prod(shape[:-2]), shape[-2], shape[-1], inner)


def _split_linear(node: fx.Node, value: Value) -> Iterable[Product]:
    count, *rows, columns = value.shape(node)
    yield Product(count, prod(rows), columns, value.shape(_factors(node)[0])[-1])


def _attention(node: fx.Node, value: Value) -> Iterable[Product]:
    """Queries by keys, and the weights by the values, in full."""
    q, k, v = (value.shape(factor) for factor in _factors(node, 3))
    batch, queries, keys = prod(q[:-2]), q[-2], k[-2]
    yield Product(batch, queries, keys, q[-1])
    yield Product(batch, queries, v[-1], keys)


def _einsum(node: fx.Node, value: Value) -> Iterable[Product]:
    """Letters of both operands and the result are a batch, of one operand its rows or columns, the others summed."""
    sides = str(node.args[0]).replace(" ", "").split("->")
    groups, operands = sides[0].split(","), _factors(node)
    exact = [_letters(group, shape_of(x)) for group, x in zip(groups, operands, strict=True)]
    sizes: dict[Any, tuple[int, Number]] = {}
    for letters, x in zip(exact, operands, strict=True):
        for letter, extent, number in zip(letters, shape_of(x), value.shape(x), strict=True):
            sizes[letter] = max(sizes.get(letter, (1, 1)), (extent, number), key=lambda pair: pair[0])
    kept = _letters(sides[1], shape_of(node)) if len(sides) > 1 else ()
    first, others = exact[0], {letter for letters in exact[1:] for letter in letters}

    def size(member: Callable[[Any], bool]) -> Number:
        return prod(number for letter, (_, number) in sizes.items() if member(letter))

    yield Product(
        size(lambda letter: letter in kept and letter in first and letter in others),
        size(lambda letter: letter in kept and letter not in others),
        size(lambda letter: letter in kept and letter not in first),
        size(lambda letter: letter not in kept),
    )


def _letters(group: str, shape: Sequence[int]) -> list[Any]:
    """The letters of an operand; dimensions of "..." are numbered from the right, as they broadcast."""
    head, _, tail = group.partition("...")
    rest = range(len(head), len(shape) - len(tail))
    return [*head, *(index - rest.stop for index in rest), *tail]


def _factors(node: fx.Node, count: int = 2) -> list[fx.Node]:
    """The tensors that a product multiplies."""
    if node.target is aten.einsum.default:
        operands: Any = node.args[1]
        return list(operands)
    first = 1 if node.target in _BIASED else 0
    factors: Any = node.args[first : first + count]
    return list(factors)


_BIASED = (aten.addmm.default, aten.baddbmm.default)
FUSED = aten.scaled_dot_product_attention.default

PRODUCTS: Mapping[Any, Callable[[fx.Node, Value], Iterable[Product]]] = {
    aten.linear.default: _linear,
    aten.mm.default: _linear,
    aten.addmm.default: _linear,
    aten.matmul.default: _matmul,
    aten.bmm.default: _matmul,
    aten.baddbmm.default: _matmul,
    aten.einsum.default: _einsum,
    kernels.split_linear: _split_linear,
    kernels.linear_gelu: _linear,
}


def find_factors(node: fx.Node) -> list[fx.Node]:
    """The two tensors that a GEMM multiplies; none for other operators."""
    factors = _factors(node) if node.target in PRODUCTS else []
    return factors if len(factors) == 2 else []


def differentiate_product(node: fx.Node, value: Value, wanted: Sequence[fx.Node]) -> Work:
    """For each factor the gradient times the other one; for a bias, the gradient's sum over its rows."""
    first, second = _factors(node)[:2]
    (made,) = PRODUCTS[node.target](node, value)
    gradient = value.bytes(node)
    work = Work()
    if first in wanted:
        turned = Product(made.batch, made.rows, made.inner, made.columns)
        work += Work((turned,), read=gradient + value.bytes(second), written=value.bytes(first), launches=1)
    if second in wanted:
        turned = Product(made.batch, made.inner, made.columns, made.rows)
        work += Work((turned,), read=gradient + value.bytes(first), written=value.bytes(second), launches=1)
    for source in wanted:
        if source not in (first, second):
            work += Work(
                elementwise=value.count(node), read=gradient, written=value.bytes(source), launches=1
            )
    return work


def multiply(node: fx.Node, value: Value) -> Work:
    """A GEMM reads its arguments and writes its result."""
    return Work(
        tuple(PRODUCTS[node.target](node, value)),
        read=sum(map(value.bytes, tensor_arguments(node))),
        written=value.bytes(node),
        launches=1,
    )


def _multiply_gelu(node: fx.Node, value: Value) -> Work:
    """A product, and a kernel that adds the bias and activates."""
    size = value.bytes(node)
    return multiply(node, value) + Work(elementwise=value.count(node), read=size, written=size, launches=1)


def _differentiate_gelu(node: fx.Node, value: Value, wanted: Sequence[fx.Node]) -> Work:
    """The activation's backward, which sums the bias's gradient, and the product's."""
    factors = [source for source in wanted if source in _factors(node)]
    size, biases = value.bytes(node), sum(value.bytes(source) for source in wanted if source not in factors)
    activation = Work(elementwise=value.count(node), read=2 * size, written=size + biases, launches=1)
    return activation + differentiate_product(node, value, factors)


def attend(node: fx.Node, value: Value) -> Work:
    """The scores stay on the chip; of each row a statistic is kept (Dao et al., "FlashAttention", 2022)."""
    return Work(
        tuple(_attention(node, value)),
        read=sum(map(value.bytes, tensor_arguments(node))),
        written=value.bytes(node) + statistics(node, value),
        launches=1,
    )


def differentiate_attention(node: fx.Node, value: Value, wanted: Sequence[fx.Node]) -> Work:
    """The scores again, and four products; before them each row's sum of gradient times result."""
    scores, context = _attention(node, value)
    batch, queries, keys, size = scores.batch, scores.rows, scores.columns, scores.inner
    products = (
        Product(batch, queries, keys, size, repeated=True),
        Product(batch, queries, keys, context.columns),  # of the weights
        Product(batch, keys, context.columns, queries),  # of the values
        Product(batch, queries, size, keys),  # of the queries
        Product(batch, keys, size, queries),  # of the keys
    )
    kept, result = statistics(node, value), value.bytes(node)
    return Work(
        products,
        elementwise=value.count(node),
        read=sum(map(value.bytes, tensor_arguments(node))) + 3 * result + 2 * kept,
        written=sum(map(value.bytes, wanted)) + kept,
        launches=2,
    )


def statistics(node: fx.Node, value: Value) -> Number:
    """Bytes of one wide number per row of the result."""
    return value.rows(node) * widen(node.meta["val"].dtype).itemsize


FORWARDS: Mapping[Any, Callable[[fx.Node, Value], Work]] = {
    **dict.fromkeys(PRODUCTS, multiply),
    kernels.linear_gelu: _multiply_gelu,
    **dict.fromkeys([FUSED, kernels.grouped_attention], attend),
}
BACKWARDS: Mapping[Any, Callable[[fx.Node, Value, Sequence[fx.Node]], Work]] = {
    **dict.fromkeys(PRODUCTS, differentiate_product),
    kernels.linear_gelu: _differentiate_gelu,
    **dict.fromkeys([FUSED, kernels.grouped_attention], differentiate_attention),
}
