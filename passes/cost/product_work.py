"""The work of operators that multiply: GEMMs, convolutions and attention."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from torch import fx

from autoptd.passes.cost.quantities import Number, Product, Value, Work, tensor_arguments
from autoptd.passes.ir.nodes import argument, shape_of
from autoptd.runtime import aten, collectives, kernels
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


def _convolution(node: fx.Node, value: Value) -> Iterable[Product]:
    """[.., in, places] x [out, in / groups, kernel]: the result's channels, of what the kernel covers, everywhere."""
    shape, (_, *covered) = value.shape(node), value.shape(_factors(node)[1])
    channels = len(shape) - len(covered)
    places = prod(shape[:channels]) * prod(shape[channels + 1 :])
    yield Product(1, places, shape[channels], prod(covered))


def _einsum(node: fx.Node, value: Value) -> Iterable[Product]:
    """Letters of both operands and the result are a batch, of one operand its rows or columns, the others summed.

    What is in one operand alone, and not in the result, is summed before.
    """
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
        size(lambda letter: letter not in kept and letter in first and letter in others),
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
    first = 1 if node.target in _SECOND else 0
    factors: Any = node.args[first : first + count]
    return list(factors)


# Behind a bias, or behind the rank.
_SECOND = (
    aten.addmm.default,
    aten.baddbmm.default,
    collectives.copied_linear,
    collectives.copied_linear_gelu,
    collectives.copied_split_linear,
)
FUSED = aten.scaled_dot_product_attention.default

PRODUCTS: Mapping[Any, Callable[[fx.Node, Value], Iterable[Product]]] = {
    aten.linear.default: _linear,
    aten.mm.default: _linear,
    aten.addmm.default: _linear,
    aten.matmul.default: _matmul,
    aten.bmm.default: _matmul,
    aten.baddbmm.default: _matmul,
    aten.einsum.default: _einsum,
    **dict.fromkeys(
        (
            overload
            for packet in (aten.conv1d, aten.conv2d, aten.conv3d)
            for overload in (packet.default, packet.padding)
        ),
        _convolution,
    ),
    kernels.split_linear: _split_linear,
    kernels.linear_gelu: _linear,
    collectives.copied_linear: _linear,
    collectives.copied_linear_gelu: _linear,
    collectives.copied_split_linear: _split_linear,
}


def find_factors(node: fx.Node) -> list[fx.Node]:
    """Return the two tensors that a GEMM multiplies; none for other operators."""
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
    """Return the work of a GEMM, which reads its arguments and writes its result."""
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
    activation = _differentiate_activation(node, value, [s for s in wanted if s not in factors])
    return activation + differentiate_product(node, value, factors)


def _differentiate_activation(node: fx.Node, value: Value, biases: Sequence[fx.Node]) -> Work:
    size = value.bytes(node)
    return Work(
        elementwise=value.count(node), read=2 * size, written=size + sum(map(value.bytes, biases)), launches=1
    )


def _multiply_several(node: fx.Node, value: Value) -> Work:
    """Linears of one x, each of which reads it."""
    x: Any = node.args[1]
    parts = list(_linears(node, value))
    return Work(
        tuple(part.product for part in parts),
        read=len(parts) * value.bytes(x) + sum(value.bytes(p) for part in parts for p in part.parameters),
        written=value.bytes(node),
        launches=len(parts),
    )


@dataclass(frozen=True)
class _Linear:
    """One of several linears of one x: its product, its parameters, and the elements and bytes of its result."""

    product: Product
    weight: fx.Node
    bias: fx.Node | None
    count: Number
    bytes: Number

    @property
    def parameters(self) -> list[fx.Node]:
        return [self.weight] if self.bias is None else [self.weight, self.bias]


def _linears(node: fx.Node, value: Value) -> Iterable[_Linear]:
    x, weights, biases = node.args[1], node.args[2], argument(node, 3, "biases")
    inner = value.shape(x)[-1]  # type: ignore[arg-type]
    rows = zip(weights, biases or [None] * len(weights), value.shape(node), node.meta["val"], strict=True)  # type: ignore[arg-type]
    for weight, bias, shape, made in rows:
        product = Product(1, prod(shape[:-1]), shape[-1], inner)
        yield _Linear(product, weight, bias, prod(shape), prod(shape) * made.element_size())


def _differentiate_several(node: fx.Node, value: Value, wanted: Sequence[fx.Node]) -> Work:
    """The gradients of x are added up by the products that make them."""
    x: Any = node.args[1]
    size, work, overlapped = value.bytes(x), Work(), Work()
    for index, part in enumerate(_linears(node, value)):
        made = part.product
        if x in wanted:
            turned = Product(made.batch, made.rows, made.inner, made.columns)
            read = part.bytes + value.bytes(part.weight) + (size if index else 0)
            work += Work((turned,), read=read, written=size, launches=1)
        if part.weight in wanted:
            turned = Product(made.batch, made.inner, made.columns, made.rows)
            overlapped += Work(
                (turned,), read=part.bytes + size, written=value.bytes(part.weight), launches=1
            )
        if part.bias in wanted and part.bias is not None:
            overlapped += Work(
                elementwise=part.count, read=part.bytes, written=value.bytes(part.bias), launches=1
            )
    return _hide(work, overlapped, size if x in wanted else 0)


def _differentiate_copied(node: fx.Node, value: Value, wanted: Sequence[fx.Node]) -> Work:
    """Return the gradient of x, its all-reduce in place, and the overlapped gradients of weight and bias."""
    x: Any = node.args[1]
    own = [source for source in wanted if source is x]
    others = [source for source in wanted if source is not x]
    work = differentiate_product(node, value, own)
    if node.target is collectives.copied_linear_gelu:
        factors = [source for source in others if source in _factors(node)]
        work += _differentiate_activation(node, value, [s for s in others if s not in factors])
        others = factors
    return _hide(work, differentiate_product(node, value, others), value.bytes(x) if own else 0)


def _hide(work: Work, overlapped: Work, reduced: Number) -> Work:
    """Return `work`, an all-reduce after it, and the work `overlapped` with that."""
    if not reduced:
        return work + overlapped
    return replace(work + overlapped + Work(reduced=reduced, launches=1), overlapped=overlapped)


def attend(node: fx.Node, value: Value) -> Work:
    """Return the work of attention whose scores stay on the chip, with a statistic per row (FlashAttention, 2022)."""
    return Work(
        tuple(_attention(node, value)),
        read=sum(map(value.bytes, tensor_arguments(node))),
        written=value.bytes(node) + statistics(node, value),
        launches=1,
    )


def differentiate_attention(node: fx.Node, value: Value, wanted: Sequence[fx.Node]) -> Work:
    """Return the work of the scores again and four products, after each row's sum of gradient times result."""
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
    collectives.copied_linear_gelu: _multiply_gelu,
    collectives.copied_linears: _multiply_several,
    **dict.fromkeys([FUSED, kernels.grouped_attention], attend),
}
BACKWARDS: Mapping[Any, Callable[[fx.Node, Value, Sequence[fx.Node]], Work]] = {
    **dict.fromkeys(PRODUCTS, differentiate_product),
    kernels.linear_gelu: _differentiate_gelu,
    collectives.copied_linears: _differentiate_several,
    **dict.fromkeys(
        [collectives.copied_linear, collectives.copied_linear_gelu, collectives.copied_split_linear],
        _differentiate_copied,
    ),
    **dict.fromkeys([FUSED, kernels.grouped_attention], differentiate_attention),
}
